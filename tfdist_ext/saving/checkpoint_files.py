# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of a folder, by step, and their files."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
from typing import Any

import tensorflow as tf

gfile = tf.io.gfile


# Errors of file systems that cannot sync a folder, for example.
_CANNOT = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


def sync(*paths: str) -> None:
    """Waits until files and folders are on the disk.

    Args:
        *paths: paths of files and folders. Paths of TensorFlow's other file
            systems, such as "gs://...", are ignored.

    Raises:
        OSError: the disk is full or broken.
    """
    for path in paths:
        if not os.path.exists(path):
            continue
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _CANNOT:
                raise
        finally:
            os.close(descriptor)


_INDEX = re.compile(r"ckpt-(\d+)(?:-since-(\d+))?\.index")
_DATA = re.compile(r"ckpt-(\d+)(?:-since-(\d+))?\.data-\d+-of-\d+")
_UNFINISHED = re.compile(r"ckpt-\d+(-since-\d+)?_ranks/?")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in a folder.

    Attributes:
        step: step at which it was made.
        since: step of the full checkpoint that it is relative to; None for a
            full one.
    """

    step: int
    since: int | None = None

    @property
    def name(self) -> str:
        """Its name in the folder, without a suffix."""
        since = "" if self.since is None else f"-since-{self.since}"
        return f"ckpt-{self.step}{since}"

    @property
    def full(self) -> Checkpoint:
        """The full checkpoint that it is relative to, or itself."""
        return self if self.since is None else Checkpoint(self.since)

    def path(self, folder: str) -> str:
        """Its path in a folder."""
        return f"{folder}/{self.name}"


def found_in(folder: str) -> list[Checkpoint]:
    """The checkpoints, latest first; at the same step, full ones first."""
    return sorted(_matching(folder, _INDEX), key=_by_time, reverse=True)


def without_index(folder: str) -> list[tuple[Checkpoint, bool]]:
    """Checkpoints without an index file, newer than all that have one.

    Returns:
        Each with whether it was complete at some time: then the folder's list
        of checkpoints names it. The others may be left by an interrupted save.
    """
    whole = {*_matching(folder, _INDEX)}
    last = max((each.step for each in whole), default=-1)
    state = tf.train.get_checkpoint_state(folder)
    names = list(state.all_model_checkpoint_paths) if state is not None else []
    files = [f"{name.rpartition('/')[2]}.index" for name in names]
    matches = filter(None, map(_INDEX.fullmatch, files))
    listed = {Checkpoint(int(match[1])) for match in matches}
    found = {*listed, *_matching(folder, _DATA)} - whole
    return [
        (each, each in listed)
        for each in sorted(found, key=_by_time, reverse=True)
        if each.step > last
    ]


def _matching(folder: str, pattern: re.Pattern[str]) -> list[Checkpoint]:
    if not gfile.isdir(folder):
        return []
    matches = filter(None, map(pattern.fullmatch, gfile.listdir(folder)))
    return [Checkpoint(int(m[1]), int(m[2]) if m[2] else None) for m in matches]


def keep_last(folder: str, most: int, last: int) -> None:
    """Removes all but the last checkpoints, and records the last one.

    It keeps `most` full checkpoints, and as many deltas whose full one is kept.

    Args:
        folder: folder of the checkpoints.
        most: number of full checkpoints to keep.
        last: step of the checkpoint that was just made. Later ones are removed:
            they could not be read, so training went back behind them.
    """
    all_ = found_in(folder)
    found = [each for each in all_ if each.step <= last]
    full = [each for each in found if each.since is None][:most]
    deltas = [each for each in found if each.since is not None][:most]
    left = {*full, *(each for each in deltas if each.full in full)}
    for each in all_:
        if each not in left:
            _remove(each.path(folder))
    _write_latest(folder, [each.name for each in reversed(full)])


def remove_unfinished(folder: str) -> None:
    """Removes what interrupted saves have left."""
    if gfile.isdir(folder):
        for name in gfile.listdir(folder):
            if _UNFINISHED.fullmatch(name):
                gfile.rmtree(f"{folder}/{name}")


def _by_time(kept: Checkpoint) -> tuple[int, bool, int]:
    return kept.step, kept.since is None, kept.full.step


def _remove(path: str) -> None:
    gfile.remove(f"{path}.index")  # which makes the rest unreadable
    for data in gfile.glob(f"{path}.data-*"):
        gfile.remove(data)


def _write_latest(folder: str, names: list[str]) -> None:
    """Writes the file for `tf.train.latest_checkpoint`; full ones only."""
    if not names:
        return
    lines = [f'model_checkpoint_path: "{names[-1]}"']
    lines += [f'all_model_checkpoint_paths: "{name}"' for name in names]
    with gfile.GFile(f"{folder}/checkpoint.part", "w") as file:
        file.write("\n".join([*lines, ""]))
    sync(f"{folder}/checkpoint.part")
    gfile.rename(
        f"{folder}/checkpoint.part", f"{folder}/checkpoint", overwrite=True
    )
    sync(folder)


class Opened:
    """A checkpoint whose index is readable.

    Args:
        path: path of the checkpoint.

    Raises:
        tf.errors.DataLossError: the index cannot be read. It replaces the
            errors of TensorFlow's reader, which depend on its status:
            IndexError, for example, if a file is too short.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._reader = tf.train.load_checkpoint(path)
            self.names = frozenset(self._reader.get_variable_to_shape_map())
        except Exception as error:
            raise self._torn(error) from error

    def tensor(self, name: str) -> Any:
        """The tensor of a name, complete and with a matching checksum.

        Raises:
            tf.errors.DataLossError: the tensor is missing or damaged.
        """
        try:
            return self._reader.get_tensor(name)
        except Exception as error:
            raise self._torn(error) from error

    def _torn(self, error: Exception) -> tf.errors.OpError:
        return tf.errors.DataLossError(None, None, f"{self._path}: {error}")
