# SPDX-License-Identifier: Apache-2.0
"""Lets the launchers of several hosts find each other and stay in touch.

Every launcher has chosen free ports for its ranks. Those of hosts 1 to N-1
connect to the master's address, where the launcher of host 0 listens, and send
their addresses; it answers everyone with the list of all. The connections stay
open, so that a failure on one host stops the ranks on the others:

    host 1 -> host 0   {"nnodes": 2, "node_rank": 1, "workers": ["b:41", ...]}
    host 0 -> host 1   {"workers": ["a:52", ..., "b:41", ...], "first_rank": 4}
    anyone -> others   {"ended": null} or {"ended": "rank 5 (...) failed: ..."}

Messages are JSON, one per line, of limited length.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Sequence
from typing import Any

_LONGEST_MESSAGE = 1 << 20
_RETRY_SECONDS = 0.2
_GREETING_SECONDS = 10.0


class RendezvousError(Exception):
    """The hosts did not find each other; the message says what to change."""


class Link:
    """One connection that carries JSON lines."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        self.name = name
        self._connection = connection
        self._received = b""

    def fileno(self) -> int:
        return self._connection.fileno()

    def own_host(self) -> str:
        """The address of this host as the other end sees it."""
        return str(self._connection.getsockname()[0])

    def close(self) -> None:
        self._connection.close()

    def send(self, message: dict[str, Any], timeout: float) -> None:
        self._connection.settimeout(timeout)
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout: float) -> dict[str, Any] | None:
        """Returns the next message, None if none came in time.

        Raises:
            ConnectionError: the other end is gone.
            ValueError: what came is not a message.
        """
        deadline = time.monotonic() + timeout
        while b"\n" not in self._received:
            # A timeout of 0 would make the socket non-blocking.
            left = max(deadline - time.monotonic(), 1e-3)
            self._connection.settimeout(left)
            try:
                data = self._connection.recv(1 << 16)
            except TimeoutError:
                if time.monotonic() >= deadline:
                    return None
                continue
            if not data:
                raise ConnectionError(f"{self.name} closed its connection")
            self._received += data
            if len(self._received) > _LONGEST_MESSAGE:
                raise ValueError(f"{self.name} sent too long a message")
        line, _, self._received = self._received.partition(b"\n")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError(f"{self.name} sent {line[:100]!r}")
        return message


class Meeting:
    """The hosts after they have met.

    Attributes:
        workers: addresses of all ranks, in rank order.
        first_rank: the rank of this host's first process.
    """

    def __init__(
        self, links: Sequence[Link], workers: list[str], first_rank: int
    ) -> None:
        self.workers = workers
        self.first_rank = first_rank
        self._links = list(links)

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, *exception: object) -> None:
        for link in self._links:
            link.close()

    def failure(self) -> str | None:
        """Returns what failed on another host, None while nothing did.

        A host whose ranks have all succeeded is out of the game.
        """
        for link in list(self._links):
            try:
                message = link.receive(timeout=0.0)
            except (OSError, ValueError) as error:
                self._drop(link)
                return f"lost {link.name}: {error}"
            if message is None:
                continue
            self._drop(link)
            if (ended := message.get("ended")) is not None:
                return f"on another host ({link.name}): {ended}"
        return None

    def report(self, failure: str | None) -> None:
        """Tells the other hosts how this one ended."""
        for link in self._links:
            with contextlib.suppress(OSError):
                link.send({"ended": failure}, _GREETING_SECONDS)

    def _drop(self, link: Link) -> None:
        self._links.remove(link)
        link.close()


