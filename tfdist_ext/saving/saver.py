# SPDX-License-Identifier: Apache-2.0
"""TensorFlow's methods that save and restore checkpoints, as joint calls."""

from __future__ import annotations

import collections as collections_lib
import contextlib
import copy
import enum
import json
import os
import threading
import time
import warnings
from collections.abc import Callable
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext import tensorflow_internals as internals
from tfdist_ext import thread_context
from tfdist_ext.comm.calls import brief_error
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.comm.exchanges import path_to_read
from tfdist_ext.comm.exchanges import text_of_first_rank
from tfdist_ext.numbers import model_state
from tfdist_ext.saving import checkpoint_reading
from tfdist_ext.saving import checkpoint_writing
from tfdist_ext.saving.changed_rows import ChangedRows
from tfdist_ext.saving.changed_rows import collectives_of
from tfdist_ext.saving.changed_rows import variable_of
from tfdist_ext.thread_context import current
from tfdist_ext.type_names import Arguments
from tfdist_ext.type_names import JsonObject
from tfdist_ext.type_names import Keywords
from tfdist_ext.type_names import Original
from tfdist_ext.type_names import StageFunction
from tfdist_ext.type_names import T
from tfdist_ext.type_names import Trackable


@contextlib.contextmanager
def copying(
    changed: ChangedRows | None = None,
) -> Iterator[list[checkpoint_writing.Parts]]:
    """Makes savers used in the context add to a list, instead of writing.

    What they add keeps its values while training goes on: snapshots of shards,
    and copies of everything else.

    Args:
        changed: changes since a full checkpoint, to save only those; None to
            save everything.

    Yields:
        The list.
    """
    copies: list[checkpoint_writing.Parts] = []
    with thread_context.setting(copies=copies, changed=changed):
        yield copies


def relative_to(full: str | None) -> AbstractContextManager[None]:
    """What is restored inside has changed since another checkpoint.

    Args:
        full: path of the full checkpoint that the delta is relative to; None if
            a full checkpoint is restored.
    """
    return thread_context.setting(full=full)


def on_all_ranks(verb: str) -> StageFunction:
    """A joint call of a checkpoint method, for models of several ranks."""

    def call(
        original: Original[T],
        checkpoint: tf.train.Checkpoint,
        *args: Any,
        **kwargs: Any,
    ) -> T:
        objects = objects_of(checkpoint)
        collectives = collectives_of(objects)
        with thread_context.setting(savers=collectives):
            if collectives is None:
                return original(checkpoint, *args, **kwargs)
            (path, *_) = [*args, *kwargs.values()]
            _check_eager(verb, path)
            args = tuple(map(_synchronous, args))
            kwargs = {name: _synchronous(arg) for name, arg in kwargs.items()}
            with collectives.joint_call(f"{verb} '{path}'"):
                if verb == "restore":
                    args, kwargs = _from_first(args, kwargs, collectives)
                if verb == "save":
                    model_state.compare_replicas(
                        map(variable_of, objects),
                        collectives,
                        "before a checkpoint is saved",
                    )
                result = original(checkpoint, *args, **kwargs)
                collectives.barrier(f"checkpoint/{verb}")
            return result

    return call


def _from_first(
    args: Arguments, kwargs: Keywords, collectives: Collectives
) -> tuple[Arguments, Keywords]:
    """The arguments, with the path of rank 0 as the first one."""
    (path, *_) = [*args, *kwargs.values()]
    path = path_to_read(path, collectives)
    if args:
        return (path, *args[1:]), kwargs
    (name, *_) = kwargs
    return args, {**kwargs, name: path}


def objects_of(checkpoint: tf.train.Checkpoint) -> list[Trackable]:
    """All objects that a checkpoint saves and restores.

    Args:
        checkpoint: `tf.train.Checkpoint`.
    """
    objects: list[Trackable] = checkpoint._saver._graph_view.descendants()
    return objects


def _check_eager(verb: str, path: object) -> None:
    if not tf.executing_eagerly():
        raise ValueError(
            f"A checkpoint of several ranks cannot {verb} inside of a "
            f"tf.function. Received: path={path}. Call it outside, or from a "
            "callback."
        )


def _synchronous(
    argument: tf.train.CheckpointOptions,
) -> tf.train.CheckpointOptions:
    """Checkpoint options without those that need a single rank."""
    if not getattr(argument, "experimental_enable_async_checkpoint", False):
        return argument
    warnings.warn(
        "experimental_enable_async_checkpoint has no effect with several "
        "ranks: the checkpoint is written before the call returns. In `fit`, "
        "the callback tfdist_ext.callbacks.Resume writes beside training.",
        stacklevel=2,
    )
    options = copy.copy(argument)
    options.experimental_enable_async_checkpoint = False
    return options


def save_parts(
    original: Original[None],
    saver: internals.MultiDeviceSaver,
    file_prefix: str | tf.Tensor,
    options: tf.train.CheckpointOptions | None = None,
) -> None:
    collectives = current.savers
    if current.copies is not None:
        parts = checkpoint_writing.gather(
            saver, file_prefix, options, collectives, current.changed
        )
        return current.copies.append(checkpoint_writing.copied(parts))
    if collectives is None:
        return original(saver, file_prefix, options)
    return checkpoint_writing.save(saver, file_prefix, options, collectives)


def restore_parts(
    original: Original[dict[str, tf.Operation]],
    saver: internals.MultiDeviceSaver,
    file_prefix: str | tf.Tensor,
    options: tf.train.CheckpointOptions | None = None,
) -> dict[str, tf.Operation]:
    if not tf.executing_eagerly():
        return original(saver, file_prefix, options)
    return checkpoint_reading.restore(
        *(original, saver, file_prefix, options),
        *(current.savers, current.full),
    )


