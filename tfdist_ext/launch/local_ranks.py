# SPDX-License-Identifier: Apache-2.0
"""Runs the ranks of one host as processes until all have ended."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import fcntl
import os
import pathlib
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import BinaryIO
from typing import Protocol

from tfdist_ext.launch import live_stats

# Matches a progress bar of Keras 3 ("3/10 ━━━━━━ 1s", coloured) or tf_keras
# ("3/10 [===>....] - 1s"), which is written to a pipe as lines.
_BAR = re.compile(
    rb"^(?:\x1b\[[0-9;]*m|\s)*\d+/(?:\d+|Unknown)(?:\x1b\[[0-9;]*m|\s)*"
    rb"(?:\xe2\x94\x81|\[[=>.]+\])"
)
_TAIL_LINES = 20
_LONGEST_LINE = 1 << 16
_UNFINISHED_SECONDS = 1.0  # until a prompt without a line end is written


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
        ends_with_sink: bool = False,
    ) -> None:
        """Starts to copy.

        Args:
            source: descriptor to read, closed at the end.
            sink: file to write to.
            lock: lock held while writing, shared by all pumps.
            prefix: prefix of every line; progress bars are then left out. None
                copies every byte: at once to a terminal, otherwise in whole
                lines, because lines of other ranks go to the same file.
            log: log file that also gets every byte.
            ends_with_sink: whether to close `source` if `sink` cannot be
                written, so that the rank gets an error too.
        """
        self.tail: collections.deque[bytes] = collections.deque(
            maxlen=_TAIL_LINES
        )
        self._source = source
        self._sink = sink
        self._lock = lock
        self._prefix = prefix
        self._log = log
        self._ends_with_sink = ends_with_sink
        self._unlogged = b""
        self._unwritten = b""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def join(self, timeout: float) -> None:
        """Waits for the end of the output, for at most `timeout` seconds."""
        self._thread.join(timeout)

    def _run(self) -> None:
        lines = LineSplitter(self._show_line)
        try:
            while data := self._read():
                self._write_log(data)
                self._copy(data)
                lines.feed(data)
            self._write(self._unwritten)
            lines.close()
            self._write_log(b"", last=True)
        except (OSError, ValueError):
            pass  # `sink` cannot be written.
        finally:
            os.close(self._source)

    def _read(self) -> bytes:
        if self._unwritten:
            poll = select.poll()
            poll.register(self._source, select.POLLIN)
            if not poll.poll(_UNFINISHED_SECONDS * 1000):
                self._write(self._unwritten)
                self._unwritten = b""
        return _read(self._source)

    def _copy(self, data: bytes) -> None:
        """Writes what ends with a line end or a carriage return."""
        if self._prefix is not None:
            return
        data = self._unwritten + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if self._sink.isatty() or len(data) - end > _LONGEST_LINE:
            end = len(data)
        self._unwritten = data[end:]
        self._write(data[:end])

    def _show_line(self, line: bytes) -> None:
        self.tail.append(line)
        if self._prefix is not None:
            self._write(self._prefix + line + b"\n")

    def _write_log(self, data: bytes, last: bool = False) -> None:
        """Logs complete lines, as two outputs of a rank share one file."""
        if self._log is None:
            return
        lines, end, self._unlogged = (self._unlogged + data).rpartition(b"\n")
        rest = self._unlogged if last else b""
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._log.write(lines + end + rest)
            self._log.flush()

    def _write(self, data: bytes) -> None:
        try:
            with self._lock:
                self._sink.write(data)
                self._sink.flush()
        except (OSError, ValueError):  # for example, the reader has ended
            if self._ends_with_sink:
                raise


class LineSplitter:
    """Splits bytes into lines, without progress bars.

    Of a line that carriage returns rewrote, only the last state counts; if that
    is a progress bar, the line is left out.
    """

    def __init__(self, show: Callable[[bytes], None]) -> None:
        self._show = show
        self._rest = b""

    def feed(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._finish(line)
        if len(self._rest) > _LONGEST_LINE:
            # A progress bar may rewrite one line for hours: the last state is
            # enough.
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
    except OSError:  # a pseudo terminal ends with EIO
        return b""


STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
_SIGNALS = {*STOP_SIGNALS, signal.SIGCHLD}
_POLL_SECONDS = 0.2
_DRAIN_SECONDS = 5.0
_CHILD = os.fspath(pathlib.Path(__file__).with_name("child.py"))
# Exit code of a rank that was told to end and could not save: EX_IOERR of
# sysexits.h.
NOT_SAVED = 74
# How the error of a rank names the rank that it has lost.
_NAMED = re.compile(rb"failed: (rank (\d+) \(.*)")


@dataclasses.dataclass(frozen=True)
class Rank:
    """One process to start.

    Attributes:
        rank: number of the rank.
        address: host and port of the rank, for messages.
        command: program and arguments.
        environment: variables added to the launcher's own.
    """

    rank: int
    address: str
    command: Sequence[str]
    environment: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Ended:
    """How the ranks of a host have ended.

    Attributes:
        code: exit code for the launcher.
        by_signal: whether a signal stopped the launcher.
    """

    code: int
    by_signal: bool = False


class Nodes(Protocol):
    """The connection to the launchers on other hosts."""

    def failure(self) -> str | None:
        """Returns what has failed on another host, None if nothing has."""

    def report(self, failure: str | None) -> None:
        """Sends the other hosts how this one ended, None for success."""


class _Process:
    """A started rank, with the threads that copy its output."""

    def __init__(
        self,
        rank: Rank,
        log: BinaryIO | None,
        terminal: bool,
        lock: threading.Lock,
    ) -> None:
        self.rank = rank
        # Rank 0 writes to a terminal itself, unless its output is copied to a
        # log. Its errors are read, as they name a rank that it has lost.
        copied = rank.rank != 0 or log is not None or not terminal
        piped = copied or not sys.stdout.isatty()
        reads_errors = piped or not sys.stderr.isatty()
        terminal = piped and rank.rank == 0 and sys.stdout.isatty()
        source, out = (
            (os.openpty() if terminal else os.pipe()) if piped else (-1, None)
        )
        error_source, error = os.pipe() if reads_errors else (-1, None)
        if terminal:
            _imitate_terminal(source)
        self._process = popen(
            rank.command,
            env={**os.environ, **rank.environment},
            # A rank in a background process group could not read from a
            # terminal.
            stdin=None if _takes_input(rank) else subprocess.DEVNULL,
            stdout=out,
            stderr=error,
        )
        self.pid = self._process.pid
        for descriptor in (out, error):
            if descriptor is not None:
                os.close(descriptor)
        prefix = None if rank.rank == 0 else b"[%d] " % rank.rank
        self._pumps = [
            Pump(
                each,
                sink.buffer,
                lock,
                prefix=prefix,
                log=log,
                ends_with_sink=sink is sys.stdout and not copied,
            )
            for each, sink in ((source, sys.stdout), (error_source, sys.stderr))
            if each >= 0
        ]

    def __str__(self) -> str:
        rank = self.rank
        return f"rank {rank.rank} (pid {self.pid}, {rank.address})"

    def poll(self) -> int | None:
        return self._process.poll()

    def send(self, number: int) -> None:
        """Sends a signal to the rank and all processes that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def drain(self, seconds: float = _DRAIN_SECONDS) -> list[bytes]:
        """Waits for the end of the output; returns the last error lines."""
        for pump in self._pumps:
            pump.join(seconds)
        return list(self._pumps[-1].tail) if self._pumps else []


