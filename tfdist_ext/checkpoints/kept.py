# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of a folder, by the step that they were made at."""

from __future__ import annotations

import dataclasses
import re

import tensorflow as tf

from tfdist_ext.checkpoints import syncing

gfile = tf.io.gfile

_INDEX = re.compile(r"ckpt-(\d+)(?:-since-(\d+))?\.index")
_DATA = re.compile(r"ckpt-(\d+)(?:-since-(\d+))?\.data-\d+-of-\d+")
_UNFINISHED = re.compile(r"ckpt-\d+(-since-\d+)?_ranks/?")


@dataclasses.dataclass(frozen=True)
class Kept:
    """A checkpoint in a folder.

    Attributes:
        step: that it was made at.
        since: step of the full one since which it has the changes; None for
            one that is full.
    """

    step: int
    since: int | None = None

    @property
    def name(self) -> str:
        """Its name in the folder, without an ending."""
        since = "" if self.since is None else f"-since-{self.since}"
        return f"ckpt-{self.step}{since}"

    @property
    def full(self) -> Kept:
        """That which has all, for what has not changed."""
        return self if self.since is None else Kept(self.since)

    def path(self, folder: str) -> str:
        """Where it lies."""
        return f"{folder}/{self.name}"


def found_in(folder: str) -> list[Kept]:
    """The checkpoints, the last one first; of a step, the full one first."""
    return sorted(_matching(folder, _INDEX), key=_by_time, reverse=True)


def without_index(folder: str) -> list[tuple[Kept, bool]]:
    """Checkpoints that have lost their index, later than those that have one.

    Returns:
        Each with whether it was complete once: the folder's list of
        checkpoints names it. Others may be what an interrupted save has left.
    """
    whole = {*_matching(folder, _INDEX)}
    last = max((each.step for each in whole), default=-1)
    state = tf.train.get_checkpoint_state(folder)
    names = list(state.all_model_checkpoint_paths) if state is not None else []
    files = [f"{name.rpartition('/')[2]}.index" for name in names]
    matches = filter(None, map(_INDEX.fullmatch, files))
    listed = {Kept(int(match[1])) for match in matches}
    found = {*listed, *_matching(folder, _DATA)} - whole
    return [
        (each, each in listed)
        for each in sorted(found, key=_by_time, reverse=True)
        if each.step > last
    ]


def _matching(folder: str, pattern: re.Pattern[str]) -> list[Kept]:
    if not gfile.isdir(folder):
        return []
    matches = filter(None, map(pattern.fullmatch, gfile.listdir(folder)))
    return [Kept(int(m[1]), int(m[2]) if m[2] else None) for m in matches]


def keep(folder: str, most: int, last: int) -> None:
    """Removes all but the last checkpoints, and says which is the last.

    As many full ones are left, and as many deltas, each with its full one.

    Args:
        folder: of the checkpoints.
        most: full ones that are left.
        last: step of the one that was just made. Later ones are of a run that
            was gone back behind, since they cannot be read.
    """
    all_ = found_in(folder)
    found = [each for each in all_ if each.step <= last]
    full = [each for each in found if each.since is None][:most]
    deltas = [each for each in found if each.since is not None][:most]
    left = {*full, *(each for each in deltas if each.full in full)}
    for each in all_:
        if each not in left:
            _remove(each.path(folder))
    _say_last(folder, [each.name for each in reversed(full)])


def remove_unfinished(folder: str) -> None:
    """Removes what saves have left that were interrupted."""
    if gfile.isdir(folder):
        for name in gfile.listdir(folder):
            if _UNFINISHED.fullmatch(name):
                gfile.rmtree(f"{folder}/{name}")


def _by_time(kept: Kept) -> tuple[int, bool, int]:
    return kept.step, kept.since is None, kept.full.step


def _remove(path: str) -> None:
    gfile.remove(f"{path}.index")  # without which the rest is nothing
    for data in gfile.glob(f"{path}.data-*"):
        gfile.remove(data)


def _say_last(folder: str, names: list[str]) -> None:
    """Writes what `tf.train.latest_checkpoint` reads; full ones only."""
    if not names:
        return
    lines = [f'model_checkpoint_path: "{names[-1]}"']
    lines += [f'all_model_checkpoint_paths: "{name}"' for name in names]
    with gfile.GFile(f"{folder}/checkpoint.part", "w") as file:
        file.write("\n".join([*lines, ""]))
    syncing.sync(f"{folder}/checkpoint.part")
    gfile.rename(
        f"{folder}/checkpoint.part", f"{folder}/checkpoint", overwrite=True
    )
    syncing.sync(folder)
