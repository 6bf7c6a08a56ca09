# SPDX-License-Identifier: Apache-2.0
"""Signals that tell a process to end soon, while `fit` runs.

Python handles a signal when the main thread comes back from TensorFlow, and
takes two that come before as one. So a thread counts them: the first is a
notice, another one ends the process at once, whatever the main thread is in.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from collections.abc import Sequence

from tfdist_ext.launcher.local_ranks import NOT_SAVED as NOT_SAVED

EXIT_CODE = 128 + signal.SIGTERM


class Notice:
    """Whether this process was told to end.

    Attributes:
        signal: name of the first signal that came, "" before that.
    """

    def __init__(self) -> None:
        self.signal = ""

    @contextlib.contextmanager
    def heeding(self, numbers: Sequence[signal.Signals]) -> Iterator[None]:
        """Takes signals for notices inside; in the main thread only.

        Args:
            numbers: of the signals. Those that are ignored, or that something
                else than Python handles, stay as they are.
        """
        self.signal = ""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        before = signal.set_wakeup_fd(ours.fileno(), warn_on_full_buffer=False)
        watch = threading.Thread(
            target=self._watch, args=(theirs, frozenset(numbers)), daemon=True
        )
        watch.start()
        replaced = {}
        try:
            for number in numbers:
                if signal.getsignal(number) not in (None, signal.SIG_IGN):
                    replaced[number] = signal.signal(number, _wait)
            yield
        finally:
            for number, handler in replaced.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(before)
            ours.close()  # ends the thread
            watch.join()

    def _watch(self, source: socket.socket, numbers: frozenset[int]) -> None:
        with source:
            while received := source.recv(64):
                for number in received:
                    if number not in numbers:
                        continue
                    if self.signal:
                        sys.stderr.write("told to end twice: ends at once\n")
                        sys.stderr.flush()
                        os._exit(EXIT_CODE)
                    self.signal = signal.Signals(number).name


def _wait(number: int, frame: object) -> None:
    """Handles a signal in Python, where nothing is to be done."""
