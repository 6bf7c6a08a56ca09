# SPDX-License-Identifier: Apache-2.0
"""Ids of a batch, the one form that all kinds of inputs are brought to."""

from __future__ import annotations

import dataclasses

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Ids:
    """Ids of a batch, one list per sample (CSR).

    Attributes:
        values: int32 or int64 `[n]`.
        row_splits: int64 `[b + 1]`; sample s has the ids
            `values[row_splits[s] : row_splits[s + 1]]`.
        weights: float32 `[n]`, or `[0]` when all weights are one.
    """

    values: tf.Tensor
    row_splits: tf.Tensor
    weights: tf.Tensor
