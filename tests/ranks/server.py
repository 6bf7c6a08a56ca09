# SPDX-License-Identifier: Apache-2.0
"""Forks programs off a process that has loaded TensorFlow already.

Usage: server.py SOCKET

Loading TensorFlow takes seconds of a core, a fork milliseconds. A process that
has used TensorFlow has threads, which a fork would lose: this one only loads
it, and refuses to fork should it have any thread but its own.

A program comes from `enter.py`, which stands for it until it ends. The server
lives until its own standard input is closed.
"""

import contextlib
import ctypes
import dataclasses
import faulthandler
import gc
import json
import os
import pathlib
import random
import runpy
import selectors
import signal
import socket
import sys
import tempfile
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_LONGEST_REQUEST = 1 << 20


@dataclasses.dataclass(frozen=True)
class Program:
    """What `enter.py` was asked to run.

    Attributes:
        arguments: of the interpreter: a script or "-m" and a module, and
            what follows.
        environment: all variables.
        folder: where it runs.
        files: standard input, output and error.
    """

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    files: list[int]

    @classmethod
    def receive(cls, connection: socket.socket) -> "Program | None":
        """Reads a request; None if whoever made it has gone."""
        try:
            got = socket.recv_fds(connection, _LONGEST_REQUEST, 3)
        except ConnectionError:
            return None
        request, files, *_ = got
        return cls(**json.loads(request), files=files) if request else None


class Server:
    """Accepts programs, forks them and tells how they end."""

    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        self._listener.listen(64)
        self._selector = selectors.DefaultSelector()
        self._pids: set[int] = set()

    def serve(self) -> Callable[[], None] | None:
        """Forks programs until standard input ends.

        Returns:
            In the server itself None, in a forked process what it is to run.
        """
        self._listen(0, lambda: None)
        self._listen(self._listener.fileno(), lambda: None)
        while True:
            for key, _ in self._selector.select():
                if key.fd == 0:
                    for pid in self._pids:
                        with contextlib.suppress(ProcessLookupError):
                            os.killpg(pid, signal.SIGKILL)
                    return None
                if key.fd == self._listener.fileno():
                    connection, _ = self._listener.accept()
                    program = Program.receive(connection)
                    if program and (job := self._fork(program, connection)):
                        return job
                elif self._selector.get_map().get(key.fd) is key:
                    key.data()  # not unregistered, or another's, by now

    def _fork(
        self, program: Program, connection: socket.socket
    ) -> Callable[[], None] | None:
        threads = os.listdir("/proc/self/task")
        assert len(threads) == 1, f"cannot fork with threads {threads}"
        pid = os.fork()
        if pid == 0:
            self._listener.close()
            self._selector.close()
            connection.close()
            return lambda: become(program)
        os.setpgid(pid, pid)
        for file in program.files:
            os.close(file)
        self._pids.add(pid)
        end = os.pidfd_open(pid)

        def tell(number: int) -> None:
            with contextlib.suppress(OSError):  # it may have gone
                connection.send(b"%d" % number)

        def kill() -> None:  # nobody waits for it any more
            self._selector.unregister(connection.fileno())
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

        def reap() -> None:
            self._pids.remove(pid)
            status = os.waitpid(pid, 0)[1]
            self._selector.unregister(end)
            os.close(end)
            if connection.fileno() in self._selector.get_map():
                self._selector.unregister(connection.fileno())
                tell(status)
            connection.close()

        self._listen(end, reap)
        self._listen(connection.fileno(), kill)
        tell(pid)
        return None

    def _listen(self, file: int, call: Callable[[], None]) -> None:
        self._selector.register(file, selectors.EVENT_READ, call)


def become(program: Program) -> None:
    """Runs a program in this process, as the interpreter would."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for number, file in enumerate(program.files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(program.environment)
    os.chdir(program.folder)
    tempfile.tempdir = None  # which the environment names anew
    random.seed()
    sys.modules["numpy"].random.seed()
    if program.environment.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    paths = program.environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = filter(None, paths)
    if program.arguments[0] == "-m":
        sys.argv = program.arguments[1:]
        sys.path[0] = program.folder
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = program.arguments
        sys.path[0] = str(pathlib.Path(sys.argv[0]).parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


def load() -> None:
    """Imports what every rank imports, without using TensorFlow."""
    import tensorflow as tf

    import tfdist_ext
    from tfdist_ext.ops import library

    assert tf.keras.Model and tfdist_ext.HybridParallelStrategy
    assert tfdist_ext.layers and tfdist_ext.optimizers
    library.library()
    gc.collect()
    gc.freeze()  # a collection would write to pages that forks share


if __name__ == "__main__":
    server = Server(sys.argv[1])  # requests may come while it loads
    load()
    run = server.serve()
    if run is not None:
        run()
