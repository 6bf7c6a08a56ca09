# SPDX-License-Identifier: Apache-2.0
"""First stage: ids travel to the ranks that own their rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import tensorflow as tf

from tfdist_ext.distribute.collectives import Collectives
from tfdist_ext.distribute.step import Step
from tfdist_ext.ops import embedding_ops
from tfdist_ext.sharding.config import ShardSpec

OutOfRange = Literal["error", "ignore"]


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


@dataclasses.dataclass(frozen=True)
class Route:
    """How pooled results find their way back to the samples.

    Attributes:
        samples: int64 scalar, samples of this rank's batch.
        sample_ids: int32 `[m]`, this rank's samples that have ids at an
            owner, grouped by owner.
        sample_splits: int64 `[world_size]`, how many of them at each owner.
        served_splits: int64 `[world_size]`, samples this rank pools for
            each rank.
        gradient_scale: float32 scalar, what this rank's gradients count.
    """

    samples: tf.Tensor
    sample_ids: tf.Tensor
    sample_splits: tf.Tensor
    served_splits: tf.Tensor
    gradient_scale: tf.Tensor


@dataclasses.dataclass(frozen=True)
class OwnedIds:
    """The rows of the local shard that some samples ask for.

    Attributes:
        row_splits: int64 `[s + 1]`, for the s samples served.
        rows: int64 `[n]`, rows of the local shard.
        weights: float32 `[n]`, or `[0]` when all weights are one.
    """

    row_splits: tf.Tensor
    rows: tf.Tensor
    weights: tf.Tensor


def merge_local(
    features: Sequence[Ids], rows: int, out_of_range: OutOfRange, layer: str
) -> OwnedIds:
    """One process: the ids of all features, checked, no exchange."""
    row_splits, merged, weights = embedding_ops.merge_ids(
        [f.values for f in features],
        [f.row_splits for f in features],
        [f.weights for f in features],
        vocabulary_size=rows,
        out_of_range=out_of_range,
        layer=layer,
    )
    return OwnedIds(row_splits, merged, weights)


def input_dist(
    features: Sequence[Ids],
    spec: ShardSpec,
    out_of_range: OutOfRange,
    collectives: Collectives,
) -> tuple[OwnedIds, Route]:
    """Sends the batch's ids to the owners of their rows, in one exchange.

    Args:
        features: inputs whose results are summed.
        spec: the table and its placement.
        out_of_range: what an id outside of the table does.
        collectives: of the strategy.

    Returns:
        What this rank shall look up, and the way back.

    Raises:
        tf.errors.InvalidArgumentError: on every rank, if an id on any rank
            is out of range and `out_of_range` is "error".
    """
    samples = tf.size(features[0].row_splits, tf.int64) - 1
    step = collectives.step
    weight = step.samples if step else tf.cast(samples, tf.float32)
    payload, splits, sample_ids, sample_splits = embedding_ops.encode_ids(
        [f.values for f in features],
        [f.row_splits for f in features],
        [f.weights for f in features],
        weight,
        rank=spec.rank,
        world_size=spec.world_size,
        vocabulary_size=spec.rows,
        placement=spec.placement,
        out_of_range=out_of_range,
        layer=spec.table,
    )
    label = f"{spec.table}/ids"
    if spec.placement == "row":
        message, splits = collectives.all_to_all(payload, splits, label)
    else:
        message, splits = collectives.gather_messages(payload, label)
    row_splits, rows, weights, served, shares = embedding_ops.decode_ids(
        message,
        splits,
        rank=spec.rank,
        world_size=spec.world_size,
        vocabulary_size=spec.rows,
        placement=spec.placement,
        layer=spec.table,
    )
    if step is not None:
        step.checks.append(served)
    scale = _gradient_scale(step, shares, spec.rank)
    return (
        OwnedIds(row_splits, rows, weights),
        Route(samples, sample_ids, sample_splits, served, scale),
    )


def _gradient_scale(
    step: Step | None, shares: tf.Tensor, rank: int
) -> tf.Tensor:
    """This rank's samples relative to the mean of all ranks."""
    if step is None or not step.weighted:
        return tf.constant(1.0)
    return tf.math.divide_no_nan(shares[rank], tf.reduce_mean(shares))
