# SPDX-License-Identifier: Apache-2.0
"""Entire tables: gathered from all ranks, assigned, and read in blocks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext.keras_internals import value_of
from tfdist_ext.marks import shard_spec
from tfdist_ext.tables import placement
from tfdist_ext.tables.placement import ShardSpec
from tfdist_ext.type_names import DTypeLike
from tfdist_ext.type_names import Layer
from tfdist_ext.type_names import TensorLike
from tfdist_ext.type_names import Variable

if TYPE_CHECKING:
    from tfdist_ext.comm.collectives import Collectives

# Rows per block, a few hundred megabytes at most.
ROWS_AT_A_TIME = 1 << 18


def kernel_of(layer: tf.keras.layers.Layer | Variable) -> Variable:
    """Returns the only table of a layer; a variable is returned unchanged.

    Raises:
        ValueError: if a layer has no kernel, or several tables.
    """
    found = getattr(layer, "kernel", getattr(layer, "embeddings", layer))
    if hasattr(found, "get_embedding_tables"):
        raise ValueError(
            f"Layer '{layer.name}' has several tables: use its "
            "get_embedding_tables()."
        )
    if isinstance(found, tf.keras.layers.Layer):
        raise ValueError(
            f"Layer '{layer.name}' has no kernel. Give a FullSparse or an "
            "Embedding that is built, or any variable."
        )
    return found


def gather(variable: Variable, collectives: Collectives | None) -> np.ndarray:
    """Returns the entire table of a shard on every rank; a joint call.

    Args:
        variable: a shard, or an ordinary variable.
        collectives: the strategy's collectives; None in one process.

    Returns:
        `[rows, dim]`, or `[rows]` for a slot with one value per row.
    """
    spec = shard_spec(variable)
    inner = value_of(variable)
    if spec is None or collectives is None:
        return np.asarray(tf.convert_to_tensor(inner))
    local = inner.read_value()
    flat = collectives.all_gather(
        tf.reshape(local, [-1]), f"gather/{spec.table}"
    )
    return assemble(flat.numpy(), spec, local.shape.rank)


def gather_to_first(variable: Variable, collectives: Collectives) -> np.ndarray:
    """Returns the entire table of a shard on rank 0; a joint call.

    Args:
        variable: a shard.
        collectives: the strategy's collectives.

    Returns:
        `[rows, dim]` or `[rows]` on rank 0, an array of 0 rows on other ranks.
    """
    spec = shard_spec(variable)
    assert spec is not None
    local = value_of(variable).read_value()
    flat = tf.reshape(local, [-1])
    splits = tf.pad(tf.size(flat, tf.int64)[None], [[0, spec.world_size - 1]])
    flat, _ = collectives.all_to_all(flat, splits, f"gather/{spec.table}")
    if spec.rank > 0:
        return flat.numpy().reshape((0, spec.dim)[: local.shape.rank])
    return assemble(flat.numpy(), spec, local.shape.rank)


def assign_part(variable: Variable, whole: TensorLike) -> None:
    """Assigns this rank's part of an entire table.

    Args:
        variable: a shard.
        whole: `[rows, dim]` or `[rows]`, anything that can be sliced, for
            example an h5py dataset. It is read in blocks.

    Raises:
        ValueError: if the table has another shape.
    """
    spec = shard_spec(variable)
    assert spec is not None
    inner = value_of(variable)
    expected = (spec.rows, spec.dim)[: inner.shape.rank]
    if tuple(whole.shape) != expected:
        raise ValueError(
            f"Table '{spec.table}' has shape {expected}. Received values of "
            f"shape {tuple(whole.shape)}."
        )
    if 0 in inner.shape:
        return
    shape, dtype = tuple(inner.shape), inner.dtype.as_numpy_dtype
    # The method of the class, because Keras replaces the instance's `assign`
    # while it reads a file.
    part = read_part(whole, spec, shape, dtype)
    type(inner).assign(inner, part)


def accept_whole(variable: tf.Variable) -> None:
    """Lets `assign` of a shard accept an entire table as well as its part."""
    if shard_spec(variable) is None:
        return
    assign_own = variable.assign

    def assign(value: TensorLike, *args: Any, **kwargs: Any) -> tf.Operation:
        spec = shard_spec(variable)  # read here, because tables may be moved
        assert spec is not None
        shape = tuple(getattr(value, "shape", None) or np.shape(value))
        local = tuple(variable.shape)
        if shape == local or shape != (spec.rows, spec.dim):
            return assign_own(value, *args, **kwargs)
        assign_part(variable, value)
        return variable

    variable.assign = assign


def set_weights(layer: Layer, weights: Sequence[TensorLike]) -> None:
    """Sets a layer's weights to entire tables, or to values of `get_weights`.

    Args:
        layer: a Keras layer.
        weights: one array for each weight of the layer.

    Raises:
        ValueError: if the number of weights or a shape differs.
    """
    variables = layer.weights
    if len(variables) != len(weights):
        raise ValueError(
            f"Layer '{layer.name}' has {len(variables)} weights. Received: "
            f"{len(weights)}."
        )
    for variable, value in zip(variables, weights, strict=True):
        variable.assign(value)


def read_part(
    whole: TensorLike,
    spec: ShardSpec,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    block_rows: int = ROWS_AT_A_TIME,
) -> np.ndarray:
    """Reads one rank's part of an entire table.

    Args:
        whole: `[rows, dim]` or `[rows]`, anything that can be sliced, for
            example an h5py dataset or a memory map. It is read in blocks.
        spec: the part to read.
        shape: the shape of the part.
        dtype: the NumPy dtype of the part.
        block_rows: how many rows of the table are read at a time.
    """
    part = np.zeros(shape, dtype)
    if 0 in shape or spec.cell is None:
        return part
    columns: Any = (slice(*spec.columns),)[: len(shape) - 1]
    for start in range(0, spec.rows, block_rows):
        block = np.asarray(whole[(slice(start, start + block_rows), *columns)])
        ids = np.arange(start, start + len(block))
        mine = placement.part_of(ids, spec.row_parts) == spec.cell[0]
        part[placement.local_row(ids[mine], spec.row_parts)] = block[mine]
    return part


def write(
    variable: Variable,
    collectives: Collectives | None,
    path: str | os.PathLike[str],
    block_rows: int = ROWS_AT_A_TIME,
) -> None:
    """Writes an entire table as a `.npy` file; a joint call of all ranks.

    Args:
        variable: a shard, or an ordinary variable.
        collectives: the strategy's collectives; None in one process.
        path: path of the file, which rank 0 writes. The file is renamed to
            this path when it is complete.
        block_rows: how many rows of the table are gathered at a time.
    """
    with _writing(path, collectives):
        _write(variable, collectives, path, block_rows)


def write_all(
    variables: Mapping[str, Variable],
    collectives: Collectives | None,
    folder: str | os.PathLike[str],
) -> dict[str, str]:
    """Writes entire tables into a folder; a joint call of all ranks.

    Args:
        variables: shards, or ordinary variables, by name.
        collectives: the strategy's collectives; None in one process.
        folder: the folder in which rank 0 writes `<name>.npy`, see `write`.
            It is created if necessary.

    Returns:
        The paths, by name.
    """
    paths = {name: os.path.join(folder, f"{name}.npy") for name in variables}
    with _writing(folder, collectives):
        if collectives is None or collectives.group.rank == 0:
            os.makedirs(folder, exist_ok=True)
        for name, variable in variables.items():
            _write(variable, collectives, paths[name], ROWS_AT_A_TIME)
    return paths


def _writing(
    path: str | os.PathLike[str], collectives: Collectives | None
) -> contextlib.AbstractContextManager[None]:
    """Makes an error of one rank inside the context an error on all ranks."""
    if collectives is None:
        return contextlib.nullcontext()
    return collectives.joint_call(
        f"write '{os.fspath(path)}'", end_barrier=True
    )


def _write(
    variable: Variable,
    collectives: Collectives | None,
    path: str | os.PathLike[str],
    block_rows: int,
) -> None:
    spec = shard_spec(variable)
    inner = value_of(variable)
    shape = tuple(inner.shape)
    if spec is not None:
        shape = (spec.rows, spec.dim)[: len(shape)]
    blocks = _blocks_of_ranks(inner, spec, collectives, block_rows)
    if collectives is not None and collectives.group.rank > 0:
        for _ in blocks:
            pass
        return
    # NumPy files cannot store bfloat16.
    dtype = np.float64 if inner.dtype == tf.float64 else np.float32
    partial = f"{os.fspath(path)}.part"
    try:
        file = np.lib.format.open_memmap(partial, "w+", dtype, shape)
        for first, block in blocks:
            file[first : first + len(block)] = block
        file.flush()
        os.replace(partial, path)
    finally:
        if os.path.exists(partial):
            os.remove(partial)


def _blocks_of_ranks(
    inner: tf.Variable,
    spec: ShardSpec | None,
    collectives: Collectives | None,
    block_rows: int,
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields blocks of the table in order, each with its first row.

    On ranks other than 0 the blocks are empty.
    """
    if spec is None or collectives is None:
        rows = tf.convert_to_tensor(inner)
        for first in range(0, rows.shape[0], block_rows):
            yield first, rows[first : first + block_rows].numpy()
        return
    owned = inner.read_value()
    step = max(1, block_rows // spec.row_parts)
    # The same local rows of all parts are consecutive rows of the table.
    for start in range(0, -(-spec.rows // spec.row_parts), step):
        flat = tf.reshape(owned[start : start + step], [-1])
        splits = np.zeros([spec.world_size], np.int64)
        splits[0] = flat.shape[0]
        flat, _ = collectives.all_to_all(
            flat, tf.constant(splits), f"gather/{spec.table}"
        )
        first = start * spec.row_parts
        if spec.rank > 0:
            yield first, np.empty([0])
            continue
        yield (
            first,
            assemble(flat.numpy(), spec, owned.shape.rank, start, step),
        )


def assemble(
    flat: np.ndarray,
    spec: ShardSpec,
    dims: int,
    start: int = 0,
    step: int | None = None,
) -> np.ndarray:
    """Returns rows of a table, given the same local rows of all ranks.

    Args:
        flat: the numbers of all ranks, concatenated in the order of ranks.
        spec: the spec of any rank.
        dims: 2, or 1 for a slot with one value per row.
        start: the first of the local rows.
        step: the number of local rows; None for all of them.
    """
    step = -(-spec.rows // spec.row_parts) if step is None else step
    first = start * spec.row_parts
    end = min(first + step * spec.row_parts, spec.rows)
    block = np.empty((end - first, spec.dim)[:dims], flat.dtype)
    place = 0
    for part in map(spec.at, range(spec.world_size)):
        rows = min(max(part.local_rows - start, 0), step)
        shape = (rows, part.local_dim)[:dims]
        piece = flat[place : place + int(np.prod(shape))].reshape(shape)
        place += piece.size
        if part.cell is None:
            continue
        ids = placement.ids_of_part(
            part.cell[0], spec.row_parts, spec.rows, start, start + step
        )
        columns: Any = (slice(*part.columns),)[: dims - 1]
        block[(ids - first, *columns)] = piece[: len(ids)]
    return block


def row_blocks(
    variable: Variable, collectives: Collectives | None, numbers: int = 1 << 24
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields this rank's share of a table's blocks; a joint call.

    All ranks must iterate to the end.

    Args:
        variable: a shard, or an unpartitioned table, of which rank 0 yields
            all blocks.
        collectives: the strategy's collectives; None in one process.
        numbers: how many numbers a block has, approximately.

    Yields:
        The first row of a block, and the block `[n, dim]`.
    """
    spec, inner = shard_spec(variable), value_of(variable)
    if spec is None or collectives is None:
        if collectives is None or collectives.group.rank == 0:
            yield from _blocks_of_whole(inner, numbers)
        return
    owned = inner.read_value()
    ranks = spec.world_size
    # The same local rows of all parts are consecutive rows of the table.
    local_rows = -(-spec.rows // spec.row_parts)
    limit = max(1, numbers // (spec.dim * spec.row_parts))
    step = min(limit, -(-local_rows // ranks))
    for start in range(0, local_rows, ranks * step):
        sent = owned[start : start + ranks * step]
        places = np.minimum(np.arange(ranks + 1) * step, sent.shape[0])
        flat, _ = collectives.all_to_all(
            tf.reshape(sent, [-1]),
            tf.constant(np.diff(places) * spec.local_dim, tf.int64),
            f"{spec.table}/blocks",
        )
        mine = start + spec.rank * step
        first = mine * spec.row_parts
        if first < spec.rows:
            yield (
                first,
                assemble(flat.numpy(), spec, 2, mine, step),
            )


def rows_of_rank(spec: ShardSpec) -> tuple[int, int]:
    """Returns the first row that `even_blocks` yields, and the end.

    Args:
        spec: this rank's part of the table.
    """
    share = _even_share(spec) * spec.row_parts
    first = min(spec.rank * share, spec.rows)
    return first, min(first + share, spec.rows)


def _even_share(spec: ShardSpec) -> int:
    """The local rows of every part that one rank is given."""
    return -(-spec.rows // (spec.row_parts * spec.world_size))


def even_blocks(
    variable: Variable, collectives: Collectives, numbers: int = 1 << 22
) -> Iterator[np.ndarray]:
    """Yields consecutive rows of a table, as many on every rank.

    A joint call: all ranks must iterate to the end. A rank holds the rows that
    it sends and those that it is given for one block at a time.

    Args:
        variable: a shard.
        collectives: the strategy's collectives.
        numbers: how many numbers a block has, approximately.

    Yields:
        Rows `[n, dim]`. Together they are those of `rows_of_rank`.
    """
    spec, inner = shard_spec(variable), value_of(variable)
    assert spec is not None
    owned = inner.read_value()
    share = _even_share(spec)
    step = max(1, min(share, numbers // (spec.dim * spec.row_parts)))
    for start in range(0, share, step):
        end = min(start + step, share)
        sent = [
            owned[rank * share + start : rank * share + end]
            for rank in range(spec.world_size)
        ]
        flat, _ = collectives.all_to_all(
            tf.reshape(tf.concat(sent, 0), [-1]),
            tf.constant([each.shape.num_elements() for each in sent], tf.int64),
            f"{spec.table}/blocks",
        )
        mine = spec.rank * share + start
        if mine * spec.row_parts < spec.rows:
            yield assemble(flat.numpy(), spec, 2, mine, end - start)


def _blocks_of_whole(
    inner: tf.Variable, numbers: int
) -> Iterator[tuple[int, np.ndarray]]:
    rows = tf.convert_to_tensor(inner)
    step = max(1, numbers // int(rows.shape[1]))
    for first in range(0, rows.shape[0], step):
        yield first, rows[first : first + step].numpy()
