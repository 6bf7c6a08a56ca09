# SPDX-License-Identifier: Apache-2.0
"""Shows what ranks print: rank 0 as it is, the others line by line."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import threading
from collections.abc import Callable
from typing import BinaryIO

# A progress bar of Keras 3 ("3/10 ━━━━━━ 1s", coloured) or tf_keras
# ("3/10 [===>....] - 1s"), which on a pipe is written as lines.
_BAR = re.compile(
    rb"^(?:\x1b\[[0-9;]*m|\s)*\d+/(?:\d+|Unknown)(?:\x1b\[[0-9;]*m|\s)*"
    rb"(?:\xe2\x94\x81|\[[=>.]+\])"
)
_TAIL_LINES = 20
_LONGEST_LINE = 1 << 16


class Pump:
    """A thread that copies one output of a rank until it ends.

    Attributes:
        tail: the last lines written, without progress bars.
    """

    def __init__(
        self,
        source: int,
        sink: BinaryIO,
        lock: threading.Lock,
        *,
        prefix: bytes | None,
        log: BinaryIO | None = None,
    ) -> None:
        """Starts to copy.

        Args:
            source: descriptor to read, closed at the end.
            sink: where to write.
            lock: held while writing, shared by all pumps.
            prefix: put before every line, progress bars left out; None copies
                every byte as it is.
            log: file that receives every byte as well.
        """
        self.tail: collections.deque[bytes] = collections.deque(
            maxlen=_TAIL_LINES
        )
        self._source = source
        self._sink = sink
        self._lock = lock
        self._prefix = prefix
        self._log = log
        self._unlogged = b""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def join(self, timeout: float) -> None:
        """Waits for the end of the output, `timeout` seconds at most."""
        self._thread.join(timeout)

    def _run(self) -> None:
        lines = LineSplitter(self._show_line)
        try:
            while data := _read(self._source):
                self._write_log(data)
                if self._prefix is None:
                    self._write(data)
                lines.feed(data)
            lines.close()
            self._write_log(b"", last=True)
        finally:
            os.close(self._source)

    def _show_line(self, line: bytes) -> None:
        self.tail.append(line)
        if self._prefix is not None:
            self._write(self._prefix + line + b"\n")

    def _write_log(self, data: bytes, last: bool = False) -> None:
        """Logs whole lines: two outputs of a rank share one file."""
        if self._log is None:
            return
        lines, end, self._unlogged = (self._unlogged + data).rpartition(b"\n")
        rest = self._unlogged if last else b""
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._log.write(lines + end + rest)
            self._log.flush()

    def _write(self, data: bytes) -> None:
        # Whoever reads our output may be gone; the ranks go on.
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._sink.write(data)
            self._sink.flush()


class LineSplitter:
    """Cuts bytes into lines and leaves out progress bars.

    A line that was rewritten by carriage returns counts as what it showed
    last, and not at all if that was a progress bar.
    """

    def __init__(self, show: Callable[[bytes], None]) -> None:
        self._show = show
        self._rest = b""

    def feed(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._finish(line)
        if len(self._rest) > _LONGEST_LINE:
            # A bar redrawn for hours on one line: its last state is enough.
            before, _, self._rest = self._rest.rpartition(b"\r")
            if not before:
                self._finish(self._rest)
                self._rest = b""

    def close(self) -> None:
        if self._rest:
            self._finish(self._rest)
            self._rest = b""

    def _finish(self, line: bytes) -> None:
        states = line.replace(b"\b", b"").rstrip(b"\r").split(b"\r")
        if _BAR.match(states[-1]) or (len(states) > 1 and not states[-1]):
            return
        self._show(states[-1])


def _read(source: int) -> bytes:
    try:
        return os.read(source, 1 << 16)
    except OSError:  # A pseudo terminal ends with EIO.
        return b""
