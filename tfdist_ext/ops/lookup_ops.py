# SPDX-License-Identifier: Apache-2.0
"""Ops on rows of local tables: initial values, lookups, pooling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.keras_internals import KERAS_3
from tfdist_ext.keras_internals import value_of
from tfdist_ext.ops.id_ops import placement_attributes
from tfdist_ext.ops.id_ops import same_placement_as
from tfdist_ext.ops.library import library
from tfdist_ext.tables.placement import FeaturePlacement
from tfdist_ext.tables.placement import spec_from_json
from tfdist_ext.tables.placement import spec_to_json


def lookup(
    tables: Sequence[Any],
    row_splits: tf.Tensor,
    rows: tf.Tensor,
    weights: tf.Tensor,
    served: tf.Tensor,
    *,
    feature_tables: Sequence[int],
) -> tuple[tf.Tensor, tf.Tensor]:
    """Sums weighted rows of tables per sample.

    With two ranks, feature 0 in a table of 2 columns, feature 1 in one of 1:

        served [[1, 2], [0, 1]] -> values [a0 a1 b c d], send_splits [4, 1]

    a0 a1 being the result of rank 0's sample for feature 0, b and c those of
    its samples for feature 1, d that of rank 1's sample for feature 1.

    The tables are read in place. The gradient of each is a `tf.IndexedSlices`
    of unique, ascending rows with float32 values; what it is the gradient
    of is marked on its `dense_shape`.

    Args:
        tables: float32 or bfloat16 `[rows, d]`, TensorFlow's or Keras's
            variables.
        row_splits: int64 `[S + 1]`.
        rows: int64 `[n]`, of the table of the sample's feature.
        weights: float32 `[n]` or `[0]`.
        served: int64 `[world_size, F]`, samples of every rank and feature.
        feature_tables: index of every feature's table; -1 for a feature of
            which no sample is served here.

    Returns:
        float32 `[V]`, the results `[served[w, f], d]` of every rank w and
        feature f behind each other, zeros for a sample without rows, and int64
        `[world_size]`, how many of the numbers are for every rank.

    Raises:
        tf.errors.InvalidArgumentError: bad rows, malformed inputs. On a GPU
            `decode_ids` and `merge_ids` have refused bad rows, and others are
            left out.
    """
    variables = [_component(value_of(t)) for t in tables]
    for variable in variables:
        # The handle alone does not tell; reading all would copy the table.
        internals.variable_accessed(variable)
    values, send_splits = library().tfdist_lookup(
        [variable.handle for variable in variables],
        row_splits,
        rows,
        weights,
        served,
        feature_tables=list(feature_tables),
        table_shapes=[variable.shape for variable in variables],
        shards=[
            spec_to_json(marks.shard_spec(variable)) for variable in variables
        ],
    )
    return values, send_splits


def _component(variable: Any) -> Any:
    """The variable of this replica, if every replica has its own."""
    strategy = getattr(variable, "distribute_strategy", None)
    if strategy is None:
        return variable
    components = strategy.experimental_local_results(variable)
    if len(components) > 1 and not tf.distribute.in_cross_replica_context():
        handle = variable.handle
        return next(each for each in components if each.handle is handle)
    return components[0]


@tf.RegisterGradient("Tfdist>Lookup")
def _lookup_gradient(op: Any, grad: tf.Tensor, _: tf.Tensor) -> list[Any]:
    shapes = [tf.TensorShape(s).as_list() for s in op.get_attr("table_shapes")]
    row_splits, rows, weights, served = op.inputs[len(shapes) :]
    unique_rows, row_grads = lookup_grad(
        row_splits,
        rows,
        weights,
        served,
        grad,
        feature_tables=op.get_attr("feature_tables"),
        table_shapes=shapes,
    )
    slices = []
    for shape, shard, touched, values in zip(
        shapes, op.get_attr("shards"), unique_rows, row_grads, strict=True
    ):
        # As TensorFlow makes them, which must agree in branches of `tf.cond`.
        kind = tf.int32 if max(shape) <= tf.int32.max else tf.int64
        dense_shape = tf.constant(shape, kind)
        spec = spec_from_json(shard)
        if spec is not None:
            marks.set_gradient_spec(dense_shape, spec)
        marks.set_unique(dense_shape)
        slices.append(tf.IndexedSlices(values, touched, dense_shape))
    return [*slices, None, None, None, None]


def mark_unique_rows(slices: tf.IndexedSlices) -> None:
    """Says that rows which occur several times are to be summed."""
    if slices.dense_shape is not None:
        marks.set_unique(slices.dense_shape)


def has_unique_rows(slices: tf.IndexedSlices) -> bool:
    """Whether one process would update each row of a gradient once.

    With this package's lookups and optimizers, and all of tf_keras. Those of
    Keras 3 take what a layer gives, and square each occurrence of a row.
    """
    if not KERAS_3:
        return True
    return marks.is_unique(slices)


def lookup_grad(
    row_splits: tf.Tensor,
    rows: tf.Tensor,
    weights: tf.Tensor,
    served: tf.Tensor,
    grad: tf.Tensor,
    *,
    feature_tables: Sequence[int],
    table_shapes: Sequence[Sequence[int]],
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """The gradient of `lookup` for the rows it touched.

    Args:
        row_splits: int64 `[S + 1]`.
        rows: int64 `[n]`.
        weights: float32 `[n]` or `[0]`.
        served: int64 `[world_size, F]`.
        grad: float32 `[V]`, gradient of the values.
        feature_tables: index of every feature's table, or -1.
        table_shapes: `[rows, d]` of every table.

    Returns:
        For every table the unique rows ascending, int64 `[u]`, and their
        gradients, float32 `[u, d]`; the same bits for any number of threads.

    Raises:
        tf.errors.InvalidArgumentError: bad rows, malformed inputs; on a GPU
            bad rows are left out.
    """
    unique_rows, row_grads = library().tfdist_lookup_grad(
        row_splits,
        rows,
        weights,
        served,
        grad,
        N=len(table_shapes),
        feature_tables=list(feature_tables),
        table_shapes=list(table_shapes),
    )
    return list(unique_rows), list(row_grads)


def join_parts(
    parts: tf.Tensor,
    sample_ids: tf.Tensor,
    sample_splits: tf.Tensor,
    samples: tf.Tensor,
    gradient_scale: tf.Tensor,
    *,
    placements: Sequence[FeaturePlacement],
    world_size: int,
) -> list[tf.Tensor]:
    """Puts together what the owners' lookups sent for this rank's samples.

    With a table of 2 columns on two ranks, by row:

        parts [a0 a1 b0 b1], sample_ids [0 0], sample_splits [[1] [1]],
        samples [2]  ->  [[a0 + b0, a1 + b1], [0, 0]]

    and by column, parts [a b]: [[a, b], [0, 0]].

    Args:
        parts: float32 `[V]`, values of rank 0, then those of rank 1 and so
            on; of every rank by feature, then by sample.
        sample_ids: int32 `[m]`, the samples that every rank has sent for
            every feature, in the same order; ascending for one of both.
        sample_splits: int64 `[world_size, F]`, how many those are.
        samples: int64 `[F]`, samples of every feature.
        gradient_scale: float32 scalar; the gradient is multiplied with it,
            and zero where it is 0 even if the upstream gradient holds NaN.
        placements: of every feature.
        world_size: number of ranks.

    Returns:
        float32 `[samples, dim]` of every feature: the sum of its row parts,
        its column parts beside each other, zeros for samples without ids.

    Raises:
        tf.errors.InvalidArgumentError: malformed inputs.
    """
    return list(
        library().tfdist_combine(
            parts,
            sample_ids,
            sample_splits,
            samples,
            gradient_scale,
            F=len(placements),
            **placement_attributes(placements, world_size),
        )
    )


@tf.RegisterGradient("Tfdist>Combine")
def _combine_gradient(op: Any, *grads: Any) -> list[Any]:
    _, sample_ids, sample_splits, _, gradient_scale = op.inputs
    values = library().tfdist_combine_grad(
        [tf.convert_to_tensor(grad) for grad in grads],
        sample_ids,
        sample_splits,
        gradient_scale,
        **same_placement_as(op),
    )
    return [values, None, None, None, None]


def pool(
    matrix: tf.Tensor,
    row_splits: tf.Tensor,
    positions: tf.Tensor,
    weights: tf.Tensor,
) -> tf.Tensor:
    """Sums weighted rows of a matrix per sample: `lookup` in a tensor.

    Args:
        matrix: float32 `[u, d]`, the unique rows of a batch.
        row_splits: int64 `[b + 1]`.
        positions: int64 `[n]`, rows of the matrix.
        weights: float32 `[n]` or `[0]`.

    Returns:
        float32 `[b, d]`, differentiable with respect to the matrix, densely;
        zeros for a sample without positions.

    Raises:
        tf.errors.InvalidArgumentError: bad positions, malformed inputs.
    """
    return library().tfdist_pool(matrix, row_splits, positions, weights)


@tf.RegisterGradient("Tfdist>Pool")
def _pool_gradient(op: Any, grad: tf.Tensor) -> list[Any]:
    matrix, row_splits, positions, weights = op.inputs
    matrix_grad = library().tfdist_pool_grad(
        tf.shape(matrix, tf.int64)[0], row_splits, positions, weights, grad
    )
    matrix_grad.set_shape(matrix.shape)
    return [matrix_grad, None, None, None]


def init_rows(
    *,
    rows: int,
    row_part: int,
    row_parts: int,
    local_rows: int,
    first_column: int,
    local_dim: int,
    seed: int | tf.Tensor,
    distribution: str,
    a: float = 0.0,
    b: float = 0.0,
) -> tf.Tensor:
    """One cell of a table's initial values.

    Args:
        rows: rows of the whole table.
        row_part: which part of the rows.
        row_parts: number of parts of the rows.
        local_rows: rows to make, all of the part or none.
        first_column: of the cell.
        local_dim: columns of the cell.
        seed: int64; with the row's id and the column it determines a value.
        distribution: "zeros", "constant" (a), "uniform" (from a up to b),
            "normal" (mean a, standard deviation b) or "truncated_normal"
            (the same, within two standard deviations).
        a: first parameter.
        b: second parameter.

    Returns:
        float32 `[local_rows, local_dim]`; padding rows are zero.
    """
    if distribution == "zeros":
        distribution, a = "constant", 0.0
    return library().tfdist_init_rows(
        tf.convert_to_tensor(seed, tf.int64),
        rows=rows,
        row_part=row_part,
        row_parts=row_parts,
        local_rows=local_rows,
        first_column=first_column,
        local_dim=local_dim,
        distribution=distribution,
        a=a,
        b=b,
    )


def reset_rows(
    variable: tf.Variable, ids: tf.Tensor, *, distribution: str, **block: Any
) -> Any:
    """Gives rows of a table, or of a slot, their initial values again.

    Args:
        variable: float32 or bfloat16 `[local_rows, local_dim]`, or a slot
            `[local_rows]`; written in place.
        ids: int64 `[n]`, of the whole table; those of other cells are left
            alone.
        distribution: see `init_rows`.
        **block: the other arguments of `init_rows`.

    Returns:
        The operation in a graph, None when executing eagerly.
    """
    if distribution == "zeros":
        distribution, block["a"] = "constant", 0.0
    seed = tf.convert_to_tensor(block.pop("seed"), tf.int64)
    return library().tfdist_reset_rows(
        variable.handle, ids, seed, distribution=distribution, **block
    )
