# SPDX-License-Identifier: Apache-2.0
"""Last stage: results travel back to the rank of their sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext.collectives.collectives import Collectives
from tfdist_ext.embedding.feature import Feature
from tfdist_ext.embedding.input_dist import Route
from tfdist_ext.embedding.wire import Wire
from tfdist_ext.ops import lookup_ops
from tfdist_ext.ops import pack_ops
from tfdist_ext.ops import wire_ops


def output_dist(
    values: tf.Tensor,
    send_splits: tf.Tensor,
    route: Route,
    features: Sequence[Feature],
    collectives: Collectives,
    wire: Wire,
) -> list[tf.Tensor]:
    """Sends results back and puts each sample's parts together.

    The gradient takes the same way in the other direction, in the same
    wire dtype.

    Args:
        values: float32 `[v]`, from `lookup`.
        send_splits: int64 `[world_size]`, from `lookup`.
        route: from `input_dist`.
        features: what the results are of.
        collectives: of the strategy.
        wire: how the numbers travel.

    Returns:
        Per feature float32 `[b, dim]`; zeros for samples without ids.
    """
    seed, gradient_seed = wire.seeds(collectives.group.rank)
    numbers = wire_ops.to_wire(
        values,
        tf.as_dtype(wire.dtype),
        rounding=wire.rounding,
        seed=seed,
    )
    label = f"{wire.label}/results"
    if wire.packed:
        parts = _packed_all_to_all(numbers, send_splits, collectives, label)
    else:
        parts, _ = collectives.all_to_all(numbers, send_splits, label)
    parts = wire_ops.from_wire(
        parts, rounding=wire.rounding, seed=gradient_seed
    )
    return lookup_ops.join_parts(
        parts,
        route.sample_ids,
        route.sample_splits,
        route.samples,
        route.gradient_scale,
        placements=[feature.placement for feature in features],
        world_size=collectives.group.world_size,
    )


def _packed_all_to_all(
    numbers: tf.Tensor,
    send_splits: tf.Tensor,
    collectives: Collectives,
    label: str,
) -> tf.Tensor:
    def exchange(
        values: tf.Tensor, splits: tf.Tensor, label: str
    ) -> tuple[tf.Tensor, tf.Tensor]:
        payload, sizes = pack_ops.pack_numbers(values, splits)
        payload, sizes = collectives.all_to_all(payload, sizes, label)
        return pack_ops.unpack_numbers(payload, sizes, values.dtype)

    @tf.custom_gradient
    def differentiable(values: tf.Tensor) -> Any:
        parts, splits = exchange(values, send_splits, label)

        def grad(upstream: tf.Tensor) -> tf.Tensor:
            return exchange(upstream, splits, f"{label}/gradient")[0]

        return parts, grad

    return differentiable(numbers)
