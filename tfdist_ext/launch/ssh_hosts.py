# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of several hosts by ssh, and watches them.

`remote_host.py` runs on each host, connected to this process by the standard
streams of an ssh client. The output of the ranks comes back through the client.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import IO
from typing import TextIO

from tfdist_ext.comm import addresses
from tfdist_ext.comm import handshake as secret_lib
from tfdist_ext.launch import local_ranks
from tfdist_ext.launch.launch_options import Host

# Prefix of a host's own line on standard output; other lines are of ranks.
MARK = b"tfdist-run host "
_REMOTE = "tfdist_ext.launch.remote_host"
# Prefixes of variables that are sent to hosts; others are set by --env.
_FORWARDED = ("TFDIST_", "TF_", "KERAS_", "XLA_", "NCCL_", "OMP_")
_KEPT = (secret_lib.SECRET, secret_lib.SECRET_FILE)
_POLL_SECONDS = 0.2
# Seconds between attempts to connect to a host again.
_AGAIN_SECONDS = 1.0
# Seconds for hosts to end and report, after the grace of their ranks.
_LAST_WORDS_SECONDS = 10.0
_SSH_FAILED = 255


class _Connection:
    """An ssh client and the host that it is connected to."""

    def __init__(
        self, host: Host, command: Sequence[str], lock: threading.Lock
    ) -> None:
        self.host = host
        self.begun = time.monotonic()
        self.ports: list[int] | None = None
        self._lock = lock
        self._output: local_ranks.Pump | None = None
        self._process = local_ranks.popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
        )
        assert self._process.stderr is not None
        self._errors = self._pump(self._process.stderr, sys.stderr)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _pump(self, source: IO[bytes], sink: TextIO) -> local_ranks.Pump:
        return local_ranks.Pump(
            os.dup(source.fileno()), sink.buffer, self._lock, prefix=None
        )

    def _read(self) -> None:
        """Waits for the host's own line; prints lines that come before it."""
        assert self._process.stdout is not None
        for line in iter(self._process.stdout.readline, b""):
            if line.startswith(MARK):
                self._output = self._pump(self._process.stdout, sys.stdout)
                self.ports = json.loads(line[len(MARK) :])
                return
            with self._lock:
                sys.stderr.buffer.write(line)
                sys.stderr.flush()

    def send(self, message: Mapping[str, object]) -> None:
        """Sends a message to the host, if it still reads."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")

    def poll(self) -> int | None:
        return self._process.poll()

    def how_it_ended(self) -> str:
        """The last messages of ssh or the host, and the exit code."""
        self._errors.join(_POLL_SECONDS)
        said = b"; ".join(list(self._errors.tail)[-3:]).decode(errors="replace")
        code = self._process.returncode
        how = f"host {self.host.login}: exit code {code}"
        return how + (f", {said}" if said else "")

    def end(self) -> None:
        """Closes the connection; prints the rest of the output."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        if self.poll() is None:
            self._process.kill()
            self._process.wait()
        for reader in (self._reader, self._output, self._errors):
            if reader is not None:
                reader.join(_LAST_WORDS_SECONDS)


def run(
    hosts: Sequence[Host],
    options: argparse.Namespace,
    environment: Mapping[str, str],
) -> local_ranks.Ended:
    """Runs the ranks of all hosts until all have ended.

    Args:
        hosts: hosts with at least one slot each.
        options: options of the command line, for one start.
        environment: variables of this process.

    Returns:
        How the ranks ended. The code is 0 if every rank succeeded; the exit
        code of the first host that failed, or 128 + the signal that this
        process got; 1 if not all hosts could be reached.
    """
    signals = local_ranks.signals_to_fetch()
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    lock = threading.Lock()
    with contextlib.ExitStack() as stack:
        stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, previous)

        def connect(host: Host) -> _Connection:
            command = _command(host, options, environment)
            connection = _Connection(host, command, lock)
            stack.callback(connection.end)
            connection.send(_job(host, options, environment))
            return connection

        connections = [connect(host) for host in hosts]
        end = _reach(connections, connect, options)
        if end is None:
            _place(connections)
            end = _wait(connections, options.grace)
    if end.message:
        print(f"tfdist-run: {end.message}", file=sys.stderr, flush=True)
    return local_ranks.Ended(end.code, end.by_signal)


@dataclasses.dataclass(frozen=True)
class _End:
    """Why it ended: `message` is empty if every rank succeeded."""

    code: int
    message: str
    by_signal: bool = False


def _command(
    host: Host, options: argparse.Namespace, environment: Mapping[str, str]
) -> list[str]:
    """The command line of an ssh client; all users can see it."""
    path = environment.get("PYTHONPATH")
    words = [
        *(["env", f"PYTHONPATH={path}"] if path else []),
        *(sys.executable, "-m", _REMOTE),
    ]
    there = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(words)}"
    # If an option is set twice, ssh uses the first value: the user's.
    return [
        *("ssh", "-T", *options.ssh_options),
        *("-o", "BatchMode=yes", "-o", "ServerAliveInterval=15"),
        *("-o", f"ConnectTimeout={max(1, int(options.start_timeout))}"),
        *(host.login, there),
    ]


