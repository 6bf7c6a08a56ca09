# SPDX-License-Identifier: Apache-2.0
"""Datasets with a position that checkpoints keep."""

from tfdist_ext.data.positioned import PositionedDataset

__all__ = ["PositionedDataset"]
