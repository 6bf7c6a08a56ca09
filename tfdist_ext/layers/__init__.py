# SPDX-License-Identifier: Apache-2.0
"""Layers whose weights are partitioned over the ranks."""

from tfdist_ext.layers.full_sparse import FullSparse

__all__ = ["FullSparse"]