def run(
    ranks: Iterable[Rank],
    *,
    grace: float,
    log_dir: pathlib.Path | None = None,
    nodes: Nodes | None = None,
    terminal: bool = True,
    stats: float | None = None,
    stats_json: pathlib.Path | None = None,
) -> Ended:
    """Starts ranks, waits for all, and stops the others if one fails.

    Args:
        ranks: ranks to start.
        grace: seconds between asking a rank to stop and killing it.
        log_dir: folder for a log per rank, created if missing.
        nodes: connection to the launchers on other hosts, if any.
        terminal: whether rank 0 writes to standard output itself; otherwise its
            output is copied, and rank 0 goes on if the reader has ended.
        stats: seconds between two lines of statistics; None for none.
        stats_json: file for these lines as JSON.

    Returns:
        How the ranks ended. The code is 0 if every rank succeeded; the exit
        code of the first rank that failed, or 128 + the signal that ended it or
        the launcher; 1 if the failure was on another host.
    """
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, signals_to_fetch())
    processes: list[_Process] = []
    with contextlib.ExitStack() as stack:
        stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, previous)
        stack.callback(_kill_all, processes)
        lock = threading.Lock()
        live = None
        if stats is not None:
            ranks = list(ranks)
            folder = tempfile.TemporaryDirectory(prefix="tfdist")
            path = stack.enter_context(folder)
            live = _live_stats(path, ranks, stats, stats_json, lock)
        for rank in ranks:
            if signal.sigpending() & STOP_SIGNALS:
                break  # told to stop before all were started
            log = _open_log(log_dir, rank)
            if log is not None:
                stack.enter_context(log)
            if live is not None:
                own = {**rank.environment, **live.environment(rank.rank)}
                rank = dataclasses.replace(rank, environment=own)
            processes.append(_Process(rank, log, terminal, lock))
        end = _wait(processes, nodes, live)
        if nodes is not None:
            nodes.report(end.message)
        _announce(processes, end, grace, lock)
        _stop(processes, end.stop_signal, grace, lock)
        return Ended(_finish(processes, end), end.by_signal)


