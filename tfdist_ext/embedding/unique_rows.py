# SPDX-License-Identifier: Apache-2.0
"""What surrounds the exchange of a feature of unique rows: rows travel.

Each rank asks once for every unique row of its batch and pools by itself.
That is less to send where samples have few ids and ids repeat between them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tfdist_ext.batches.ids import Ids
from tfdist_ext.embedding.feature import Feature
from tfdist_ext.ops import id_ops
from tfdist_ext.ops import lookup_ops

# More rows than any table has. Ids are shifted by it where bad ones, also
# negative ones, must pass, for the exchange to report.
_SHIFT = 1 << 40


@dataclasses.dataclass(frozen=True)
class Pooling:
    """How the samples of a batch are made of its unique rows.

    Attributes:
        row_splits: int64 `[b + 1]`.
        positions: int64 `[n]`, indices of unique rows.
        weights: float32 `[n]`, or `[0]` when all weights are one.
    """

    row_splits: tf.Tensor
    positions: tf.Tensor
    weights: tf.Tensor


def ask_once(lists: Sequence[Ids], feature: Feature) -> tuple[Ids, Pooling]:
    """The unique ids of a batch, as samples of one id each.

    Args:
        lists: the lists whose results are summed.
        feature: what they are looked up in.
    """
    ignore = feature.out_of_range == "ignore"
    values = [tf.cast(part.values, tf.int64) for part in lists]
    row_splits, ids, weights = id_ops.merge_ids(
        values if ignore else [_shifted(ids) for ids in values],
        [part.row_splits for part in lists],
        [part.weights for part in lists],
        vocabulary_size=feature.spec.rows if ignore else 2 * _SHIFT,
        out_of_range=feature.out_of_range,
        layer=feature.name,
    )
    unique, positions = id_ops.unique_ids(ids)
    if not ignore:
        unique -= _SHIFT
    of_one_id = tf.range(tf.size(unique, tf.int64) + 1, dtype=tf.int64)
    return (
        Ids(unique, of_one_id, tf.zeros([0])),
        Pooling(row_splits, positions, weights),
    )


def _shifted(ids: tf.Tensor) -> tf.Tensor:
    return tf.clip_by_value(ids, -_SHIFT, _SHIFT - 1) + _SHIFT


def pool(rows: tf.Tensor, pooling: Pooling) -> tf.Tensor:
    """Sums of rows, float32 `[b, dim]`, from unique rows `[u, dim]`."""
    return lookup_ops.pool(
        rows, pooling.row_splits, pooling.positions, pooling.weights
    )
