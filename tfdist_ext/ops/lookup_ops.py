# SPDX-License-Identifier: Apache-2.0
"""Ops on rows of local tables: initial values, lookup and pooling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.keras_internals import value_of
from tfdist_ext.ops.id_ops import placement_attributes
from tfdist_ext.ops.id_ops import same_placement_as
from tfdist_ext.ops.library import library
from tfdist_ext.ops.row_counts import RowCounts
from tfdist_ext.tables.placement import FeaturePlacement
from tfdist_ext.tables.placement import ShardSpec
from tfdist_ext.tables.placement import spec_from_json
from tfdist_ext.tables.placement import spec_to_json
from tfdist_ext.type_names import Gradient
from tfdist_ext.type_names import Variable


def lookup(
    tables: Sequence[Variable],
    row_splits: tf.Tensor,
    rows: tf.Tensor,
    weights: tf.Tensor,
    served: tf.Tensor,
    *,
    feature_tables: Sequence[int],
) -> tuple[tf.Tensor, tf.Tensor]:
    """Sums weighted rows of tables per sample.

    For example, with two ranks, feature 0 in a table of 2 columns and feature 1
    in a table of 1 column:

        served [[1, 2], [0, 1]] -> values [a0 a1 b c d], send_splits [4, 1]

    a0 a1 is the result of rank 0's sample for feature 0, b and c are the
    results of its samples for feature 1, and d is that for rank 1's sample.

    Tables are read in place. The gradient of each table is a
    `tf.IndexedSlices` of unique, ascending rows with float32 values. Its
    `dense_shape` is marked with the shard that the gradient belongs to.

    Args:
        tables: float32 or bfloat16 variables `[rows, d]` of TensorFlow or
            Keras.
        row_splits: int64 `[S + 1]`, row splits of the samples.
        rows: int64 `[n]`, rows of the table of the sample's feature.
        weights: float32 `[n]`, or `[0]` if all weights are 1.
        served: int64 `[world_size, F]`, samples of every rank and feature.
        feature_tables: index of every feature's table; -1 for a feature
            without samples on this rank.

    Returns:
        The results `[served[w, f], d]` of every rank w and feature f,
        concatenated, float32 `[V]`, zeros for a sample without rows; and the
        number of values for every rank, int64 `[world_size]`.

    Raises:
        tf.errors.InvalidArgumentError: if rows are bad or inputs are malformed.
            On a GPU bad rows are skipped; `decode_ids` and `merge_ids` check.
    """
    variables = [component(value_of(t)) for t in tables]
    for variable in variables:
        watch(variable)
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


def watch(variable: tf.Variable) -> None:
    """Tells tapes of a variable of which an op reads only the handle."""
    internals.variable_accessed(variable)


def component(variable: tf.Variable) -> tf.Variable:
    """Returns this replica's variable, if every replica has its own."""
    strategy = getattr(variable, "distribute_strategy", None)
    if strategy is None:
        return variable
    components = strategy.experimental_local_results(variable)
    if len(components) > 1 and not tf.distribute.in_cross_replica_context():
        handle = variable.handle
        return next(each for each in components if each.handle is handle)
    return components[0]


@tf.RegisterGradient("Tfdist>Lookup")
def _lookup_gradient(
    op: tf.Operation, grad: tf.Tensor, _: tf.Tensor
) -> list[Gradient]:
    shapes = [tf.TensorShape(s).as_list() for s in op.get_attr("table_shapes")]
    row_splits, rows, weights, served = op.inputs[len(shapes) :]
    slices = _gradients(
        *(shapes, op.get_attr("shards")),
        *(row_splits, rows, weights, served, grad),
        op.get_attr("feature_tables"),
    )
    return [*slices, None, None, None, None]


