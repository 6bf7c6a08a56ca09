# SPDX-License-Identifier: Apache-2.0
"""One TensorFlow checkpoint, read by all ranks.

All ranks first read the tensors and check their shapes. Only when every rank
has all that it needs do they exchange rows and assign. So a file that is
damaged, or that one rank cannot read, changes no variable of any rank.

Large tables are the exception, if the file has them in pieces: they are read
and assigned piece by piece. That the files are there and complete is checked
before, and checksums with each piece.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable
from collections.abc import Iterator
from concurrent import futures

import numpy as np
import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.comm import calls
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.embedding.checkpoint_slices import SavedShard
from tfdist_ext.ops.checkpoint_ops import Grouped
from tfdist_ext.ops.checkpoint_ops import StoredSlice
from tfdist_ext.saving import changed_rows
from tfdist_ext.saving.changed_rows import DeltaRows
from tfdist_ext.saving.checkpoint_index import Index
from tfdist_ext.saving.saved_variable import SavedVariable
from tfdist_ext.saving.saved_variable import saved_variable
from tfdist_ext.type_names import Original
from tfdist_ext.type_names import TensorLike
from tfdist_ext.type_names import Trackable
from tfdist_ext.type_names import Variable

# Functions that restore an object, with the tensors read for each.
Read = list[tuple[Callable[..., object], dict[str, TensorLike]]]
_READ_AHEAD = 3  # pieces
_FLOATING = (tf.float32, tf.bfloat16, tf.float16, tf.float64)
# Attributes in which TensorFlow's saveables have their variable.
_VARIABLES = (
    "_trackable",
    "_mirrored_variable",
    "_distributed_variable",
    "_sync_on_read_variable",
)


def restore(
    original: Original[dict[str, tf.Operation]],
    saver: internals.MultiDeviceSaver,
    file_prefix: str | tf.Tensor,
    options: tf.train.CheckpointOptions | None,
    collectives: Collectives | None,
    full: str | None = None,
) -> dict[str, tf.Operation]:
    """Restores the objects of a saver; all ranks must call.

    Args:
        original: TensorFlow's method.
        saver: `MultiDeviceSaver` of this rank's objects.
        file_prefix: path of the checkpoint.
        options: `tf.train.CheckpointOptions` or None.
        collectives: collectives of the strategy; None in one process.
        full: path of the full checkpoint that a delta is relative to; None if
            the checkpoint is full.

    Returns:
        No operations if all is done, else those of TensorFlow's method.
    """
    read: Read = []
    large = _large_shards(saver)
    variables: dict[str, list[_Piece]] = {}
    pieces: list[_Piece] = []
    failure: Exception | None = None
    delta: DeltaRows | None = None
    path = _text(file_prefix)
    if collectives is None and full is None:
        variables = _pieces_of_variables(saver, path)
        if not variables:
            return original(saver, file_prefix, options)
    try:
        with _only(saver, lambda key: key not in {*large, *variables}):
            if full is None:
                _read(original, saver, path, options, collectives, read)
            else:
                delta = DeltaRows(path)
                _read_over(
                    *(original, saver, path, options, collectives, read),
                    *(full, delta),
                )
        pieces = _read_large(large, path, full, delta, read)
        pieces += itertools.chain(*variables.values())
    except Exception as error:
        failure = error
    raise_on_all_ranks(failure, collectives)
    while read:  # frees each value once it is assigned
        fn, tensors = read.pop(0)
        fn(tensors)
    _restore_pieces(pieces, path)
    return {}


def _keys_and_objects(
    saver: internals.MultiDeviceSaver,
) -> Iterator[tuple[str, Variable]]:
    """The keys of a saver's tensors, and the objects they belong to."""
    for tensors in saver._shardable_tensors_by_task.values():
        for tensor in tensors:
            for found in _objects(tensor.trackable):
                yield tensor.checkpoint_key, found


def _large_shards(saver: internals.MultiDeviceSaver) -> dict[str, SavedShard]:
    """Shards that are written in several pieces, by key."""
    shards = {
        key: changed_rows.saved_shard(found)
        for key, found in _keys_and_objects(saver)
    }
    return {k: each for k, each in shards.items() if each and each.pieces > 1}