def _live_stats(
    folder: str,
    ranks: Sequence[Rank],
    seconds: float,
    json_path: pathlib.Path | None,
    lock: threading.Lock,
) -> live_stats.LiveStats:
    return live_stats.LiveStats(
        folder,
        [rank.rank for rank in ranks],
        seconds,
        lambda line: _show(line, lock),
        os.fspath(json_path) if json_path is not None else None,
    )


def signals_to_fetch() -> set[signal.Signals]:
    """The signals to wait for; not SIGHUP under nohup.

    A signal that is blocked would be received although it is ignored.
    """
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return _SIGNALS - {signal.SIGHUP}
    return _SIGNALS


@dataclasses.dataclass(frozen=True)
class _End:
    """Why waiting ended: `message` is None if every rank succeeded."""

    code: int
    message: str | None
    stop_signal: int
    culprit: _Process | None = None
    by_signal: bool = False


def _show(line: str, lock: threading.Lock) -> None:
    """Prints a line; on a terminal it replaces a progress bar."""
    over = "\r\x1b[K" if sys.stderr.isatty() else ""
    with lock, contextlib.suppress(OSError, ValueError):
        print(f"{over}tfdist-run: {line}", file=sys.stderr, flush=True)


def _wait(
    processes: Sequence[_Process],
    nodes: Nodes | None,
    live: live_stats.LiveStats | None,
) -> _End:
    """Waits until all ranks succeeded, one failed, or a signal came."""
    running = list(processes)
    while running:
        info = signal.sigtimedwait(_SIGNALS, _POLL_SECONDS)
        if info is not None and info.si_signo in STOP_SIGNALS:
            name = signal.Signals(info.si_signo).name
            return _End(
                128 + info.si_signo,
                f"got {name}",
                info.si_signo,
                by_signal=True,
            )
        for process in list(running):
            code = process.poll()
            if code:
                return _failure(process, code)
            if code == 0:
                running.remove(process)
        if nodes is not None and (failure := nodes.failure()) is not None:
            return _End(1, failure, signal.SIGTERM)
        if live is not None:
            live.look(process.rank.rank for process in running)
    return _End(0, None, signal.SIGTERM)


def _failure(process: _Process, code: int) -> _End:
    if code > 0:
        how = f"exit code {code}"
    else:
        how = f"signal {-code} ({_signal_name(-code)})"
    exit_code = code if code > 0 else 128 - code
    message = f"{process} failed: {how}"
    return _End(exit_code, message, signal.SIGTERM, process)


