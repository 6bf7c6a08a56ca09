# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that is copied at once and written while training goes on.

Rows are exchanged and copied between two steps. A thread of each rank then
writes the rank's files, with no exchange: those are for the thread that
trains. It asks from time to time how far all ranks are (`advance`); when all
have written, a thread of rank 0 puts the files into place.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext.checkpoints import saver
from tfdist_ext.checkpoints.changed_rows import ChangedRows
from tfdist_ext.collectives.calls import brief
from tfdist_ext.collectives.collectives import Collectives


class Phase(enum.IntEnum):
    """How far a rank is with a checkpoint."""

    WRITING = 0
    WRITTEN = 1
    PLACED = 2
    FAILED = 3


class LaterWrite:
    """One checkpoint on its way to the disk; all ranks make and ask it.

    Args:
        checkpoint: `tf.train.Checkpoint` of this rank's objects.
        path: of the checkpoint; rank 0's counts.
        collectives: of the strategy; None in one process.
        placed: called on rank 0 when the checkpoint is in its place.
        changed: what has changed since a full checkpoint, None for all.

    Attributes:
        path: of the checkpoint.
        phase: of this rank.
        seconds: that the copy took, for which training has waited.
    """

    def __init__(
        self,
        checkpoint: Any,
        path: str,
        collectives: Collectives | None,
        placed: Callable[[], None],
        changed: ChangedRows | None = None,
    ) -> None:
        start = time.monotonic()
        with saver.copying(changed) as copies:
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
        """Waits for what this rank's thread does, `timeout` seconds at most."""
        self._thread.join(timeout)

    def advance(self, phases: list[int]) -> str | None:
        """Takes the next step, once all ranks are ready for it.

        Args:
            phases: of all ranks, as they have told each other.

        Returns:
            None while it is under way, else why it failed, "" if it has not.
        """
        if Phase.WRITING in phases:
            return None
        if Phase.FAILED in phases:
            self._parts.clean()
            return self._failures()
        if Phase.PLACED in phases:
            self._parts.clean()
            return ""
        # What was told may be older than what the thread has done since.
        if self._parts.rank == 0 and not self._placing:
            self._placing = True
            self._start(self._place)
        return None

    def _start(self, target: Callable[[], None]) -> None:
        def run() -> None:
            try:
                target()
            except Exception as error:  # of a disk: training goes on
                self._failure = brief(error)
                self.phase = Phase.FAILED

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def _write(self) -> None:
        tf.io.gfile.makedirs(self._parts.folder)
        self._parts.write()
        self._parts.files.clear()  # and the memory that they take
        self.phase = Phase.WRITTEN

    def _place(self) -> None:
        self._parts.put_into_place()
        self._placed()
        self.phase = Phase.PLACED

    def _failures(self) -> str:
        """Why it failed, on every rank that it failed on."""
        rank = self._parts.rank
        mine = f"rank {rank}: {self._failure}; " if self._failure else ""
        if self._collectives is not None:
            text = np.frombuffer(mine.encode(), np.uint8)
            gathered = self._collectives.all_gather(
                tf.constant(text), "checkpoint/failures"
            )
            mine = gathered.numpy().tobytes().decode()
        return mine.removesuffix("; ")
