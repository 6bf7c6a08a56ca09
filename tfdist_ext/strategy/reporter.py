# SPDX-License-Identifier: Apache-2.0
"""Statistics that a rank reports to its launcher, and short tracebacks."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import pathlib
import re
import sys
import threading
import time
import types
from collections.abc import Callable
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import tensorflow as tf

from tfdist_ext.comm.process_group import ProcessGroup
from tfdist_ext.launch import live_stats

_LOG = logging.getLogger("tfdist_ext")


class Reporter:
    """A thread that writes this rank's statistics about once a second.

    Args:
        group: process group of the rank; None with a single process.
        file: file of the rank; None if no statistics are requested.

    Attributes:
        shares: returns the current share of each rank in a batch.
        staleness: returns `Figures.staleness`.
    """

    def __init__(
        self, group: ProcessGroup | None, file: live_stats.RankFile | None
    ) -> None:
        self.shares: Callable[[], tuple[float, ...]] = tuple
        self.staleness: Callable[[], tuple[int, ...]] = tuple
        self._group = group
        self._file = file
        if file is None:
            return
        self._began = time.monotonic()
        with tf.init_scope(), tf.device("CPU:0"):
            # A graph can run several steps without returning to Python.
            self._steps = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._end = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=[file], daemon=True
        )
        self._thread.start()
        # Functions registered later run first: the group closes after this.
        atexit.register(self.close)

    def count_step(self) -> None:
        """Counts a step each time that the calling graph runs."""
        if self._file is None:
            return
        with tf.device("CPU:0"):
            tf.raw_ops.AssignAddVariableOp(
                resource=self._steps.handle, value=tf.constant(1, tf.int64)
            )

    def close(self) -> None:
        """Ends the thread; a second call does nothing."""
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
            _LOG.warning(
                "this rank sends no more numbers to --stats: %s", error
            )

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
            self.shares(),
            self.staleness(),
        )


def start_reporter(
    group: ProcessGroup | None, environment: Mapping[str, str]
) -> Reporter:
    """Starts to report statistics if the launcher requests them.

    Args:
        group: process group of the rank; None with a single process.
        environment: environment of the process. A process that a rank has
            started has the same one, and does not report.
    """
    file = None
    if path := environment.get(live_stats.VARIABLE):
        with contextlib.suppress(OSError):
            file = live_stats.RankFile(path)
    return Reporter(group, file)


def _memory() -> int:
    """Resident memory of this process, in bytes."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


_PACKAGE = pathlib.Path(__file__).parents[1]
_LIBRARIES = ("keras", "tf_keras", "tensorflow")
# Prefix that TensorFlow puts before the reason of an error.
_PLACE = re.compile(r"\{\{function_node [^}]*\}\} *")
_HEAD = re.compile(
    r"\s|$|Graph execution error|Detected at node|\d+ root error|node "
    r"|<stack traces unavailable>"
)

_before: Any = None
_name = ""


def shorten_tracebacks(name: str) -> None:
    """Shortens the tracebacks of errors that end this process.

    Args:
        name: name of this rank, printed before the reason; "" for none.
    """
    global _before, _name
    _name = name
    if _before is None:
        _before, sys.excepthook = sys.excepthook, _show


def _show(
    kind: type[BaseException],
    error: BaseException,
    traceback: TracebackType | None,
) -> None:
    filtered = tf.debugging.is_traceback_filtering_enabled()
    if filtered and issubclass(kind, Exception):
        print(f"{_name}{reason_of(error)}", file=sys.stderr)
        _shorten(error)
        traceback = error.__traceback__
    _before(kind, error, traceback)


def reason_of(error: BaseException) -> str:
    """Type of an error and the line of its message that gives the reason."""
    lines = _PLACE.sub("", str(error)).splitlines()
    found = next((line for line in lines if not _HEAD.match(line)), "")
    return f"{type(error).__name__}: {found}"


def _shorten(error: BaseException | None) -> None:
    """Removes frames from the traceback, and from those of its causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = without_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def without_frames(
    traceback: types.TracebackType | None,
) -> types.TracebackType | None:
    """A traceback without frames of this package, Keras and TensorFlow.

    If there are no other frames, returns the entire traceback.
    """
    frames = []
    part = traceback
    while part is not None:
        frames.append(part)
        part = part.tb_next
    kept = [each for each in frames if not _is_left_out(each)]
    shown: types.TracebackType | None = None
    for each in reversed(kept):
        shown = types.TracebackType(
            shown, each.tb_frame, each.tb_lasti, each.tb_lineno
        )
    return shown or traceback


def _is_left_out(part: types.TracebackType) -> bool:
    frame = part.tb_frame
    module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    path = pathlib.Path(frame.f_code.co_filename)
    return module in _LIBRARIES or _PACKAGE in path.parents