def _announce(
    processes: Sequence[_Process],
    end: _End,
    grace: float,
    lock: threading.Lock,
) -> None:
    """Prints why the ranks are stopped, and which rank a failed one names."""
    if end.message is None:
        return
    _show(end.message, lock)
    culprit = end.culprit
    if culprit is not None:
        # Processes that the rank has started may still use its output.
        found = [_NAMED.search(line) for line in culprit.drain(0.5)]
        named = [each for each in found if each is not None]
        if named and int(named[-1][2]) != culprit.rank.rank:
            text = named[-1][1].decode(errors="replace")
            _show(f"rank {culprit.rank.rank} names {text}", lock)
    running = [p.rank.rank for p in processes if p.poll() is None]
    if running:
        ranks = live_stats.named(running)
        verb = "is" if len(running) == 1 else "are"
        _show(f"stops {ranks}, which {verb} killed after {grace:g} s", lock)


def _stop(
    processes: Sequence[_Process],
    number: int,
    grace: float,
    lock: threading.Lock,
) -> None:
    """Asks the running ranks to end, then kills them."""
    if all(process.poll() is not None for process in processes):
        return
    for process in processes:
        process.send(number)
    deadline = time.monotonic() + grace
    name = signal.Signals(number).name
    why = f"did not end within {grace:g} s after {name}"
    while time.monotonic() < deadline:
        info = signal.sigtimedwait(_SIGNALS, 0.05)
        if all(process.poll() is not None for process in processes):
            return
        if info is not None and info.si_signo in STOP_SIGNALS:
            again = signal.Signals(info.si_signo).name
            why = f"got {again} again and had not ended yet"
            break
    for process in processes:
        if process.poll() is None:
            process.send(signal.SIGKILL)
            _show(f"{process} {why}: killed", lock)


def _finish(processes: Sequence[_Process], end: _End) -> int:
    """Kills what is left, prints the rest of the output and the report."""
    _kill_all(processes)
    tails = {process.pid: process.drain() for process in processes}
    if end.message is None:
        return 0
    code = end.code
    if end.by_signal:
        for process in processes:
            if process.poll() == NOT_SAVED:
                code = NOT_SAVED
                print(
                    f"tfdist-run: {process} could not save its last state: "
                    f"exit code {NOT_SAVED}",
                    file=sys.stderr,
                )
    if len(processes) > 1:
        print("tfdist-run: all ranks of this host stopped", file=sys.stderr)
    culprit = end.culprit
    if culprit is not None and (tail := tails[culprit.pid]):
        number = culprit.rank.rank
        print(
            f"tfdist-run: last lines of rank {number} on stderr:",
            file=sys.stderr,
        )
        for line in tail:
            print(f"  {line.decode(errors='replace')}", file=sys.stderr)
    sys.stderr.flush()
    return code


def _kill_all(processes: Sequence[_Process]) -> None:
    """Kills the process groups, with all processes that ranks left."""
    for process in processes:
        process.send(signal.SIGKILL)
    deadline = time.monotonic() + _DRAIN_SECONDS
    while time.monotonic() < deadline:
        if all(process.poll() is not None for process in processes):
            return
        time.sleep(0.01)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "real-time signal"


def _takes_input(rank: Rank) -> bool:
    return rank.rank == 0 and not sys.stdin.isatty()


def _open_log(log_dir: pathlib.Path | None, rank: Rank) -> BinaryIO | None:
    if log_dir is None:
        return None
    log_dir.mkdir(parents=True, exist_ok=True)
    return (log_dir / f"rank-{rank.rank}.log").open("wb")


def _imitate_terminal(source: int) -> None:
    """Sets the width of our terminal; bytes are written unchanged."""
    with contextlib.suppress(OSError, termios.error):
        size = fcntl.ioctl(sys.stdout.fileno(), termios.TIOCGWINSZ, bytes(8))
        fcntl.ioctl(source, termios.TIOCSWINSZ, size)
        settings = termios.tcgetattr(source)
        settings[1] &= ~termios.OPOST
        termios.tcsetattr(source, termios.TCSANOW, settings)


def popen(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Starts a program that is killed when this process ends.

    It is in a session and a process group of its own. Its signals have default
    handlers, except those that this process ignores.

    Args:
        command: program and arguments.
        options: options of `subprocess.Popen`.

    Raises:
        OSError: there is no such program, or no process can be created.
    """
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(
            errno.ENOENT, os.strerror(errno.ENOENT), command[0]
        )
    return subprocess.Popen(
        [sys.executable, "-S", _CHILD, str(os.getpid()), *command],
        start_new_session=True,
        **options,
    )
