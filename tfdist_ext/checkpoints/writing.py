# SPDX-License-Identifier: Apache-2.0
"""One TensorFlow checkpoint, written by all ranks.

Every rank writes what it holds to files of its own in `PATH_ranks/`, rank 0
what is no shard as well. Rank 0 then merges their indexes and moves the files
into place, the new index last and at once, under which the data files of the
last checkpoint of that path still lie: a number of files that differs keeps
the names apart. So a path holds the old checkpoint or the new one, whenever
a rank dies.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext.checkpoints import syncing
from tfdist_ext.checkpoints.changed_rows import ChangedRows
from tfdist_ext.checkpoints.changed_rows import Entry
from tfdist_ext.checkpoints.gathering import files_of
from tfdist_ext.collectives.collectives import Collectives
from tfdist_ext.collectives.first_rank import text_of_first_rank

gfile = tf.io.gfile


@dataclasses.dataclass(frozen=True)
class Parts:
    """What this rank is to write of a checkpoint, in memory.

    Attributes:
        prefix: path of the checkpoint.
        rank: of this process.
        counts: files of every rank.
        files: entries of this rank, by file.
        options: `tf.train.CheckpointOptions`.
    """

    prefix: str
    rank: int
    counts: list[int]
    files: list[list[Entry]]
    options: Any

    @property
    def folder(self) -> str:
        """Where the ranks write before all is put into place."""
        return f"{self.prefix}_ranks"

    def write(self) -> None:
        """Writes this rank's files; no other rank is needed for that."""
        for number, entries in enumerate(self.files):
            path = f"{self.folder}/{self.rank}-{number}"
            _write(path, entries, self.options)
            syncing.sync(*_files_at(path))
        syncing.sync(self.folder)

    def put_into_place(self) -> None:
        """Makes one checkpoint of what all ranks have written; on rank 0."""
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
        syncing.sync(f"{self.folder}/merged.index")
        place(f"{self.folder}/merged", self.prefix)

    def clean(self) -> None:
        """Removes this rank's files, the last rank the folder too."""
        _clean(self.folder, self.rank)


def save(
    saver: Any, file_prefix: Any, options: Any, collectives: Collectives
) -> None:
    """Writes what a saver holds; all ranks must call.

    Args:
        saver: `MultiDeviceSaver` of this rank's objects.
        file_prefix: path of the checkpoint; rank 0's counts.
        options: `tf.train.CheckpointOptions` or None.
        collectives: of the strategy.
    """
    parts = gather(saver, file_prefix, options, collectives)
    try:
        if parts.rank == 0:
            remove(parts.folder)
            gfile.makedirs(parts.folder)
        collectives.barrier("checkpoint/folder")
        parts.write()
        collectives.barrier("checkpoint/written")
        if parts.rank == 0:
            parts.put_into_place()
        collectives.barrier("checkpoint/placed")
    finally:
        parts.clean()


def gather(
    saver: Any,
    file_prefix: Any,
    options: Any,
    collectives: Collectives | None,
    changed: ChangedRows | None = None,
) -> Parts:
    """What this rank is to write; all ranks must call.

    Args:
        saver: `MultiDeviceSaver` of this rank's objects.
        file_prefix: path of the checkpoint; rank 0's counts.
        options: `tf.train.CheckpointOptions` or None.
        collectives: of the strategy; None in one process.
        changed: what the rows are is noted there; and only those are written
            that have changed, where it says so.
    """
    options = options or tf.train.CheckpointOptions()
    rank = collectives.group.rank if collectives else 0
    mine = tf.get_static_value(tf.convert_to_tensor(file_prefix)).decode()
    prefix = text_of_first_rank(mine, collectives, "checkpoint/prefix")
    files = files_of(saver, options, collectives, changed)
    counts = _counts(prefix, files, collectives)
    return Parts(prefix, rank, counts, files, options)


