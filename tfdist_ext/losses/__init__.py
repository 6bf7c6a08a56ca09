# SPDX-License-Identifier: Apache-2.0
"""Losses that see the whole batch, and what they are made of."""

from tfdist_ext.losses.gathering import gather_candidates
from tfdist_ext.losses.over_batch import batch_mean
from tfdist_ext.losses.over_batch import batch_sum
from tfdist_ext.losses.over_batch import gather_batch
from tfdist_ext.losses.retrieval import Retrieval

__all__ = [
    "Retrieval",
    "batch_mean",
    "batch_sum",
    "gather_batch",
    "gather_candidates",
]
