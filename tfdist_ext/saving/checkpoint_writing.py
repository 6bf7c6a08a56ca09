# SPDX-License-Identifier: Apache-2.0
"""One TensorFlow checkpoint, written by all ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
from collections.abc import Iterable
from collections.abc import Iterator
from concurrent import futures
from typing import TypeAlias

import tensorflow as tf

from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.comm.exchanges import text_of_first_rank
from tfdist_ext.embedding import checkpoint_slices
from tfdist_ext.embedding.checkpoint_slices import Piece
from tfdist_ext.saving import changed_rows
from tfdist_ext.saving import checkpoint_files
from tfdist_ext.saving import checkpoint_index
from tfdist_ext.saving.changed_rows import ChangedRows
from tfdist_ext.saving.changed_rows import Entry
from tfdist_ext.saving.saved_variable import saved_variable
from tfdist_ext.type_names import SavedTensor
from tfdist_ext.type_names import T

gfile = tf.io.gfile
# Divides the tensors of a checkpoint over files.
ShardingCallback: TypeAlias = tf.train.experimental.ShardingCallback | None
# What a saver writes, by device.
ByTask: TypeAlias = dict[str, list[SavedTensor]]


def files_of(
    saver: internals.MultiDeviceSaver,
    options: tf.train.CheckpointOptions,
    collectives: Collectives | None,
    changed: ChangedRows | None,
) -> list[list[Entry]]:
    """The entries that this rank writes, by file; all ranks must call.

    Args:
        saver: `MultiDeviceSaver` of this rank's objects.
        options: `tf.train.CheckpointOptions`.
        collectives: collectives of the strategy; None in one process.
        changed: records the rows, and says which of them have changed.
    """
    rank = collectives.group.rank if collectives else 0
    shards, others = _shards_and_others(saver, rank, collectives)
    if changed is not None and changed.since_full:
        return _changed_files(saver, shards, others, rank, changed, collectives)
    in_pieces = changed is None and collectives is None
    large = _take_large(others) if in_pieces else []
    files = list(_files(saver, shards, others, rank, options, snapshot=True))
    files += _grouped(large)
    if changed is not None:
        tables = _tables(shards)
        noted = {tensor.checkpoint_key for tensor in tables}
        entries = [each for each in _flat(files) if each[0] not in noted]
        changed.note(tables, entries)
    return files


def _files(
    saver: internals.MultiDeviceSaver,
    shards: ByTask,
    others: ByTask,
    rank: int,
    options: tf.train.CheckpointOptions,
    snapshot: bool = False,
) -> Iterator[list[Entry]]:
    """This rank's entries by file; see `SavedShard.pieces_of_slice`."""
    callback = options.experimental_sharding_callback if rank == 0 else None
    entries = _entries_of_shards(saver, shards, snapshot)
    if callback is None:
        rest = _others(saver, others, rank, None)
        yield from _grouped(itertools.chain(entries, _flat(rest)))
    else:
        yield from _grouped(entries)
        yield from _others(saver, others, rank, callback)


def _changed_files(
    saver: internals.MultiDeviceSaver,
    shards: ByTask,
    others: ByTask,
    rank: int,
    changed: ChangedRows,
    collectives: Collectives | None,
) -> list[list[Entry]]:
    """This rank's entries of a delta, by file."""
    tables = _tables(shards)
    keys = {tensor.checkpoint_key for tensor in tables}
    rest = {
        task: [each for each in tensors if each.checkpoint_key not in keys]
        for task, tensors in shards.items()
    }
    entries = _flat(_split(saver, rest, None))
    entries += _flat(_others(saver, others, rank, None))
    rows = changed.note(tables, entries)
    shared = {
        changed_rows.object_of(each.checkpoint_key)
        for each in _flat(shards.values())
    }
    by_row = changed.objects_by_row(rows, shared, collectives)
    fit = {each.key for each in rows}
    by_row -= {
        changed_rows.object_of(name) for name, *_ in entries if name not in fit
    }
    whole = {
        task: [
            each
            for each in tensors
            if each.checkpoint_key in keys
            and changed_rows.object_of(each.checkpoint_key) not in by_row
        ]
        for task, tensors in shards.items()
    }
    written = list(_entries_of_shards(saver, whole, snapshot=True))
    written += [
        e for e in entries if changed_rows.object_of(e[0]) not in by_row
    ]
    for each in rows:
        if each.object in by_row:
            written += each.entries(rank)
    return list(_grouped(written))


def _tables(shards: ByTask) -> list[SavedTensor]:
    """The shards of tables, each once: large ones are in several pieces."""
    found = {
        each.checkpoint_key: each
        for each in _flat(shards.values())
        if changed_rows.is_table(each)
    }
    return list(found.values())


