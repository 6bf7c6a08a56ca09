# SPDX-License-Identifier: Apache-2.0
"""Last stage: pooled results travel back to the rank of their sample."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist_ext.distribute.collectives import Collectives
from tfdist_ext.embedding.input_dist import Route
from tfdist_ext.sharding.config import ShardSpec


def output_dist(
    pooled: tf.Tensor,
    route: Route,
    spec: ShardSpec,
    collectives: Collectives,
    wire_dtype: tf.DType,
) -> tf.Tensor:
    """Sends pooled results back and puts a sample's parts together.

    The gradient takes the same way in the other direction, in the same
    wire dtype.

    Args:
        pooled: float32 `[s, local_dim]`, one row per sample served.
        route: from `input_dist`.
        spec: the table and its placement.
        collectives: of the strategy.
        wire_dtype: dtype of the numbers that travel.

    Returns:
        float32 `[b, dim]`; zeros for samples without ids.
    """
    combine = _sum_partials if spec.placement == "row" else _join_columns
    result = combine(tf.cast(pooled, wire_dtype), route, spec, collectives)
    return _scale_gradient(result, route.gradient_scale)


def _sum_partials(
    pooled: tf.Tensor, route: Route, spec: ShardSpec, collectives: Collectives
) -> tf.Tensor:
    parts, _ = collectives.all_to_all(
        pooled, route.served_splits, f"{spec.table}/results"
    )
    return tf.math.unsorted_segment_sum(
        tf.cast(parts, tf.float32), route.sample_ids, route.samples
    )


def _join_columns(
    pooled: tf.Tensor, route: Route, spec: ShardSpec, collectives: Collectives
) -> tf.Tensor:
    # Owners hold different numbers of columns, so numbers travel, not rows.
    flat, _ = collectives.all_to_all(
        tf.reshape(pooled, [-1]),
        route.served_splits * spec.local_dim,
        f"{spec.table}/results",
    )
    widths = [spec.dims_of(rank) for rank in range(spec.world_size)]
    served = tf.size(route.sample_ids, tf.int64)
    sizes = served * tf.constant(widths, tf.int64)
    blocks = [
        tf.reshape(block, [-1, width])
        for block, width in zip(
            tf.split(tf.cast(flat, tf.float32), sizes, num=spec.world_size),
            widths,
            strict=True,
        )
    ]
    return tf.math.unsorted_segment_sum(
        tf.concat(blocks, 1), route.sample_ids, route.samples
    )


@tf.custom_gradient
def _scale_gradient(x: tf.Tensor, scale: tf.Tensor) -> Any:
    def grad(upstream: tf.Tensor) -> tuple[tf.Tensor, None]:
        # A rank without samples may carry NaN (a mean over nothing).
        return tf.math.multiply_no_nan(upstream, scale), None

    return tf.identity(x), grad
