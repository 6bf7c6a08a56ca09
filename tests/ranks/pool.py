# SPDX-License-Identifier: Apache-2.0
"""Ranks that wait for scenarios, which they run by name."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any

import pytest

from tests.ranks.servers import HERE
from tests.ranks.servers import Servers
from tests.ranks.servers import command

# Seconds: of ranks to start, of others to answer when one has failed, of the
# stacks of a rank that hangs to be written.
_START, _GRACE, _TRACES = 180.0, 10.0, 1.0
_LONGEST_REPORT = 20_000
_RANKS = 16  # at a time, for each takes 150 MB that it does not share

RunScenario = Callable[..., list[Any]]


class Pool:
    """Ranks of one strategy that run scenarios by name.

    Args:
        servers: what they are forked from.
        ranks: how many.
        keras: 3 or 2 (tf_keras).
        options: of the strategy; None for a process without one.
    """

    def __init__(
        self,
        servers: Servers,
        ranks: int,
        keras: int,
        options: dict[str, Any] | None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tfdist")
        folder = pathlib.Path(self._folder.name)
        self._log = folder / "log"
        self._read = 0
        self._released = False
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / "socket"))
        self._listener.listen(ranks)
        arguments = (folder / "socket", json.dumps(options))
        with self._log.open("wb") as log:
            self._launcher = subprocess.Popen(
                command(ranks, HERE / "loop.py", *arguments),
                env=servers.environment(keras, ranks),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._pids: list[int] = []
        self._ranks: list[Connection] = []
        try:
            self._accept(ranks)
        except BaseException:
            self.kill()
            raise

    @property
    def alive(self) -> bool:
        return self._launcher.poll() is None

    def run(
        self, module: str, name: str, *arguments: Any, limit: float = 300.0
    ) -> list[Any]:
        """Runs a scenario on every rank.

        Ranks one of which has failed are ended: nobody knows what the others
        wait for.

        Args:
            module: whose function it is.
            name: of the function; it is called with the strategy.
            *arguments: more for the function.
            limit: seconds, after which the ranks' stacks are shown.

        Returns:
            What it returned, by rank.
        """
        self._said()
        for rank in self._ranks:
            with contextlib.suppress(OSError):  # told by its answer
                rank.send((module, name, arguments))
        try:
            answers = self._answers(time.monotonic() + limit)
        except BaseException:  # the user's, or pytest's own limit
            self.kill()
            raise
        failed = [
            f"rank {rank}:\n{text}"
            for rank, (good, text) in sorted(answers.items())
            if not good
        ]
        if len(answers) == len(self._ranks) and not failed:
            return [answers[rank][1] for rank in range(len(answers))]
        silent = [r for r in range(len(self._ranks)) if r not in answers]
        for rank in silent:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], signal.SIGUSR1)
        time.sleep(_TRACES if silent else 0)
        if silent:
            failed.append(f"ranks {silent} did not answer; see their stacks")
        report = "\n".join([*failed, "printed:", self._said()])
        self.kill()
        pytest.fail(f"{module}.{name}: {report}", pytrace=False)

    def close(self) -> None:
        """Lets the ranks end by themselves, which must succeed."""
        if self._released:
            return
        if self.alive:
            for rank in self._ranks:
                with contextlib.suppress(OSError):
                    rank.send(None)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._launcher.wait(60)
        log, code = self._said(), self._launcher.poll()
        self.kill()
        assert code == 0, f"ranks ended with {code}:\n{log}"

    def kill(self) -> None:
        """Ends the ranks: the launcher takes them along."""
        self._launcher.kill()
        self._launcher.wait()
        self._release()

    def _accept(self, count: int) -> None:
        """Waits until every rank has its strategy and has connected."""
        found = {}
        self._listener.settimeout(0.2)
        deadline = time.monotonic() + _START
        while len(found) < count:
            with contextlib.suppress(TimeoutError):
                rank = Connection(self._listener.accept()[0].detach())
                number, pid = rank.recv()
                found[number] = (rank, pid)
            if not self.alive or time.monotonic() > deadline:
                pytest.fail(f"ranks do not start: {self._said()}")
        self._ranks = [found[number][0] for number in range(count)]
        self._pids = [found[number][1] for number in range(count)]

    def _answers(self, deadline: float) -> dict[int, tuple[bool, Any]]:
        """By rank, of those who answer in time."""
        answers: dict[int, tuple[bool, Any]] = {}
        waiting = {rank: i for i, rank in enumerate(self._ranks)}
        while waiting:
            left = deadline - time.monotonic()
            ready = connection.wait(waiting, timeout=max(left, 0))
            if not ready:
                break
            for rank in ready:
                assert isinstance(rank, Connection)
                try:
                    answer = rank.recv()
                except (EOFError, OSError):
                    answer = (False, "it has ended")
                answers[waiting.pop(rank)] = answer
                if not answer[0]:
                    deadline = min(deadline, time.monotonic() + _GRACE)
        return answers

    def _said(self) -> str:
        """What the ranks have printed since it was asked last."""
        with self._log.open(errors="replace") as log:
            log.seek(self._read)
            text = log.read()
            self._read = log.tell()
        return text[-_LONGEST_REPORT:]

    def _release(self) -> None:
        self._released = True
        for rank in self._ranks:
            rank.close()
        self._listener.close()
        self._folder.cleanup()


class Pools:
    """Pools by what they are for; the ones used last stay.

    Args:
        servers: what ranks are forked from.
    """

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._pools: dict[tuple[int, int, str], Pool] = {}

    def run(
        self,
        scenario: str,
        *arguments: Any,
        ranks: int,
        keras: int = 3,
        fresh: bool = False,
        last: bool = False,
        limit: float = 300.0,
        strategy: bool = True,
        **options: Any,
    ) -> list[Any]:
        """Runs a scenario on ranks that are ready, or are started for it.

        Args:
            scenario: "module.function", called with the strategy.
            *arguments: more for the function.
            ranks: how many.
            keras: 3 or 2 (tf_keras).
            fresh: whether no other scenario may have run before.
            last: whether none can run afterwards.
            limit: seconds.
            strategy: whether there is one; else the function is given None.
            **options: of the strategy.

        Returns:
            What it returned, by rank.
        """
        own = options if strategy else None
        key = (ranks, keras, json.dumps(own, sort_keys=True))
        pool = self._pools.pop(key, None)
        if pool is not None and fresh:
            pool.close()
        if pool is None or not pool.alive:
            while (
                self._pools and ranks + sum(k[0] for k in self._pools) > _RANKS
            ):
                self._pools.pop(next(iter(self._pools))).close()
            pool = Pool(self._servers, ranks, keras, own)
        self._pools[key] = pool
        answers = pool.run(*scenario.rsplit(".", 1), *arguments, limit=limit)
        if last:
            pool.kill()
        return answers

    def kill(self, ranks: int, keras: int = 3, **options: Any) -> None:
        """Ends ranks of which a scenario has made something unusable.

        Args:
            ranks: how many there are.
            keras: 3 or 2 (tf_keras).
            **options: of the strategy.
        """
        key = (ranks, keras, json.dumps(options, sort_keys=True))
        if key in self._pools:
            self._pools.pop(key).kill()

    def close(self) -> None:
        """Ends all ranks."""
        while self._pools:
            self._pools.popitem()[1].close()
