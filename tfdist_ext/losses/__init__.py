# SPDX-License-Identifier: Apache-2.0
"""Losses of retrieval, whose negatives are those of the whole batch."""

from tfdist_ext.losses.gathering import gather_candidates
from tfdist_ext.losses.retrieval import Retrieval

__all__ = ["Retrieval", "gather_candidates"]