def row_gradients(
    tables: Sequence[Variable],
    row_splits: tf.Tensor,
    rows: tf.Tensor,
    weights: tf.Tensor,
    served: tf.Tensor,
    grad: tf.Tensor,
    *,
    feature_tables: Sequence[int],
) -> list[tf.IndexedSlices]:
    """Gradients of tables, as a tape gets them from `lookup`.

    Args:
        tables: see `lookup`; so are the other arguments.
        row_splits: int64 `[S + 1]`.
        rows: int64 `[n]`.
        weights: float32 `[n]`, or `[0]`.
        served: int64 `[world_size, F]`.
        grad: float32 `[V]`, the gradient of the values.
        feature_tables: index of every feature's table, or -1.
    """
    variables = [component(value_of(table)) for table in tables]
    return _gradients(
        [variable.shape.as_list() for variable in variables],
        [spec_to_json(marks.shard_spec(each)) for each in variables],
        *(row_splits, rows, weights, served, grad),
        feature_tables,
    )


def _gradients(
    shapes: Sequence[Sequence[int]],
    shards: Sequence[Any],
    row_splits: tf.Tensor,
    rows: tf.Tensor,
    weights: tf.Tensor,
    served: tf.Tensor,
    grad: tf.Tensor,
    feature_tables: Sequence[int],
) -> list[tf.IndexedSlices]:
    unique_rows, row_grads = lookup_grad(
        row_splits,
        rows,
        weights,
        served,
        grad,
        feature_tables=feature_tables,
        table_shapes=shapes,
    )
    slices = []
    for table, (shape, shard, touched, values) in enumerate(
        zip(shapes, shards, unique_rows, row_grads, strict=True)
    ):
        counts = RowCounts(
            row_splits,
            rows,
            served,
            tuple(feature_tables),
            table,
            shape[0],
            marks.samples_of_lists(rows),
        )
        marks.set_row_counts(touched, counts)
        slices.append(
            unique_slices(values, touched, shape, spec_from_json(shard))
        )
    return slices


def unique_slices(
    values: tf.Tensor,
    rows: tf.Tensor,
    shape: Sequence[int],
    spec: ShardSpec | None,
) -> tf.IndexedSlices:
    """A gradient of unique rows.

    Args:
        values: float32 `[n, d]`.
        rows: int64 `[n]`.
        shape: shape of what the gradient is of.
        spec: the shard that it is marked with; None for an entire table.
    """
    # TensorFlow's choice of dtype; branches of `tf.cond` must agree on it.
    kind = tf.int32 if max(shape) <= tf.int32.max else tf.int64
    dense_shape = tf.constant(list(shape), kind)
    if spec is not None:
        marks.set_gradient_spec(dense_shape, spec)
    marks.set_unique(dense_shape)
    slices = tf.IndexedSlices(values, rows, dense_shape)
    marks.set_table_rows(slices)
    return slices


def mark_unique_rows(slices: tf.IndexedSlices) -> None:
    """Marks a gradient so that rows which occur several times are summed."""
    if slices.dense_shape is not None:
        marks.set_unique(slices.dense_shape)


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
    """Computes the gradient of `lookup` for the rows that it has read.

    Args:
        row_splits: int64 `[S + 1]`, row splits of the samples.
        rows: int64 `[n]`, rows of the table of the sample's feature.
        weights: float32 `[n]`, or `[0]` if all weights are 1.
        served: int64 `[world_size, F]`, samples of every rank and feature.
        grad: float32 `[V]`, the gradient of the values.
        feature_tables: index of every feature's table, or -1.
        table_shapes: the shape `[rows, d]` of every table.

    Returns:
        For every table the unique rows in ascending order, int64 `[u]`, and
        their gradients, float32 `[u, d]`, bitwise equal for any number of
        threads.

    Raises:
        tf.errors.InvalidArgumentError: if rows are bad or inputs are malformed.
            On a GPU bad rows are skipped.
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
    """Joins the results of all owners for this rank's samples.

    For example, with a table of 2 columns placed by row on two ranks:

        parts [a0 a1 b0 b1], sample_ids [0 0], sample_splits [[1] [1]],
        samples [2]  ->  [[a0 + b0, a1 + b1], [0, 0]]

    If the table is placed by column, parts [a b] give [[a, b], [0, 0]].

    Args:
        parts: float32 `[V]`, values of rank 0, then values of rank 1, and so
            on. The values of a rank are ordered by feature, then by sample.
        sample_ids: int32 `[m]`, the samples of these values, in the same
            order; ascending within a rank and feature.
        sample_splits: int64 `[world_size, F]`, the number of these samples for
            every rank and feature.
        samples: int64 `[F]`, the number of samples of every feature.
        gradient_scale: float32 scalar, the factor of the gradient. If it is 0,
            the gradient is zero, even if the upstream gradient contains NaN.
        placements: the placement of every feature's table.
        world_size: the number of ranks.

    Returns:
        Per feature float32 `[samples, dim]`: row parts are added, and column
        parts are put side by side. Samples without ids are zeros.

    Raises:
        tf.errors.InvalidArgumentError: if inputs are malformed.
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