def save_managed(
    original: Original[T],
    manager: tf.train.CheckpointManager,
    *args: Any,
    **kwargs: Any,
) -> T:
    collectives = collectives_of(objects_of(manager.checkpoint))
    if collectives is None:
        return original(manager, *args, **kwargs)
    with collectives.joint_call(f"save into '{manager.directory}'"):
        first = _state_of_first_rank(manager, collectives)
        if _is_first(collectives) or not _same_folder(manager, first):
            saved = original(manager, *args, **kwargs)
            _state_of_first_rank(manager, collectives)
            return saved
        # Only rank 0 removes old checkpoints and writes the state file. It uses
        # its own clock: with different clocks, ranks would select different
        # checkpoints to keep.
        with _without_files(manager):
            saved = original(manager, *args, **kwargs)
        first = _state_of_first_rank(manager, collectives)
        kept = collections_lib.OrderedDict(first["kept"])
        manager._maybe_delete = kept
        manager._last_preserved_timestamp = first["preserved"]
    return saved


def _is_first(collectives: Collectives) -> bool:
    return collectives.group.rank == 0


def _same_folder(
    manager: tf.train.CheckpointManager, first: JsonObject
) -> bool:
    return os.path.abspath(manager.directory) == first["folder"]


def _state_of_first_rank(
    manager: tf.train.CheckpointManager, collectives: Collectives
) -> JsonObject:
    state = json.dumps(
        {
            "folder": os.path.abspath(manager.directory),
            "kept": list(manager._maybe_delete.items()),
            "preserved": manager._last_preserved_timestamp,
        }
    )
    text = text_of_first_rank(state, collectives, "checkpoint/manager")
    found: JsonObject = json.loads(text)
    return found


@contextlib.contextmanager
def _without_files(manager: tf.train.CheckpointManager) -> Iterator[None]:
    manager._sweep = manager._record_state = lambda: None
    try:
        yield
    finally:
        del manager._sweep, manager._record_state


def refuse_by_name(
    original: Original[T],
    saver: tf.compat.v1.train.Saver,
    *args: Any,
    **kwargs: Any,
) -> T:
    if collectives_of(tf.nest.flatten(saver._var_list or [])) is not None:
        raise ValueError(
            "tf.compat.v1.train.Saver supports neither several ranks nor "
            "partitioned tables. Use tf.train.Checkpoint."
        )
    return original(saver, *args, **kwargs)


class Phase(enum.IntEnum):
    """Phase of a rank's write of a checkpoint."""

    WRITING = 0
    WRITTEN = 1
    PLACED = 2
    FAILED = 3


class BackgroundWrite:
    """Writes one checkpoint in a thread; all ranks create and advance it.

    Args:
        checkpoint: `tf.train.Checkpoint` of this rank's objects.
        path: path of the checkpoint; the value of rank 0 is used.
        collectives: collectives of the strategy; None in one process.
        placed: called on rank 0 when the checkpoint is at its path.
        changed: changes since a full checkpoint, to write only those; None to
            write everything.

    Attributes:
        path: path of the checkpoint.
        phase: phase of this rank.
        seconds: seconds that the start took, for which training waited.
    """

    def __init__(
        self,
        checkpoint: tf.train.Checkpoint,
        path: str,
        collectives: Collectives | None,
        placed: Callable[[], None],
        changed: ChangedRows | None = None,
    ) -> None:
        start = time.monotonic()
        with copying(changed) as copies:
            checkpoint.write(path)
        (self._parts,) = copies
        self.seconds = time.monotonic() - start
        self.path = self._parts.prefix
        self.phase = Phase.WRITING
        self._collectives = collectives
        self._placed = placed
        self._failure = ""
        self._placing = False
        self._start(self._write)

    def join(self, timeout: float) -> None:
        """Waits for this rank's thread, for at most `timeout` seconds."""
        self._thread.join(timeout)

    def advance(self, phases: list[int]) -> str | None:
        """Starts the next phase, if all ranks are ready for it.

        Args:
            phases: phases of all ranks, as exchanged.

        Returns:
            None while the write is not finished, then the reason of a failure,
            "" for success.
        """
        if Phase.WRITING in phases:
            return None
        if Phase.FAILED in phases:
            self._parts.clean()
            return self._failures()
        if Phase.PLACED in phases:
            self._parts.clean()
            return ""
        # The phases may be older than this thread's last change of its phase.
        if self._parts.rank == 0 and not self._placing:
            self._placing = True
            self._start(self._place)
        return None

    def _start(self, target: Callable[[], None]) -> None:
        def run() -> None:
            try:
                target()
            except Exception as error:  # training goes on
                self._failure = brief_error(error)
                self.phase = Phase.FAILED

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def _write(self) -> None:
        self._parts.write()
        self.phase = Phase.WRITTEN

    def _place(self) -> None:
        self._parts.put_into_place()
        self._placed()
        self.phase = Phase.PLACED

    def _failures(self) -> str:
        """The failures of all ranks."""
        rank = self._parts.rank
        mine = f"rank {rank}: {self._failure}; " if self._failure else ""
        if self._collectives is not None:
            text = np.frombuffer(mine.encode(), np.uint8)
            gathered = self._collectives.all_gather(
                tf.constant(text), "checkpoint/failures"
            )
            mine = gathered.numpy().tobytes().decode()
        return mine.removesuffix("; ")
