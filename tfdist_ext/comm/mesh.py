# SPDX-License-Identifier: Apache-2.0
"""Connects every rank to every other rank, by two connections.

The ranks exchange their listening addresses at rank 0 (`ranks.rendezvous`).
Then each rank connects to the ranks before it and accepts the ranks after it.
Both ends of a connection prove that they know the secret of the job. When all
ranks are connected, all stop listening. Ranks of one host then set up shared
memory. If a rank ends meanwhile, all others raise an error that names it within
seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import socket
import time
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence

from tfdist_ext.comm import addresses as addresses_lib
from tfdist_ext.comm import connection
from tfdist_ext.comm import connector
from tfdist_ext.comm import handshake
from tfdist_ext.comm import listener
from tfdist_ext.comm import ranks
from tfdist_ext.comm.connection import Connection
from tfdist_ext.comm.connection import Neighbours
from tfdist_ext.comm.connection import SharedMemory
from tfdist_ext.comm.listener import Listener
from tfdist_ext.comm.listener import Listening

_LOG = logging.getLogger(__name__)

# Each rank pair has two connections: one for messages, one for control.
_KINDS = 2
_CONTROL = 1
_MEMORY_DESCRIPTORS = 3  # descriptors of a shared memory
_SPARE_DESCRIPTORS = 64
# Longest time that rank 0 takes to report which rank has failed.
_REASON_SECONDS = 3.0


def connect(
    rank: int,
    addresses: Sequence[str],
    *,
    secret: bytes,
    timeout: float,
    reuse_port: bool = False,
    listening: Listening | None = None,
    share_memory: bool = True,
    allow_unauthenticated: bool = False,
) -> list[Connection | None]:
    """Connects this rank to all others, which must connect too.

    Args:
        rank: number of this process.
        addresses: "host:port" of each rank, the same on all. Rank 0 listens at
            the first until all ranks are connected to it. Every rank then
            listens as `listening` says, until all are connected to each other.
        secret: secret of the job. Without one, ranks that connect by loopback
            only accept processes of their own user.
        timeout: seconds that ranks wait for each other.
        reuse_port: whether another process has reserved rank 0's port for it.
        listening: interface and ports to listen on; by default the host of this
            rank's address, and a port that the system chooses.
        share_memory: whether this rank exchanges messages with ranks of its
            host through shared memory, if they do too.
        allow_unauthenticated: whether to accept other users by loopback too.

    Returns:
        The connections by rank; None for this rank itself.

    Raises:
        RuntimeError: ranks are missing, or this rank cannot listen.
        ValueError: this rank's address, or `listening`, is not of this host.
    """
    start = _Start(rank, addresses, timeout, time.monotonic() + timeout)
    share_memory = _allow_descriptors(start, share_memory)
    listening = listening or Listening()
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listen(start, listening))
        neighbours = stack.enter_context(Neighbours(share_memory))
        # A rank that sends no host is reached at the host of its address.
        host = listener.address[0] if listening.interface else ""
        rendezvous = stack.enter_context(
            ranks.rendezvous(
                rank,
                addresses,
                f"{host} {listener.address[1]} {neighbours.name}".encode(),
                secret=secret,
                timeout=timeout,
                reuse_port=reuse_port,
                allow_unauthenticated=allow_unauthenticated,
            )
        )
        return _join(
            start, listener, neighbours, rendezvous, secret or rendezvous.secret
        )


def _join(
    start: _Start,
    listener: Listener,
    neighbours: Neighbours,
    rendezvous: ranks.Rendezvous,
    secret: bytes,
) -> list[Connection | None]:
    """Connects this rank to those that have exchanged addresses."""
    found: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as unfinished:
        for number, connection in _connections(
            start, listener, rendezvous, secret
        ):
            unfinished.callback(connection.close)
            found[number] = connection
        shared = _share(start, neighbours, rendezvous, found)
        for memory in shared.values():
            unfinished.callback(memory.close)
        # Rank 0 gives up first, and reports which ranks are missing.
        patience = _REASON_SECONDS if start.rank else 0.0
        rendezvous.finish(start.deadline + patience)
        unfinished.pop_all()
    connections: list[Connection | None] = [None] * len(start.addresses)
    for peer in start.others:
        messages, control = (found[_KINDS * peer + k] for k in range(_KINDS))
        connections[peer] = Connection(messages, control, shared.get(peer))
    return connections


@dataclasses.dataclass(frozen=True)
class _Start:
    """This rank, the other ranks, and the time limit."""

    rank: int
    addresses: Sequence[str]
    timeout: float
    deadline: float

    def job(self, listener: int, secret: bytes) -> handshake.Job:
        """The job for connections to a rank."""
        salt = " ".join(self.addresses)
        name = f"connections to rank {listener} of {salt}"
        return handshake.Job(name, secret, salt)

    def name(self, rank: int) -> str:
        return f"rank {rank} ({self.addresses[rank]})"

    @property
    def earlier(self) -> range:
        return range(self.rank)

    @property
    def later(self) -> range:
        return range(self.rank + 1, len(self.addresses))

    @property
    def others(self) -> list[int]:
        return [*self.earlier, *self.later]

    def shares_host_with(self, rank: int) -> bool:
        """Whether the addresses of this and another rank have one host."""
        ours, theirs = (self.addresses[each] for each in (self.rank, rank))
        return addresses_lib.split(ours)[0] == addresses_lib.split(theirs)[0]


def _allow_descriptors(start: _Start, share_memory: bool) -> bool:
    """Raises the limit of descriptors; returns whether memory is shared.

    Raises:
        RuntimeError: the limit is too low to connect.
    """
    ends = 1 if start.rank else len(start.others)  # connections to rank 0
    needed = _KINDS * len(start.others) + ends + _SPARE_DESCRIPTORS
    near = [rank for rank in start.others if start.shares_host_with(rank)]
    more = _MEMORY_DESCRIPTORS * len(near) if share_memory else 0
    allowed = listener.allow_descriptors(needed + more)
    if allowed < needed:
        raise RuntimeError(
            f"{start.name(start.rank)} cannot connect to "
            f"{len(start.others)} ranks: {listener.shortage_of_files(needed)}."
        )
    if allowed < needed + more:
        _LOG.warning(
            "tfdist_ext: %s shares no memory with ranks of this host and uses "
            "TCP for them: %s.",
            start.name(start.rank),
            listener.shortage_of_files(needed + more),
        )
        return False
    return share_memory


def _connections(
    start: _Start,
    listener: Listener,
    rendezvous: ranks.Rendezvous,
    secret: bytes,
) -> Iterator[tuple[int, socket.socket]]:
    """All connections of this rank, by `_KINDS` times rank plus kind."""
    for peer in start.earlier:
        host, port, _ = rendezvous.blobs[peer].decode().split(" ")
        host = host or addresses_lib.split(start.addresses[peer])[0]
        job = start.job(peer, secret)
        for kind in range(_KINDS):
            number = _KINDS * start.rank + kind
            connection = _reach(
                start, peer, (host, int(port)), job, number, rendezvous.check
            )
            yield _KINDS * peer + kind, connection
    own = start.job(start.rank, secret)
    yield from listener.accept(own, start.deadline, rendezvous.check)
    if listener.missing:
        missing = sorted({number // _KINDS for number in listener.missing})
        raise RuntimeError(
            f"{start.name(start.rank)}: ranks {missing} are connected to rank "
            "0, but did not connect to this rank within "
            f"startup_timeout={start.timeout:g} s. Are the ports of this host "
            "open for them?"
        )


def _share(
    start: _Start,
    neighbours: Neighbours,
    rendezvous: ranks.Rendezvous,
    found: Mapping[int, socket.socket],
) -> dict[int, SharedMemory]:
    """Memory shared with ranks of this host, by rank."""
    control = {peer: found[_KINDS * peer + _CONTROL] for peer in start.others}
    earlier = {
        peer: (control[peer], rendezvous.blobs[peer].decode().split(" ")[2])
        for peer in start.earlier
    }
    later = {peer: control[peer] for peer in start.later}
    try:
        on_host = sum(map(start.shares_host_with, range(len(start.addresses))))
        ring = connection.ring_bytes(on_host)
        shared = neighbours.share(
            earlier, later, start.deadline, rendezvous.check, ring
        )
    except OSError as error:
        rendezvous.check(_REASON_SECONDS)
        raise RuntimeError(
            f"{start.name(start.rank)}: a rank failed after it had connected: "
            f"{error}"
        ) from error
    without = [
        peer
        for peer in start.earlier
        if peer not in shared and start.shares_host_with(peer)
    ]
    if without and neighbours.name:
        _LOG.warning(
            "tfdist_ext: rank %d shares no memory with ranks %s of this host "
            "(%s) and uses TCP for them.",
            start.rank,
            without,
            neighbours.failure or "they have not received it",
        )
    return shared


def _listen(start: _Start, listening: Listening) -> Listener:
    address = start.addresses[start.rank]
    numbers = [
        _KINDS * peer + kind for peer in start.later for kind in range(_KINDS)
    ]
    try:
        return listening.open(address, numbers)
    except OSError as error:
        raise RuntimeError(
            f"{start.name(start.rank)} cannot listen on "
            f"{listening.host(address)} for the other ranks: {error}"
        ) from error


def _reach(
    start: _Start,
    peer: int,
    where: tuple[str, int],
    job: handshake.Job,
    number: int,
    check: Callable[[], None],
) -> socket.socket:
    host, port = where

    def report(reason: str) -> None:
        _LOG.warning(
            "tfdist_ext: rank %d has not connected to %s at %s, port %d, for "
            "%g s: %s. It goes on trying for startup_timeout=%g s.",
            start.rank,
            start.name(peer),
            host,
            port,
            connector.REPORT_SECONDS,
            reason,
            start.timeout,
        )

    try:
        return connector.connect(
            where, job, number, start.deadline, check=check, report=report
        )
    except OSError as error:
        raise RuntimeError(
            f"rank {start.rank} cannot connect to {start.name(peer)} at "
            f"{host}, port {port}, where it listens: {error}"
        ) from error