def _pieces_of_variables(
    saver: internals.MultiDeviceSaver, path: str
) -> dict[str, list[_Piece]]:
    """Large variables of one process that a file has in pieces, by key."""
    variables = {
        key: saved_variable(key, found)
        for key, found in _keys_and_objects(saver)
    }
    large = {
        key: each
        for key, each in variables.items()
        if each is not None and each.dtype in _FLOATING
    }
    if not large:
        return {}
    index = Index(path)
    pieces = {}
    for key, variable in large.items():
        slices = index.slices_of_rows(key)
        if slices is None or index.shape(key) != variable.shape:
            continue
        find = functools.partial(index.stored, key)
        stored = variable.in_slices(slices)
        if all(find(each, variable.dtype) for each in stored.slices):
            reader = _reader(path, key, variable.dtype)
            pieces[key] = [
                _Piece(stored, i, find, reader) for i in range(stored.pieces)
            ]
    return pieces


def _read_large(
    large: dict[str, SavedShard],
    path: str,
    full: str | None,
    delta: DeltaRows | None,
    read: Read,
) -> list[_Piece]:
    """Reads large shards, or returns their pieces.

    Args:
        large: shards by key.
        path: path of the checkpoint.
        full: see `restore`.
        delta: what changed since; None if the checkpoint is full.
        read: gets the functions and values of shards that are read whole.
    """
    if not large:
        return []
    index = Index(path)
    before = index if full is None else Index(full)
    pieces: list[_Piece] = []
    for key, shard in large.items():
        reader, shape = _reader(path, key, shard.dtype), index.shape(key)
        if full is not None and delta is not None and key in delta.keys:
            put = functools.partial(delta.put_into, key)
            reader = _reader(full, key, shard.dtype, put)
            shape = before.shape(key)
        elif (
            shape == shard.shape
            # Older checkpoints and those of one process have other slices.
            and index.most_bytes(key) <= 2 * shard.piece_bytes
        ):
            find = functools.partial(index.stored, key)
            pieces += [
                _Piece(shard, i, find, reader) for i in range(shard.pieces)
            ]
            continue
        whole = shard.read_whole(reader, shape or shard.shape)
        read.append((shard.restore, whole))
    return pieces


