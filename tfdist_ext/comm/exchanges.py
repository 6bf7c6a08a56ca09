# SPDX-License-Identifier: Apache-2.0
"""Values of any kind across ranks: gathered, summed, compared, or of rank 0."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdist_ext.comm import collectives as collectives_lib
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.type_names import Path
from tfdist_ext.type_names import TensorLike


def check_same(collectives: Collectives, lines: Sequence[str]) -> None:
    """Compares what the ranks are about to do; all ranks must call.

    While a step is traced, the lines are added to its exchanges, which are
    compared.

    Args:
        collectives: collectives of the strategy.
        lines: lines that must be the same on all ranks.

    Raises:
        tf.errors.InvalidArgumentError: on every rank, with the first line that
            differs, and the rank that it is of.
    """
    if tf.executing_eagerly():
        collectives.group.check_same(lines)
    elif collectives.step is not None:
        collectives.step.exchanges += lines


def sum_over_ranks(
    tensor: tf.Tensor, label: str, peers: Sequence[int] | None = None
) -> tf.Tensor:
    """Sum of `tensor` over the ranks of the strategy in scope.

    Args:
        tensor: tensor of the same shape on all ranks that are summed.
        label: names the exchange in errors.
        peers: see `Collectives.sum_over_peers`; None for all ranks.
    """
    collectives = collectives_lib.active()
    if collectives is None:
        return tensor
    if peers is None or len(peers) == collectives.group.world_size:
        return collectives.all_reduce([tensor], label)[0]
    return collectives.sum_over_peers(tensor, peers, label)


def text_of_first_rank(
    text: str, collectives: Collectives | None, label: str
) -> str:
    """The text of rank 0; all ranks must call.

    Args:
        text: text of this rank.
        collectives: collectives of the strategy; None in one process.
        label: names the exchange in errors.
    """
    if collectives is None:
        return text
    mine = text.encode() if collectives.group.rank == 0 else b""
    given = tf.constant(np.frombuffer(mine, np.uint8))
    return str(collectives.all_gather(given, label).numpy().tobytes().decode())


def tensor_of_first_rank(
    tensor: tf.Tensor, collectives: Collectives, label: str
) -> tf.Tensor:
    """Rank 0's tensor, on every rank; all ranks must call.

    Args:
        tensor: tensor of this rank, of the same dtype and shape on all ranks.
        collectives: collectives of the strategy.
        label: names the exchange in errors.
    """
    sent = tensor[tf.newaxis]
    if tensor.dtype == tf.bool:
        sent = tf.cast(sent, tf.uint8)
    if collectives.group.rank > 0:
        sent = sent[:0]
    found = collectives.all_gather(sent, label)[0]
    return tf.ensure_shape(tf.cast(found, tensor.dtype), tensor.shape)


def path_to_read(path: Path, collectives: Collectives) -> Path:
    """The path that this rank reads from; all ranks must call.

    All ranks read from rank 0's path, as when it was written. A rank without
    such a file, on a local disk, reads from its own path.

    Args:
        path: path of this rank; another object is returned unchanged.
        collectives: collectives of the strategy.
    """
    is_path = isinstance(path, str | os.PathLike)
    own = os.fspath(path) if is_path else ""
    first = text_of_first_rank(str(own), collectives, "path")
    if collectives.group.rank == 0 or first in ("", str(own)):
        return path
    found = any(tf.io.gfile.exists(first + end) for end in ("", ".index"))
    return first if found or not is_path else path


_FLOATS = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
_TRAVEL = (*_FLOATS, tf.int32, tf.int64, tf.uint8)


def can_gather(dtype: tf.DType) -> bool:
    """Whether values of a dtype can be gathered."""
    return bool(
        dtype in (*_FLOATS, tf.string, tf.bool)
        or (dtype.is_integer and not dtype.is_quantized)
    )


def all_gather(
    collectives: Collectives, x: tf.Tensor, label: str
) -> tuple[tf.Tensor, tf.Tensor]:
    """Concatenates the ranks' rows, in the order of the ranks.

        rank 0 has ["a"], rank 1 has ["b", "c"]
        both get ["a", "b", "c"], sizes [1, 2]

    Args:
        collectives: collectives of the strategy; all ranks must call.
        x: `[n, ...]` of a dtype for which `can_gather` is true; n may differ.
        label: names the exchange in errors.

    Returns:
        `[sum of n, ...]`, and int64 `[world_size]`, the rows of each rank.
    """
    dtype = x.dtype
    if dtype == tf.string:
        return _strings(collectives, x, label)
    if dtype in _TRAVEL:
        return collectives.all_gather_parts(x, label)
    if dtype == tf.bool or dtype.size == 1:
        rows = tf.cast(x, tf.uint8)
    else:
        rows = tf.bitcast(x, tf.uint8)
    rows, sizes = collectives.all_gather_parts(rows, label)
    if dtype == tf.bool or dtype.size == 1:
        return tf.cast(rows, dtype), sizes
    return tf.bitcast(rows, dtype), sizes


def all_gather_rows(
    collectives: Collectives, x: TensorLike, label: str
) -> tuple[TensorLike, tf.Tensor]:
    """Concatenates the ranks' rows of a dense, ragged or sparse value.

    Args:
        collectives: collectives of the strategy; all ranks must call.
        x: Tensor, RaggedTensor or SparseTensor of a dtype for which
            `can_gather` is true. The inner sizes of sparse tensors may differ;
            the result has the largest.
        label: names the exchange in errors.

    Returns:
        The same kind of value, and int64 `[world_size]`, the rows of each rank.
    """
    if isinstance(x, tf.RaggedTensor):
        return _ragged(collectives, x, label)
    if isinstance(x, tf.SparseTensor):
        return _sparse(collectives, x, label)
    rows, sizes = all_gather(collectives, x, label)
    if x.shape.rank is not None:
        rows.set_shape([None, *x.shape[1:]])
    return rows, sizes


def _ragged(
    collectives: Collectives, x: tf.RaggedTensor, label: str
) -> tuple[tf.RaggedTensor, tf.Tensor]:
    gathered = [
        collectives.all_gather_parts(lengths, label)
        for lengths in x.nested_row_lengths()
    ]
    values, _ = all_gather_rows(collectives, x.flat_values, label)
    rows = tf.RaggedTensor.from_nested_row_lengths(
        values, [lengths for lengths, _ in gathered], validate=False
    )
    return rows, gathered[0][1]


def _sparse(
    collectives: Collectives, x: tf.SparseTensor, label: str
) -> tuple[tf.SparseTensor, tf.Tensor]:
    shapes = collectives.all_gather(x.dense_shape[tf.newaxis], label)
    before = tf.reduce_sum(shapes[: collectives.group.rank, 0])
    samples, inner = tf.split(x.indices, [1, -1], axis=1)
    indices = tf.concat([samples + before, inner], axis=1)
    size = tf.concat(
        [tf.reduce_sum(shapes[:, :1], 0), tf.reduce_max(shapes[:, 1:], 0)], 0
    )
    rows, _ = all_gather_rows(collectives, indices, label)
    values, _ = all_gather_rows(collectives, x.values, label)
    return tf.SparseTensor(rows, values, size), shapes[:, 0]


def _strings(
    collectives: Collectives, x: tf.Tensor, label: str
) -> tuple[tf.Tensor, tf.Tensor]:
    letters = tf.strings.bytes_split(tf.reshape(x, [-1]))
    codes = tf.io.decode_raw(letters.flat_values, tf.uint8)
    codes = collectives.all_gather(tf.reshape(codes, [-1]), f"{label}/bytes")
    lengths = tf.reshape(letters.row_lengths(), tf.shape(x))
    lengths, sizes = collectives.all_gather_parts(lengths, f"{label}/lengths")
    every = tf.constant([bytes([code]) for code in range(256)])
    owners = tf.repeat(
        tf.range(tf.size(lengths, tf.int64)), tf.reshape(lengths, [-1])
    )
    flat = tf.strings.unsorted_segment_join(
        tf.gather(every, tf.cast(codes, tf.int32)), owners, tf.size(lengths)
    )
    rows = tf.reshape(flat, tf.shape(lengths))
    rows.set_shape([None, *x.shape[1:]])
    return rows, sizes
