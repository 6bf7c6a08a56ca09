# SPDX-License-Identifier: Apache-2.0
"""Runs the ranks of one host for `tfdist-run --hostfile` on another host.

The launcher starts this program by ssh. They exchange lines of JSON by standard
input and output, so that no secret is on a command line, and no port is opened
for it.

    launcher -> host   {"arguments": [...], "environment": {...}}
    host -> launcher   tfdist-run host [port of each rank, ...]
    launcher -> host   {"workers": [...], "first_rank": 2, "secret": "..."}
    launcher -> host   {"signal": 15} or {"ended": "what has failed"}

Standard input ends when the launcher or the connection ends: then the ranks are
asked to end as well.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from typing import BinaryIO

from tfdist_ext.comm import listener
from tfdist_ext.comm.handshake import Message
from tfdist_ext.launch import command
from tfdist_ext.launch import launch_options
from tfdist_ext.launch import local_ranks
from tfdist_ext.launch.ssh_hosts import MARK


class _Launcher:
    """Messages of the launcher while ranks run; a `local_ranks.Nodes`."""

    def __init__(self, control: BinaryIO) -> None:
        self._control = control
        self._failure: str | None = None
        self._thread: threading.Thread | None = None

    def failure(self) -> str | None:
        # The thread is started only now, as it inherits the set of blocked
        # signals. Signals that the launcher forwards must be waited for, and
        # must not end this process.
        if self._thread is None:
            self._thread = threading.Thread(target=self._listen, daemon=True)
            self._thread.start()
        return self._failure

    def report(self, failure: str | None) -> None:
        """Does nothing, as the exit code has this information."""

    def _listen(self) -> None:
        while (message := _receive(self._control)) is not None:
            if "signal" in message:
                os.kill(os.getpid(), signal.Signals(message["signal"]))
            else:
                self._failure = str(message["ended"])
        self._failure = self._failure or "lost tfdist-run, which started it"


def main() -> int:
    """Runs the ranks of this host; returns their exit code."""
    control = os.fdopen(os.dup(0), "rb", buffering=0)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)  # for the ranks
    os.close(empty)
    job = _receive(control)
    if job is None:
        return 1
    os.environ.update(job["environment"])
    options = launch_options.parse(job["arguments"])
    return command.explained(options, lambda: _run(options, control))


def _run(options: argparse.Namespace, control: BinaryIO) -> int:
    # It is not loopback: other hosts may connect to any interface.
    with listener.reserve_ports(
        options.n, "", command.own_ports(options)
    ) as reserved:
        sys.stdout.buffer.write(MARK + json.dumps(reserved).encode() + b"\n")
        sys.stdout.buffer.flush()
        place = _receive(control)
        if place is None:
            return 1
        ranks = command.ranks_of_host(
            options, place["workers"], place["first_rank"], place["secret"]
        )
        ended = local_ranks.run(
            ranks,
            grace=options.grace,
            log_dir=options.log_dir,
            nodes=_Launcher(control),
            terminal=False,
            stats=options.stats,
        )
        return ended.code


def _receive(control: BinaryIO) -> Message | None:
    """The next message; None if there are no more."""
    line = control.readline()
    return dict(json.loads(line)) if line.endswith(b"\n") else None


if __name__ == "__main__":
    raise SystemExit(main())