def _reader(
    path: str,
    key: str,
    dtype: tf.DType,
    put: Callable[[str, tf.Tensor], tf.Tensor] | None = None,
) -> Callable[[str], tf.Tensor]:
    """Reads slices of a tensor.

    Args:
        path: path of the checkpoint.
        key: name of the tensor.
        dtype: its dtype.
        put: changes the values of a slice.
    """

    def read(slice_spec: str) -> tf.Tensor:
        with tf.device("CPU:0"):
            (value,) = tf.raw_ops.RestoreV2(
                prefix=path,
                tensor_names=[key],
                shape_and_slices=[slice_spec],
                dtypes=[dtype],
            )
        return value if put is None else put(slice_spec, value)

    return read


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A piece of a large shard or variable, and what finds and reads it."""

    shard: SavedShard | SavedVariable
    number: int
    find: Callable[[str, tf.DType], StoredSlice | None]
    reader: Callable[[str], tf.Tensor]

    def read(self) -> Grouped:
        return self.shard.read_piece(self.number, self.find, self.reader)


def _restore_pieces(pieces: list[_Piece], path: str) -> None:
    """Reads and assigns piece by piece; a joint call of all ranks."""
    if not pieces:
        return
    with futures.ThreadPoolExecutor(_READ_AHEAD) as threads:
        ahead = [threads.submit(each.read) for each in pieces[:_READ_AHEAD]]
        for piece, following in itertools.zip_longest(
            pieces, pieces[_READ_AHEAD:]
        ):
            if following is not None:
                ahead.append(threads.submit(following.read))
            _assign(piece, ahead.pop(0), path)


def _assign(piece: _Piece, reading: futures.Future[Grouped], path: str) -> None:
    """Assigns a piece, unless a rank could not read its part of it."""
    failure = reading.exception()
    shard = piece.shard
    try:
        if failure is None:
            shard.assign_piece(piece.number, reading.result())
        else:
            shard.assign_piece(piece.number, None, calls.brief_error(failure))
    except tf.errors.InvalidArgumentError as error:
        if failure is not None and not isinstance(failure, tf.errors.OpError):
            raise failure from None
        raise tf.errors.DataLossError(
            None,
            None,
            f"'{shard.table}' is partly restored, and those before "
            f"it are restored: '{path}' is damaged ({error.message}). "
            "Restore another checkpoint before you train or save.",
        ) from failure


def raise_on_all_ranks(
    failure: BaseException | None, collectives: Collectives | None
) -> None:
    """Raises on all ranks if one has failed; all ranks must call.

    It also works outside of joint calls, as in Keras's `fit`.

    Args:
        failure: error of this rank, or None.
        collectives: collectives of the strategy; None in one process.
    """
    if failure is not None and collectives is None:
        raise failure
    if collectives is None:
        return
    mine = f"{calls.brief_error(failure)}\n" if failure is not None else ""
    counts = tf.constant(np.frombuffer(mine.encode(), np.uint8))
    text, sizes = collectives.all_gather_parts(counts, "checkpoint/read")
    if failure is not None:
        raise failure
    if text.shape[0]:
        ranks = np.flatnonzero(sizes.numpy())
        every = text.numpy().tobytes().decode(errors="replace")
        raise tf.errors.AbortedError(
            None, None, f"rank {ranks[0]}: {every.splitlines()[0]}"
        )


def _read_over(
    original: Original[dict[str, tf.Operation]],
    saver: internals.MultiDeviceSaver,
    path: str,
    options: tf.train.CheckpointOptions | None,
    collectives: Collectives | None,
    read: Read,
    full: str,
    delta: DeltaRows,
) -> None:
    """Reads a delta, and the rest from the full checkpoint."""
    with _only(saver, lambda key: key not in delta.keys):
        _read(original, saver, path, options, collectives, read)
    first = len(read)
    with _only(saver, lambda key: key in delta.keys):
        _read(original, saver, full, options, collectives, read)
        _put_in_rows(saver, delta, read[first:])


def _put_in_rows(
    saver: internals.MultiDeviceSaver, delta: DeltaRows, read: Read
) -> None:
    """Replaces the rows of a delta in the values that were read."""
    slices = {
        (tensor.checkpoint_key, tensor.slice_spec): (
            tensor._tensor_save_spec.slice_spec.strip()
        )
        for tensors in saver._shardable_tensors_by_task.values()
        for tensor in tensors
    }
    for fn, tensors in read:
        for key, asked in saver._restore_fn_to_keys[fn]:
            holder, place = tensors, key.partition("/.ATTRIBUTES/")[2]
            if asked:
                holder, place = tensors[place], asked
            holder[place] = delta.put_into(
                key, slices[key, asked], holder[place]
            )


@contextlib.contextmanager
def _only(
    saver: internals.MultiDeviceSaver, wanted: Callable[[str], bool]
) -> Iterator[None]:
    """Restricts a saver to the keys that are wanted."""
    by_task = saver._shardable_tensors_by_task
    functions = saver._keys_to_restore_fn
    counted = saver._restore_fn_to_keys
    saver._shardable_tensors_by_task = {
        task: found
        for task, tensors in by_task.items()
        if (found := [each for each in tensors if wanted(each.checkpoint_key)])
    }
    saver._keys_to_restore_fn = {
        key: fn for key, fn in functions.items() if wanted(key[0])
    }
    saver._restore_fn_to_keys = {
        fn: found
        for fn, keys in counted.items()
        if (found := [key for key in keys if wanted(key[0])])
    }
    try:
        yield
    finally:
        saver._shardable_tensors_by_task = by_task
        saver._keys_to_restore_fn = functions
        saver._restore_fn_to_keys = counted


def _read(
    original: Original[dict[str, tf.Operation]],
    saver: internals.MultiDeviceSaver,
    file_prefix: str | tf.Tensor,
    options: tf.train.CheckpointOptions | None,
    collectives: Collectives | None,
    read: Read,
) -> None:
    """Reads all that this rank needs into a list of functions and values."""
    functions = saver._keys_to_restore_fn
    counted = saver._restore_fn_to_keys
    later = {fn: _DeferredCall(fn, read) for fn in counted}
    _name_own_states(saver, file_prefix, collectives)
    _fit_slices(saver, file_prefix)
    saver._keys_to_restore_fn = {k: later[fn] for k, fn in functions.items()}
    saver._restore_fn_to_keys = {later[fn]: k for fn, k in counted.items()}
    # With several tasks, the saver reads in a tf.function, where exchanges of
    # arrays cannot run.
    saver._num_unique_tasks = 1
    try:
        original(saver, file_prefix, options)
    finally:
        saver._keys_to_restore_fn = functions
        saver._restore_fn_to_keys = counted
    for fn, tensors in read:
        _add_new_rows(fn, tensors)
        _check_shapes(fn, tensors)


def _text(file_prefix: str | tf.Tensor) -> str:
    path: bytes = tf.get_static_value(tf.convert_to_tensor(file_prefix))
    return path.decode()


class _DeferredCall:
    """Records the tensors read for a function, instead of calling it."""

    def __init__(self, fn: Callable[..., object], read: Read) -> None:
        self._fn = fn
        self._read = read

    def __call__(self, tensors: dict[str, TensorLike]) -> None:
        self._read.append((self._fn, tensors))


def _saveables(fn: Callable[..., object] | None) -> list[object]:
    return getattr(getattr(fn, "__self__", None), "saveables", None) or []


def _variables(fn: Callable[..., object] | None) -> list[Variable]:
    """The objects that a saver's function restores."""
    return [
        getattr(saveable, name)
        for saveable in _saveables(fn)
        for name in _VARIABLES
        if hasattr(saveable, name)
    ]