def _take_large(others: ByTask) -> list[Entry]:
    """Entries of large variables, which are removed from the tensors."""
    found: list[Entry] = []
    for task, tensors in others.items():
        rest = []
        for tensor in tensors:
            key = tensor.checkpoint_key
            variable = saved_variable(key, changed_rows.trackable_of(tensor))
            if variable is None:
                rest.append(tensor)
                continue
            pieces = variable.snapshot().items()
            found += [(key, spec, piece) for spec, piece in pieces]
        others[task] = rest
    return found


def _entries_of_shards(
    saver: internals.MultiDeviceSaver, by_task: ByTask, snapshot: bool
) -> Iterator[Entry]:
    """The entries of shards: their pieces, or values where there are none."""
    pieces: dict[str, dict[str, Piece]] = {}
    for task, tensors in by_task.items():
        for tensor in tensors:
            key = tensor.checkpoint_key
            shard = changed_rows.saved_shard(changed_rows.trackable_of(tensor))
            if shard is not None and key not in pieces:
                pieces[key] = shard.pieces_of_slice(snapshot)
            spec = tensor._tensor_save_spec.slice_spec.strip()
            if pieces.get(key):
                yield key, spec, pieces[key][spec]
            else:
                yield from _flat(_split(saver, {task: [tensor]}, None))


