# SPDX-License-Identifier: Apache-2.0
"""Ops of the embedding stages: ids over the wire, pooled lookup, tables.

The ids of a batch are in CSR form: sample s has `ids[row_splits[s] :
row_splits[s + 1]]`. Weights are float32 of the same length, or empty when all
are one. `reference.py` has the same functions made of stock TensorFlow ops.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any
from typing import Literal

import tensorflow as tf

from tfdist_ext.ops.library import library
from tfdist_ext.sharding.config import Placement
from tfdist_ext.sharding.config import ShardSpec

OutOfRange = Literal["error", "ignore"]


def encode_ids(
    ids: Sequence[tf.Tensor],
    row_splits: Sequence[tf.Tensor],
    weights: Sequence[tf.Tensor],
    samples: tf.Tensor,
    *,
    rank: int,
    world_size: int,
    vocabulary_size: int,
    placement: Placement,
    out_of_range: OutOfRange = "error",
    layer: str = "",
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """Codes a batch's ids for the ranks that own their rows.

    The lists are merged per sample and duplicates combined. With 2 ranks and
    row placement, rank 0 owning the even ids:

        ids [[4, 7, 4], [2]]  ->  to rank 0: sample 0 {4: 2}, sample 1 {2: 1}
                                  to rank 1: sample 0 {7: 1}
                                  sample_ids [0, 1, 0], sample_splits [2, 1]

    Args:
        ids: lists of int32 or int64 `[n_i]`, to be merged.
        row_splits: int64 `[b + 1]` for every list.
        weights: float32 `[n_i]` or `[0]` for every list.
        samples: float32 scalar, this rank's weight in the batch mean.
        rank: of this process.
        world_size: number of ranks.
        vocabulary_size: rows of the whole table, at most 2^40.
        placement: "row" or "column".
        out_of_range: "error" makes `decode_ids` fail on every rank, "ignore"
            drops the id.
        layer: name for errors.

    Returns:
        `payload` uint8 `[B]`, the messages to all ranks, one for everybody
        with placement "column"; `send_splits` int64 `[world_size]`, their
        bytes; `sample_ids` int32 `[m]`, the samples in every message
        ascending; `sample_splits` int64 `[world_size]`, how many those are.

    Raises:
        tf.errors.InvalidArgumentError: malformed row_splits or lengths.
    """
    payload, send_splits, sample_ids, sample_splits = (
        library().tfdist_encode_ids(
            ids,
            row_splits,
            weights,
            samples,
            rank=rank,
            world_size=world_size,
            vocabulary_size=vocabulary_size,
            placement=placement,
            out_of_range=out_of_range,
            layer=layer,
        )
    )
    return payload, send_splits, sample_ids, sample_splits


def decode_ids(
    payload: tf.Tensor,
    splits: tf.Tensor,
    *,
    rank: int,
    world_size: int,
    vocabulary_size: int,
    placement: Placement,
    layer: str = "",
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """Decodes what `encode_ids` of all ranks sent to this one.

    Args:
        payload: uint8 `[B]`, messages in order of their ranks.
        splits: int64 `[world_size]`, their bytes.
        rank: of this process.
        world_size: number of ranks.
        vocabulary_size: rows of the whole table.
        placement: "row" or "column".
        layer: name for errors.

    Returns:
        `row_splits` int64 `[S + 1]`, `rows` int64 `[n]`, local rows ascending
        within a sample, `weights` float32 `[n]` or `[0]`, `sample_splits`
        int64 `[world_size]`, the samples from every rank, and `samples`
        float32 `[world_size]`, what every rank gave to `encode_ids`.

    Raises:
        tf.errors.InvalidArgumentError: on every rank alike, if a rank met an
            id out of range.
        tf.errors.DataLossError: malformed bytes.
    """
    row_splits, rows, weights, sample_splits, samples = (
        library().tfdist_decode_ids(
            payload,
            splits,
            rank=rank,
            world_size=world_size,
            vocabulary_size=vocabulary_size,
            placement=placement,
            layer=layer,
        )
    )
    return row_splits, rows, weights, sample_splits, samples


def merge_ids(
    ids: Sequence[tf.Tensor],
    row_splits: Sequence[tf.Tensor],
    weights: Sequence[tf.Tensor],
    *,
    vocabulary_size: int,
    out_of_range: OutOfRange = "error",
    layer: str = "",
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Merges lists of ids for a table that lies on this rank alone.

    Args:
        ids: lists of int32 or int64 `[n_i]`.
        row_splits: int64 `[b + 1]` for every list.
        weights: float32 `[n_i]` or `[0]` for every list.
        vocabulary_size: rows of the table.
        out_of_range: "error" or "ignore".
        layer: name for errors.

    Returns:
        `row_splits` int64 `[b + 1]`, `rows` int64 `[n]`, `weights` float32
        `[n]` or `[0]`.

    Raises:
        tf.errors.InvalidArgumentError: an id out of range, malformed inputs.
    """
    merged_splits, rows, merged_weights = library().tfdist_merge_ids(
        ids,
        row_splits,
        weights,
        vocabulary_size=vocabulary_size,
        out_of_range=out_of_range,
        layer=layer,
    )
    return merged_splits, rows, merged_weights