def _job(
    host: Host, options: argparse.Namespace, environment: Mapping[str, str]
) -> dict[str, object]:
    """What a host runs: options of its own `tfdist-run`."""
    arguments = ["-n", str(host.slots), "--grace", str(options.grace)]
    if options.log_dir is not None:
        arguments += ["--log-dir", str(options.log_dir)]
    if options.stats is not None:
        arguments += ["--stats-every", str(options.stats)]
    if options.module:
        arguments += ["--module"]
    for name, value in options.env:
        arguments += ["--env", f"{name}={value}"]
    forwarded = {
        name: value
        for name, value in environment.items()
        if name.startswith(_FORWARDED) and name not in _KEPT
    }
    return {
        "arguments": [*arguments, options.script, *options.arguments],
        "environment": forwarded,
    }


def _reach(
    connections: list[_Connection],
    connect: Callable[[Host], _Connection],
    options: argparse.Namespace,
) -> _End | None:
    """Waits for all hosts; at a restart, goes on without missing ones.

    Args:
        connections: connections to every host; afterwards, to the hosts that
            are there.
        connect: creates another connection, for one that has ended.
        options: options of the command line, for one start.

    Returns:
        None, or why this ends.
    """
    timeout = options.start_timeout
    deadline = time.monotonic() + timeout
    while missing := [each for each in connections if each.ports is None]:
        number = _stop_signal(0.05)
        if number:
            return _end_by_signal(number)
        failed = [each for each in missing if each.poll() is not None]
        for each in failed:
            if each.ports is not None:
                continue
            if not options.restarts:
                return _End(1, f"cannot start ranks on {each.how_it_ended()}")
            if time.monotonic() > each.begun + _AGAIN_SECONDS:
                connections[connections.index(each)] = connect(each.host)
        if time.monotonic() > deadline:
            there = [each for each in connections if each.ports is not None]
            ranks = sum(each.host.slots for each in there)
            names = ", ".join(each.host.login for each in missing)
            if options.restarts and ranks >= (options.min_ranks or options.n):
                print(
                    f"tfdist-run: goes on with {ranks} ranks, without hosts "
                    f"that did not come back: {names}",
                    file=sys.stderr,
                    flush=True,
                )
                connections[:] = there
                return None
            option = "--restart" if options.restarts else "--start"
            why = "".join(f"; {each.how_it_ended()}" for each in failed)
            return _End(
                1,
                f"hosts {names} did not start within {option}-timeout "
                f"{timeout:g}{why}",
            )
    return None


def _place(connections: Sequence[_Connection]) -> None:
    """Sends each host the addresses of all ranks, and its first rank."""
    workers = [
        addresses.join(each.host.name, port)
        for each in connections
        for port in each.ports or []
    ]
    # It is generated here, and is only sent to the ranks, by this connection.
    secret = secrets.token_hex(32)
    first_rank = 0
    for each in connections:
        place = {"workers": workers, "first_rank": first_rank, "secret": secret}
        each.send(place)
        first_rank += each.host.slots


def _wait(connections: Sequence[_Connection], grace: float) -> _End:
    """Waits for the ends of all hosts; a failure on one ends the others."""
    end, deadline = _End(0, ""), float("inf")
    while time.monotonic() < deadline:
        number = _stop_signal(_POLL_SECONDS)
        running = [each for each in connections if each.poll() is None]
        failed = _failed(connections)
        if number:
            for each in running:
                each.send({"signal": number})
            patience = (0.0 if end.code else grace) + _LAST_WORDS_SECONDS
            # After a failure, the failure stays the result; nothing is
            # restarted.
            end = dataclasses.replace(
                end if end.code else _end_by_signal(number), by_signal=True
            )
            deadline = min(deadline, time.monotonic() + patience)
        elif failed is not None and not end.code:
            code = failed.poll() or 1
            message = f"ranks on host {failed.host.login} failed: exit code "
            message += f"{code}"
            if code == _SSH_FAILED:
                message += ", or ssh has lost the connection"
            end = _End(code, message)
            for each in running:
                each.send({"ended": f"on another host: {message}"})
            deadline = time.monotonic() + grace + _LAST_WORDS_SECONDS
        if not running:
            break
    codes = [each.poll() for each in connections]
    if end.by_signal and local_ranks.NOT_SAVED in codes:
        return dataclasses.replace(end, code=local_ranks.NOT_SAVED)
    return end


def _end_by_signal(number: int) -> _End:
    name = signal.Signals(number).name
    return _End(128 + number, f"got {name}", by_signal=True)


def _failed(connections: Sequence[_Connection]) -> _Connection | None:
    return next((each for each in connections if each.poll()), None)


def _stop_signal(seconds: float) -> int:
    """Waits for a stop signal; returns its number, or 0."""
    info = signal.sigtimedwait(local_ranks.signals_to_fetch(), seconds)
    stop = info is not None and info.si_signo in local_ranks.STOP_SIGNALS
    return info.si_signo if info is not None and stop else 0