def _grouped(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Files of at most `PIECE` bytes, unless one entry has more."""
    file: list[Entry] = []
    size = 0
    for entry in entries:
        more = entry[2].shape.num_elements() * entry[2].dtype.size
        if file and size + more > checkpoint_slices.PIECE:
            yield file
            file, size = [], 0
        file.append(entry)
        size += more
    if file:
        yield file


def _others(
    saver: internals.MultiDeviceSaver,
    others: ByTask,
    rank: int,
    callback: ShardingCallback,
) -> list[list[Entry]]:
    """Entries that are not shards, by file: rank 0's, and own states."""
    files = _split(saver, others, callback)
    if rank == 0:
        return files
    return [
        [
            (changed_rows.name_of_rank(name, rank), spec, value)
            for name, spec, value in file
        ]
        for file in files
    ]


def _flat(lists: Iterable[Iterable[T]]) -> list[T]:
    return list(itertools.chain.from_iterable(lists))


def _shards_and_others(
    saver: internals.MultiDeviceSaver,
    rank: int,
    collectives: Collectives | None,
) -> tuple[ByTask, ByTask]:
    """This rank's tensors by device: shards, and others that it writes."""
    by_task = saver._shardable_tensors_by_task
    changed_rows.read_sums(_flat(by_task.values()), collectives)
    shards: ByTask = {}
    others: ByTask = {}
    for task, tensors in by_task.items():
        for tensor in tensors:
            found = changed_rows.trackable_of(tensor)
            if changed_rows.is_shard(found):
                shards.setdefault(task, []).append(tensor)
            elif rank == 0 or changed_rows.is_of_one_rank(found):
                others.setdefault(task, []).append(tensor)
    return shards, others


def _split(
    saver: internals.MultiDeviceSaver,
    by_task: ByTask,
    callback: ShardingCallback,
) -> list[list[Entry]]:
    """Names, slices and values of tensors, by file."""
    saver._shardable_tensors_by_task = by_task
    files = []
    for _, shards in saver._get_shards_by_task(callback):
        for shard in shards:
            entries = [
                (name, spec, value)
                for name, slices in shard.items()
                for spec, value in slices.items()
                if value is not None
            ]
            if entries:
                files.append(entries)
    return files


@dataclasses.dataclass(frozen=True)
class Parts:
    """This rank's part of a checkpoint, in memory.

    Attributes:
        prefix: path of the checkpoint.
        rank: number of this process.
        counts: number of files of every rank.
        files: entries of this rank, by file.
        options: `tf.train.CheckpointOptions`.
    """

    prefix: str
    rank: int
    counts: list[int]
    files: list[list[Entry]]
    options: tf.train.CheckpointOptions

    @property
    def folder(self) -> str:
        """The folder that ranks write to before the files are moved."""
        return f"{self.prefix}_ranks"

    def write(self) -> None:
        """Writes this rank's files, and empties their list.

        The ranks exchange the rows of pieces. A rank that cannot write takes
        part in all exchanges.
        """
        files = self.files
        try:
            gfile.makedirs(self.folder)
            with _Writer(self.folder, self.rank, self.options) as writer:
                while files:
                    writer.write(_read_pieces(files.pop(0)))
        except BaseException:
            with contextlib.suppress(tf.errors.OpError):
                while files:
                    _read_pieces(files.pop(0))
            files.clear()
            raise

    def put_into_place(self) -> None:
        """Merges the files of all ranks into one checkpoint, on rank 0."""
        parts = [
            f"{self.folder}/{rank}-{number}"
            for rank, count in enumerate(self.counts)
            for number in range(count)
        ]
        _check_all_there(parts, self.folder)
        tf.raw_ops.MergeV2Checkpoints(
            checkpoint_prefixes=parts,
            destination_prefix=f"{self.folder}/merged",
            delete_old_dirs=False,
        )
        checkpoint_files.sync(f"{self.folder}/merged.index")
        place(f"{self.folder}/merged", self.prefix)

    def clean(self) -> None:
        """Removes this rank's files; the last rank removes the folder too."""
        _clean(self.folder, self.rank)


class _Writer:
    """Writes files of a rank, and syncs each while the next one is made.

    Args:
        folder: folder of the files of all ranks.
        rank: number of this process.
        options: `tf.train.CheckpointOptions`.

    Attributes:
        count: number of files that have been written.
    """

    def __init__(
        self, folder: str, rank: int, options: tf.train.CheckpointOptions
    ) -> None:
        self._folder = folder
        self._rank = rank
        self._options = options
        self.count = 0
        self._thread = futures.ThreadPoolExecutor(1, "tfdist_ext sync")
        self._synced: list[futures.Future[None]] = []

    def write(self, entries: list[Entry]) -> None:
        path = f"{self._folder}/{self._rank}-{self.count}"
        _write(path, entries, self._options)
        self.count += 1
        written = (f"{path}.data-00000-of-00001", f"{path}.index")
        sync = self._thread.submit(checkpoint_files.sync, *written)
        self._synced.append(sync)

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._thread.shutdown()
        if error is None:
            for each in self._synced:
                each.result()
            checkpoint_files.sync(self._folder)


def save(
    saver: internals.MultiDeviceSaver,
    file_prefix: str | tf.Tensor,
    options: tf.train.CheckpointOptions | None,
    collectives: Collectives,
) -> None:
    """Writes the objects of a saver; all ranks must call.

    Args:
        saver: `MultiDeviceSaver` of this rank's objects.
        file_prefix: path of the checkpoint; the value of rank 0 is used.
        options: `tf.train.CheckpointOptions` or None.
        collectives: collectives of the strategy.
    """
    options = options or tf.train.CheckpointOptions()
    rank = collectives.group.rank
    prefix = _path_of_first(file_prefix, collectives)
    parts = Parts(prefix, rank, [], [], options)
    try:
        if rank == 0:
            remove(parts.folder)
            gfile.makedirs(parts.folder)
        collectives.barrier("checkpoint/folder")
        shards, others = _shards_and_others(saver, rank, collectives)
        with _Writer(parts.folder, rank, options) as writer:
            files: list[list[Entry]] = []
            for file in _files(saver, shards, others, rank, options):
                # Read at once: ranks write different numbers of files below.
                files.append(_read_pieces(file))
                # The last two of rank 0 may become one or three.
                if len(files) > (2 if rank == 0 else 0):
                    writer.write(files.pop(0))
            counts = _counts(prefix, files, collectives, writer.count)
            for file in files:
                writer.write(file)
        parts = dataclasses.replace(parts, counts=counts)
        collectives.barrier("checkpoint/written")
        if rank == 0:
            parts.put_into_place()
        collectives.barrier("checkpoint/placed")
    finally:
        parts.clean()


def _path_of_first(
    file_prefix: str | tf.Tensor, collectives: Collectives | None
) -> str:
    mine = tf.get_static_value(tf.convert_to_tensor(file_prefix)).decode()
    return text_of_first_rank(mine, collectives, "checkpoint/prefix")


def gather(
    saver: internals.MultiDeviceSaver,
    file_prefix: str | tf.Tensor,
    options: tf.train.CheckpointOptions | None,
    collectives: Collectives | None,
    changed: ChangedRows | None = None,
) -> Parts:
    """Collects what this rank writes; all ranks must call.

    Args:
        saver: `MultiDeviceSaver` of this rank's objects.
        file_prefix: path of the checkpoint; the value of rank 0 is used.
        options: `tf.train.CheckpointOptions` or None.
        collectives: collectives of the strategy; None in one process.
        changed: records the rows; if it has those of a full checkpoint, only
            changed rows are written.
    """
    options = options or tf.train.CheckpointOptions()
    rank = collectives.group.rank if collectives else 0
    prefix = _path_of_first(file_prefix, collectives)
    files = files_of(saver, options, collectives, changed)
    counts = _counts(prefix, files, collectives)
    return Parts(prefix, rank, counts, files, options)


def copied(parts: Parts) -> Parts:
    """The same with values that training does not change.

    Pieces are snapshots already; other values are copied.
    """
    files = [
        [(name, spec, _copy(value)) for name, spec, value in entries]
        for entries in parts.files
    ]
    return dataclasses.replace(parts, files=files)


def _copy(value: tf.Tensor | Piece) -> tf.Tensor | Piece:
    if isinstance(value, Piece):
        return value
    with tf.device("CPU:0"):
        value = tf.identity(value)
        if value.dtype == tf.string:  # strings do not change in place
            return value
        return tf.raw_ops.DeepCopy(x=value)


def _counts(
    prefix: str,
    files: list[list[Entry]],
    collectives: Collectives | None,
    written: int = 0,
) -> list[int]:
    """Number of files of every rank; the total differs from the old one.

    Args:
        prefix: path of the checkpoint.
        files: files that this rank will write; their number may change.
        collectives: collectives of the strategy; None in one process.
        written: number of files that it has written.
    """
    if collectives is None:
        if len(files) == checkpoint_index.data_files_in_use(prefix):
            _change_number(files)
        return [len(files)]
    mine = tf.constant([written + len(files)], tf.int64)
    counts: list[int] = (
        collectives.all_gather(mine, "checkpoint/files").numpy().tolist()
    )
    first, change = collectives.group.rank == 0, 0
    if first and sum(counts) == checkpoint_index.data_files_in_use(prefix):
        change = _change_number(files)
    mine = tf.constant([change] if first else [], tf.int64)
    counts[0] += int(collectives.all_gather(mine, "checkpoint/change")[0])
    return counts


def _change_number(files: list[list[Entry]]) -> int:
    """Adds or removes one file; returns the difference."""
    largest = max(files, key=len)
    if len(largest) > 1:
        files.append([largest.pop()])
        return 1
    # Every file may have one entry if there is a sharding callback. There is
    # more than one file, as the graph of the objects is always saved in
    # addition to their values.
    last = files.pop()
    files[-1] += last
    return -1


def _write(
    path: str, entries: list[Entry], options: tf.train.CheckpointOptions
) -> None:
    names, slices, values = zip(*entries, strict=True)
    # If no file descriptor is free, SaveV2 as the first op of a thread ends the
    # process with SIGSEGV. Opening a file raises OSError instead.
    with open(os.devnull, "rb"):
        pass
    with tf.device(options.experimental_io_device or "CPU:0"):
        tf.raw_ops.SaveV2(
            prefix=path,
            tensor_names=list(names),
            shape_and_slices=list(slices),
            tensors=list(values),
        )


def _read_pieces(entries: list[Entry]) -> list[Entry]:
    """Entries whose pieces are read; other ranks take part in the exchanges."""
    return [
        (name, spec, value.read() if isinstance(value, Piece) else value)
        for name, spec, value in entries
    ]


def _check_all_there(parts: Iterable[str], folder: str) -> None:
    missing = [part for part in parts if not gfile.exists(f"{part}.index")]
    if any(part.startswith(f"{folder}/0-") for part in missing):
        raise OSError(
            f"'{folder}', or files of rank 0 in it, were removed while the "
            "checkpoint was written."
        )
    if missing:
        raise OSError(
            f"Rank 0 does not see what other ranks have written: {missing}. "
            "All ranks must share the folder of a checkpoint."
        )


def place(merged: str, prefix: str) -> None:
    """Renames merged files, the index last, as it completes a checkpoint."""
    for path in _files_at(merged):
        if not path.endswith(".index"):
            target = prefix + path.removeprefix(merged)
            gfile.rename(path, target, overwrite=True)
    folder = os.path.dirname(prefix) or "."
    checkpoint_files.sync(folder)  # before the index that names them
    gfile.rename(f"{merged}.index", f"{prefix}.index", overwrite=True)
    checkpoint_files.sync(folder)
    count = checkpoint_index.data_files_in_use(prefix)
    for path in _files_at(prefix):
        if not path.endswith((".index", f"-of-{count:05d}")):
            gfile.remove(path)


def _files_at(prefix: str) -> list[str]:
    """The index and data files of a checkpoint, in no order."""
    folder, name = os.path.split(prefix)
    ending = re.compile(r"\.index|\.data-\d{5}-of-\d{5}")
    return [
        os.path.join(folder, found)
        for found in gfile.listdir(folder or ".")
        if found.startswith(name) and ending.fullmatch(found[len(name) :])
    ]


def _clean(folder: str, rank: int) -> None:
    """Removes this rank's files; the last rank removes the folder too."""
    try:
        for name in gfile.listdir(folder):
            merged = rank == 0 and name.startswith("merged")
            if merged or name.startswith(f"{rank}-"):
                gfile.remove(f"{folder}/{name}")
        if not gfile.listdir(folder):
            gfile.rmtree(folder)
    except tf.errors.OpError:
        pass  # another rank has removed it, or it is unreachable


def remove(folder: str) -> None:
    """Removes a folder left by a save in which a rank ended."""
    if gfile.exists(folder):
        gfile.rmtree(folder)