def lookup(
    variable: Any,
    row_splits: tf.Tensor,
    rows: tf.Tensor,
    weights: tf.Tensor,
) -> tf.Tensor:
    """Sums weighted rows of a table per sample.

    The table is read in place. Its gradient is a `tf.IndexedSlices` of unique,
    ascending rows; a mark `_tfdist_shard` is passed on to its `dense_shape`.

    Args:
        variable: float32 `[rows, d]`, TensorFlow's or Keras's variable.
        row_splits: int64 `[S + 1]`.
        rows: int64 `[n]`.
        weights: float32 `[n]` or `[0]`.

    Returns:
        float32 `[S, d]`; zeros for a sample without rows.

    Raises:
        tf.errors.InvalidArgumentError: bad rows, malformed inputs.
    """
    variable = _component(getattr(variable, "_value", variable))
    # Reading no rows tells the gradient tapes that the variable is used; the
    # handle alone does not, and reading all rows would copy the table.
    variable.sparse_read(tf.zeros([0], tf.int32))
    spec = getattr(variable, "_tfdist_shard", None)
    return library().tfdist_lookup(
        variable.handle,
        row_splits,
        rows,
        weights,
        table_shape=variable.shape,
        shard="" if spec is None else json.dumps(dataclasses.asdict(spec)),
    )


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
def _lookup_gradient(op: Any, grad: tf.Tensor) -> list[Any]:
    _, row_splits, rows, weights = op.inputs
    rows, row_grads = lookup_grad(row_splits, rows, weights, grad)
    table_shape = tf.TensorShape(op.get_attr("table_shape"))
    dense_shape = tf.constant(table_shape.as_list(), tf.int64)
    shard = op.get_attr("shard")
    if shard:
        # On the tensor, not on the slices: the tape sums the gradients of
        # several lookups into new slices but keeps the first dense_shape.
        dense_shape._tfdist_shard = ShardSpec(**json.loads(shard))
    return [tf.IndexedSlices(row_grads, rows, dense_shape), None, None, None]


def lookup_grad(
    row_splits: tf.Tensor,
    rows: tf.Tensor,
    weights: tf.Tensor,
    grad: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor]:
    """The gradient of `lookup` for the rows it touched.

    Args:
        row_splits: int64 `[S + 1]`.
        rows: int64 `[n]`.
        weights: float32 `[n]` or `[0]`.
        grad: float32 `[S, d]`, gradient of the result.

    Returns:
        The distinct rows ascending, int64 `[u]`, and their gradients, float32
        `[u, d]`; the same bits for any number of threads.
    """
    unique_rows, row_grads = library().tfdist_lookup_grad(
        row_splits, rows, weights, grad
    )
    return unique_rows, row_grads


def init_rows(
    *,
    rank: int,
    world_size: int,
    rows: int,
    dim: int,
    placement: Placement,
    seed: int | tf.Tensor,
    distribution: str,
    a: float = 0.0,
    b: float = 0.0,
) -> tf.Tensor:
    """One rank's block of a table's initial values.

    Args:
        rank: whose block.
        world_size: number of ranks.
        rows: rows of the whole table.
        dim: columns of the whole table.
        placement: "row" or "column".
        seed: int64; with the row's id and the column it determines a value.
        distribution: "zeros", "constant" (a), "uniform" (from a up to b),
            "normal" (mean a, standard deviation b) or "truncated_normal"
            (the same, within two standard deviations).
        a: first parameter.
        b: second parameter.

    Returns:
        float32 `[local rows, local columns]`; padding rows are zero.
    """
    if distribution == "zeros":
        distribution, a = "constant", 0.0
    return library().tfdist_init_rows(
        tf.convert_to_tensor(seed, tf.int64),
        rank=rank,
        world_size=world_size,
        rows=rows,
        dim=dim,
        placement=placement,
        distribution=distribution,
        a=a,
        b=b,
    )
