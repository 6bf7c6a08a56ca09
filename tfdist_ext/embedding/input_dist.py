# SPDX-License-Identifier: Apache-2.0
"""First stage: ids travel to the ranks that own their rows."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext.batches.ids import Ids
from tfdist_ext.collectives.collectives import Collectives
from tfdist_ext.collectives.step import Step
from tfdist_ext.embedding.feature import Feature
from tfdist_ext.ops import id_ops


@dataclasses.dataclass(frozen=True)
class OwnedIds:
    """The rows of the local shards that some samples ask for.

    Entries are ordered by asking rank, feature and sample.

    Attributes:
        row_splits: int64 `[s + 1]`, for the s samples served.
        rows: int64 `[n]`, rows of the local shards.
        weights: float32 `[n]`, or `[0]` when all weights are one.
        served: int64 `[world_size, features]`, samples of each rank and
            feature.
    """

    row_splits: tf.Tensor
    rows: tf.Tensor
    weights: tf.Tensor
    served: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Route:
    """How results find their way back to the samples.

    Attributes:
        samples: int64 `[features]`, samples of this rank's batch.
        sample_ids: int32 `[m]`, this rank's samples that have ids at an
            owner, grouped by owner and feature.
        sample_splits: int64 `[world_size, features]`, how many of them.
        gradient_scale: float32 scalar, what this rank's gradients count.
    """

    samples: tf.Tensor
    sample_ids: tf.Tensor
    sample_splits: tf.Tensor
    gradient_scale: tf.Tensor


def join_lists(lists: Sequence[Ids]) -> Ids:
    """One list of the samples of several, one list behind the other."""
    if len(lists) == 1:
        return lists[0]
    rows = [each.values for each in lists]
    ends = tf.cumsum(tf.stack([tf.size(part, tf.int64) for part in rows]))
    shifted = [
        each.row_splits[1:] + ends[i - 1] if i else each.row_splits
        for i, each in enumerate(lists)
    ]
    weights = _join_weights([each.weights for each in lists], rows)
    return Ids(tf.concat(rows, 0), tf.concat(shifted, 0), weights)


def _join_weights(
    weights: Sequence[tf.Tensor], rows: Sequence[tf.Tensor]
) -> tf.Tensor:
    """One list of weights; still empty if all of them are one."""
    given = tf.add_n([tf.size(part) for part in weights])

    def with_ones() -> tf.Tensor:
        # Weights of a feature without any are ones, as many as its rows.
        missing = [
            tf.size(r) - tf.size(w) for w, r in zip(weights, rows, strict=True)
        ]
        return tf.concat(
            [
                tf.concat([part, tf.ones([count])], 0)
                for part, count in zip(weights, missing, strict=True)
            ],
            0,
        )

    return tf.cond(given > 0, with_ones, lambda: tf.zeros([0]))


def input_dist(
    ids: Sequence[Sequence[Ids]],
    features: Sequence[Feature],
    collectives: Collectives,
    label: str,
    weight: tf.Tensor | None = None,
) -> tuple[OwnedIds, Route]:
    """Sends the batch's ids to the owners of their rows, in one exchange.

    Args:
        ids: per feature, the lists whose results are summed.
        features: what they are looked up in, and where that is.
        collectives: of the strategy.
        label: names the exchange in errors.
        weight: float32 scalar, for how much this rank counts; None for the
            step's samples.

    Returns:
        What this rank shall look up, and the way back.

    Raises:
        tf.errors.InvalidArgumentError: on every rank, if an id on any rank
            is out of range and its feature's `out_of_range` is "error".
    """
    step = collectives.step
    group = collectives.group
    where: dict[str, Any] = {
        "placements": [feature.placement for feature in features],
        "rank": group.rank,
        "world_size": group.world_size,
    }
    samples = tf.stack(
        [tf.size(lists[0].row_splits, tf.int64) - 1 for lists in ids]
    )
    if weight is None:
        weight = tf.cast(samples[0], tf.float32)
        if step is not None:
            weight = collectives.samples()
    # All ranks know it: of the tables of one exchange, all or none.
    on_gpu = any(feature.spec.storage == "device" for feature in features)
    payload, splits, sample_ids, sample_splits = _encode(
        ids, features, weight, on_gpu, where
    )
    message, splits = collectives.all_to_all(payload, splits, f"{label}/ids")
    # Where the rows are looked up: TensorFlow prefers a GPU.
    with contextlib.nullcontext() if on_gpu else tf.device("CPU:0"):
        row_splits, rows, weights, served, shares = id_ops.decode_ids(
            message, splits, **where
        )
    scale = _gradient_scale(step, shares, group.rank)
    return (
        OwnedIds(row_splits, rows, weights, served),
        Route(samples, sample_ids, sample_splits, scale),
    )


def _encode(
    ids: Sequence[Sequence[Ids]],
    features: Sequence[Feature],
    weight: tf.Tensor,
    in_blocks: bool,
    where: dict[str, Any],
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    flat = [part for lists in ids for part in lists]
    values = [part.values for part in flat]
    if len({each.dtype for each in values}) > 1:
        values = [tf.cast(each, tf.int64) for each in values]
    return id_ops.encode_ids(
        values,
        [part.row_splits for part in flat],
        [part.weights for part in flat],
        weight,
        list_features=[f for f, lists in enumerate(ids) for _ in lists],
        out_of_range=[feature.out_of_range for feature in features],
        unique=[feature.unique for feature in features],
        in_blocks=in_blocks,
        **where,
    )


def _gradient_scale(
    step: Step | None, shares: tf.Tensor, rank: int
) -> tf.Tensor:
    """This rank's share of the samples where ranks are averaged, else 1."""
    if step is None or not step.weighted:
        return tf.constant(1.0)
    return tf.math.divide_no_nan(shares[rank], tf.reduce_sum(shares))
