# SPDX-License-Identifier: Apache-2.0
"""Tells the launcher what this rank does, for `tfdist-run --stats`."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections.abc import Mapping

import tensorflow as tf

from tfdist_ext.collectives.process_group import ProcessGroup
from tfdist_ext.launcher import live_stats

_LOG = logging.getLogger("tfdist_ext")


class Reporter:
    """A thread that writes this rank's figures about once a second.

    Args:
        group: of the rank; None with a single process.
        file: of the rank; None where nobody asks for figures.
    """

    def __init__(
        self, group: ProcessGroup | None, file: live_stats.RankFile | None
    ) -> None:
        self._group = group
        self._file = file
        if file is None:
            return
        self._began = time.monotonic()
        with tf.init_scope(), tf.device("CPU:0"):
            # Steps that are run by a graph pass no Python.
            self._steps = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._end = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=[file], daemon=True
        )
        self._thread.start()
        # Before that of the group, which is older.
        atexit.register(self.close)

    def count_step(self) -> None:
        """Counts a step, in each run of the graph where this is called."""
        if self._file is None:
            return
        with tf.device("CPU:0"):
            tf.raw_ops.AssignAddVariableOp(
                resource=self._steps.handle, value=tf.constant(1, tf.int64)
            )

    def close(self) -> None:
        """Ends the thread; does nothing the second time."""
        atexit.unregister(self.close)
        if self._file is not None:
            self._end.set()
            self._thread.join()
            self._file.close()
            self._file = None

    def _run(self, file: live_stats.RankFile) -> None:
        try:
            while True:
                file.write(self._figures())
                if self._end.wait(live_stats.SECONDS):
                    return
        except (OSError, tf.errors.OpError) as error:
            _LOG.warning("--stats hears no more of this rank: %s", error)

    def _figures(self) -> live_stats.Figures:
        sent = 0
        waited: tuple[float, ...] = (0.0,)
        if self._group is not None:
            stats = self._group.stats()
            sent, waited = stats.bytes_sent, stats.waited
        return live_stats.Figures(
            self._began,
            time.monotonic(),
            int(self._steps.numpy()),
            sent,
            waited,
            _memory(),
        )


def start(
    group: ProcessGroup | None, environment: Mapping[str, str]
) -> Reporter:
    """Starts to report, where the launcher asks for it.

    Args:
        group: of the rank; None with a single process.
        environment: of the process. It may be one that a rank has started,
            which goes unreported.
    """
    file = None
    if path := environment.get(live_stats.VARIABLE):
        with contextlib.suppress(OSError):
            file = live_stats.RankFile(path)
    return Reporter(group, file)


def _memory() -> int:
    """Bytes of this process that are in memory."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