def _add_new_rows(
    fn: Callable[..., object], tensors: dict[str, TensorLike]
) -> None:
    """Keeps the rows that an unpartitioned table has grown by."""
    for variable in _variables(fn):
        inner = changed_rows.variable_of(variable)
        if changed_rows.is_sum(inner):
            continue  # converting it would exchange
        if not marks.grows(inner) or len(tensors) != 1:
            continue
        ((name, value),) = tensors.items()
        rows = value.shape[0]
        if rows < inner.shape[0]:
            now = tf.convert_to_tensor(inner)
            tensors[name] = tf.concat([value, now[rows:]], 0)


def _check_shapes(
    fn: Callable[..., object], tensors: dict[str, TensorLike]
) -> None:
    for variable in _variables(fn):
        inner = changed_rows.variable_of(variable)
        if not isinstance(inner, tf.Variable) or len(tensors) != 1:
            continue
        if changed_rows.is_shard(inner):
            continue  # its read rejects another table's slice
        (value,) = tensors.values()
        if not inner.shape.is_compatible_with(value.shape):
            raise ValueError(
                f"Variable '{variable.name}' has shape {inner.shape}; the "
                f"checkpoint holds values of shape {value.shape} for it. "
                "Nothing was restored."
            )


def _name_own_states(
    saver: internals.MultiDeviceSaver,
    file_prefix: str | tf.Tensor,
    collectives: Collectives | None,
) -> None:
    """Makes every rank read the state that it saved for itself."""
    own = [
        tensor
        for tensors in saver._shardable_tensors_by_task.values()
        for tensor in tensors
        if any(map(changed_rows.is_of_one_rank, _objects(tensor.trackable)))
    ]
    if not own or collectives is None:
        return
    group = collectives.group
    path = _text(file_prefix)
    saved = tf.train.load_checkpoint(path).get_variable_to_shape_map()
    for tensor in own:
        name = tensor.checkpoint_key
        ranks = 1 + sum(other.startswith(f"{name}/rank_") for other in saved)
        if ranks != group.world_size:
            raise ValueError(
                f"The place of a dataset's iterator ('{name}') was saved by "
                f"{ranks} ranks and cannot be restored by {group.world_size}. "
                f"Received: path='{path}'. Restore without the iterator."
            )
        tensor._tensor_save_spec.name = changed_rows.name_of_rank(
            name, group.rank
        )


def _fit_slices(
    saver: internals.MultiDeviceSaver, file_prefix: str | tf.Tensor
) -> None:
    """Makes the saver read what tables had before they grew."""
    growing = [
        (tensors, place, slicing)
        for tensors in saver._shardable_tensors_by_task.values()
        for place, tensor in enumerate(tensors)
        for found in _objects(tensor.trackable)
        if (slicing := changed_rows.slicing(found)) is not None
    ]
    if not growing:
        return
    path = _text(file_prefix)
    saved = tf.train.load_checkpoint(path).get_variable_to_shape_map()
    for tensors, place, slicing in growing:
        tensor = tensors[place]
        if tensor.checkpoint_key in saved:
            # The tensors that are read are looked up by the requested slice.
            spec = copy.copy(tensor._tensor_save_spec)
            spec.slice_spec = slicing(tuple(saved[tensor.checkpoint_key]))
            tensors[place] = dataclasses.replace(tensor, _tensor_save_spec=spec)


def _objects(trackable: Trackable) -> list[Variable]:
    return _variables(getattr(trackable, "_restore_from_tensors", None))