def parts_of_gradient(
    gradients: Sequence[tf.Tensor],
    sample_ids: tf.Tensor,
    sample_splits: tf.Tensor,
    *,
    placements: Sequence[FeaturePlacement],
    world_size: int,
) -> tf.Tensor:
    """Divides gradients of samples into the parts for all owners.

    It is the gradient of `join_parts` with respect to the parts.

    Args:
        gradients: per feature float32 `[samples, dim]`.
        sample_ids: int32 `[m]`, see `join_parts`.
        sample_splits: int64 `[world_size, F]`, see `join_parts`.
        placements: the placement of every feature's table.
        world_size: the number of ranks.

    Returns:
        float32 `[V]`, the values for rank 0, then those for rank 1, and so on.
    """
    return library().tfdist_combine_grad(
        list(gradients),
        sample_ids,
        sample_splits,
        1.0,
        **placement_attributes(placements, world_size),
    )


@tf.RegisterGradient("Tfdist>Combine")
def _combine_gradient(
    op: tf.Operation, *grads: tf.Tensor
) -> list[tf.Tensor | None]:
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
        row_splits: int64 `[b + 1]`, row splits of the samples.
        positions: int64 `[n]`, rows of the matrix.
        weights: float32 `[n]`, or `[0]` if all weights are 1.

    Returns:
        The sums, float32 `[b, d]`; zeros for a sample without positions. They
        are differentiable with respect to the matrix, with a dense gradient.

    Raises:
        tf.errors.InvalidArgumentError: if positions are bad or inputs are
            malformed.
    """
    return library().tfdist_pool(matrix, row_splits, positions, weights)


@tf.RegisterGradient("Tfdist>Pool")
def _pool_gradient(op: tf.Operation, grad: tf.Tensor) -> list[tf.Tensor | None]:
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
    """Computes the initial values of one cell of a table.

    Args:
        rows: number of rows of the entire table.
        row_part: the index of the row part.
        row_parts: the number of row parts.
        local_rows: number of rows to make: all rows of the part, or 0.
        first_column: the first column of the cell.
        local_dim: number of columns of the cell.
        seed: int64; a value depends on the seed, the row's id and the column.
        distribution: "zeros", "constant" (a), "uniform" (from a up to b),
            "normal" (mean a, standard deviation b) or "truncated_normal"
            (the same, truncated at two standard deviations).
        a: the first parameter of the distribution.
        b: the second parameter of the distribution.

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
) -> tf.Operation:
    """Resets rows of a table, or of a slot, to their initial values.

    Args:
        variable: float32 or bfloat16 `[local_rows, local_dim]`, or a slot
            `[local_rows]`; written in place.
        ids: int64 `[n]`, rows of the entire table; rows of other cells are
            ignored.
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