def meet(
    *,
    master: tuple[str, int],
    node_rank: int,
    nnodes: int,
    host: str | None,
    ports: Sequence[int],
    timeout: float,
) -> Meeting:
    """Exchanges the addresses of all ranks.

    Args:
        master: host and port where the launcher of host 0 listens.
        node_rank: number of this host.
        nnodes: number of hosts.
        host: address of this host for the others, by default the one that it
            reaches the master with; the master's own for host 0.
        ports: one per rank of this host.
        timeout: seconds to wait for the other hosts.

    Raises:
        RendezvousError: not all hosts came in time, or they disagree.
    """
    deadline = time.monotonic() + timeout
    if node_rank == 0:
        workers = [f"{host or master[0]}:{port}" for port in ports]
        return _host_meeting(master, nnodes, workers, deadline)
    link = _connect(master, deadline)
    address = host or link.own_host()
    hello = {
        "nnodes": nnodes,
        "node_rank": node_rank,
        "workers": [f"{address}:{port}" for port in ports],
    }
    try:
        link.send(hello, _GREETING_SECONDS)
        answer = link.receive(max(0.0, deadline - time.monotonic()))
    except (OSError, ValueError) as error:
        raise RendezvousError(f"no answer from {link.name}: {error}") from error
    if answer is None:
        raise RendezvousError(
            f"{link.name} waited for other hosts longer than "
            f"--start-timeout {timeout:g}"
        )
    if "error" in answer:
        raise RendezvousError(f"{link.name} says: {answer['error']}")
    return Meeting([link], list(answer["workers"]), int(answer["first_rank"]))


def _host_meeting(
    master: tuple[str, int], nnodes: int, own: list[str], deadline: float
) -> Meeting:
    """Host 0: waits for all others, then gives everyone the list."""
    workers = {0: own}
    links: dict[int, Link] = {}
    try:
        with _listen(master) as listener:
            while len(workers) < nnodes:
                link = _accept(listener, deadline, sorted(workers), nnodes)
                _admit(link, nnodes, workers, links)
        everyone = [
            address for node in sorted(workers) for address in workers[node]
        ]
        first_rank = 0
        for node in range(1, nnodes):
            first_rank += len(workers[node - 1])
            answer = {"workers": everyone, "first_rank": first_rank}
            links[node].send(answer, _GREETING_SECONDS)
    except (OSError, RendezvousError) as error:
        for link in links.values():
            with contextlib.suppress(OSError):
                link.send({"error": str(error)}, _GREETING_SECONDS)
            link.close()
        raise RendezvousError(str(error)) from error
    return Meeting(list(links.values()), everyone, 0)


def _admit(
    link: Link,
    nnodes: int,
    workers: dict[int, list[str]],
    links: dict[int, Link],
) -> None:
    """Takes one host in; what is not a launcher of ours is sent away."""
    try:
        hello = link.receive(_GREETING_SECONDS)
        node = int((hello or {})["node_rank"])
        theirs = int((hello or {})["nnodes"])
        addresses = [str(address) for address in (hello or {})["workers"]]
    except (OSError, ValueError, KeyError, TypeError):
        link.close()
        return
    if theirs == nnodes and 0 <= node < nnodes and node not in workers:
        workers[node], links[node] = addresses, link
        link.name = f"host {node} ({link.name})"
        return
    problem = (
        f"host {node} at {link.name} came with --nnodes {theirs}; expected "
        f"--nnodes {nnodes} and a --node-rank not yet taken by one of "
        f"{sorted(workers)}"
    )
    with contextlib.suppress(OSError):
        link.send({"error": problem}, _GREETING_SECONDS)
    link.close()
    raise RendezvousError(problem)


def _listen(master: tuple[str, int]) -> socket.socket:
    try:
        return socket.create_server(master)
    except OSError as error:
        raise RendezvousError(
            f"cannot listen on --master {master[0]}:{master[1]}: {error}. It "
            "must be an address of host 0 and a free port"
        ) from error


def _accept(
    listener: socket.socket, deadline: float, present: list[int], nnodes: int
) -> Link:
    listener.settimeout(max(deadline - time.monotonic(), 1e-3))
    try:
        connection, peer = listener.accept()
    except TimeoutError as error:
        missing = sorted(set(range(nnodes)) - set(present))
        raise RendezvousError(
            f"hosts {missing} of {nnodes} did not come within --start-timeout"
        ) from error
    return Link(connection, f"{peer[0]}:{peer[1]}")


def _connect(master: tuple[str, int], deadline: float) -> Link:
    """Tries until host 0 listens: the hosts start in any order."""
    name = f"host 0 ({master[0]}:{master[1]})"
    while True:
        left = max(deadline - time.monotonic(), 1e-3)
        try:
            return Link(socket.create_connection(master, timeout=left), name)
        except OSError as error:
            if time.monotonic() + _RETRY_SECONDS >= deadline:
                raise RendezvousError(
                    f"{name} did not answer within --start-timeout: {error}"
                ) from error
        time.sleep(_RETRY_SECONDS)