def copied(parts: Parts) -> Parts:
    """The same with values of its own, which training does not change."""
    files = [
        [(name, spec, _copy(value)) for name, spec, value in entries]
        for entries in parts.files
    ]
    return dataclasses.replace(parts, files=files)


def _copy(value: tf.Tensor) -> tf.Tensor:
    if marks.assembly(value) is not None:
        return value
    with tf.device("CPU:0"):
        value = tf.identity(value)
        if value.dtype == tf.string:  # nobody changes texts in place
            return value
        return tf.raw_ops.DeepCopy(x=value)


def _counts(
    prefix: str, files: list[list[Entry]], collectives: Collectives | None
) -> list[int]:
    """Files of every rank, in all another number than the path has now."""
    if collectives is None:
        if len(files) == data_files_in_use(prefix):
            _change_number(files)
        return [len(files)]
    mine = tf.constant([len(files)], tf.int64)
    counts: list[int] = (
        collectives.all_gather(mine, "checkpoint/files").numpy().tolist()
    )
    first, change = collectives.group.rank == 0, 0
    if first and sum(counts) == data_files_in_use(prefix):
        change = _change_number(files)
    mine = tf.constant([change] if first else [], tf.int64)
    counts[0] += int(collectives.all_gather(mine, "checkpoint/change")[0])
    return counts


def _change_number(files: list[list[Entry]]) -> int:
    """Makes one file more of some, or one less; the difference."""
    largest = max(files, key=len)
    if len(largest) > 1:
        files.append([largest.pop()])
        return 1
    # As a sharding callback may have it; there is more than one, as there is
    # always the graph of the objects beside their values.
    last = files.pop()
    files[-1] += last
    return -1


def data_files_in_use(prefix: str) -> int:
    """Data files of the checkpoint that lies at a path, 0 if there is none."""
    if not gfile.exists(f"{prefix}.index"):
        return 0
    with gfile.GFile(f"{prefix}.index", "rb") as file:
        start = file.read(16)
    # The index begins with the entry of the empty name: two lengths of 0,
    # the length of the header, and the header, whose first field is this,
    # seven bits to a byte.
    if start[:2] != b"\0\0" or start[3:4] != b"\x08":
        return 0
    count = 0
    for place, byte in enumerate(start[4:]):
        count |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            break
    return count


def _write(path: str, entries: list[Entry], options: Any) -> None:
    names, slices, values = zip(*entries, strict=True)
    # Without a free file descriptor, SaveV2 ends the process with SIGSEGV where
    # it is the first op of a thread. This raises OSError instead.
    with open(os.devnull, "rb"):
        pass
    with tf.device(options.experimental_io_device or "CPU:0"):
        tf.raw_ops.SaveV2(
            prefix=path,
            tensor_names=list(names),
            shape_and_slices=list(slices),
            tensors=list(map(_assembled, values)),
        )


def _assembled(value: tf.Tensor) -> tf.Tensor:
    assemble = marks.assembly(value)
    return value if assemble is None else assemble(value)


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
    """Gives merged files their names; the index, without which none, last."""
    for path in _files_at(merged):
        if not path.endswith(".index"):
            target = prefix + path.removeprefix(merged)
            gfile.rename(path, target, overwrite=True)
    folder = os.path.dirname(prefix) or "."
    syncing.sync(folder)  # the index names files that are there
    gfile.rename(f"{merged}.index", f"{prefix}.index", overwrite=True)
    syncing.sync(folder)
    count = data_files_in_use(prefix)
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
    """Removes this rank's files of a save, the last rank the folder too."""
    try:
        for name in gfile.listdir(folder):
            merged = rank == 0 and name.startswith("merged")
            if merged or name.startswith(f"{rank}-"):
                gfile.remove(f"{folder}/{name}")
        if not gfile.listdir(folder):
            gfile.rmtree(folder)
    except tf.errors.OpError:
        pass  # Another rank was faster, or the folder cannot be reached.


def remove(folder: str) -> None:
    """Removes a folder left by a save in which a rank died."""
    if gfile.exists(folder):
        gfile.rmtree(folder)
