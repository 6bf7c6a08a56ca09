# SPDX-License-Identifier: Apache-2.0
"""Connects every rank to every other, twice.

The ranks tell each other at rank 0 where they listen (`ranks.meet`). Then each
knocks at the doors of those before it and lets in those after it. Both ends of
a connection know the secret of the job, and when all are connected nobody
listens any more. Ranks of one host then agree on memory that they share.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import socket
import time
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence

from tfdist_ext.rendezvous import addresses as addresses_lib
from tfdist_ext.rendezvous import handshake
from tfdist_ext.rendezvous import ranks
from tfdist_ext.rendezvous.connection import Connection
from tfdist_ext.rendezvous.door import Door
from tfdist_ext.rendezvous.door import knock
from tfdist_ext.rendezvous.listening import Listening
from tfdist_ext.rendezvous.same_host import Neighbours
from tfdist_ext.rendezvous.same_host import SharedMemory

_LOG = logging.getLogger(__name__)

# What each of two connections is for: messages, and control.
_KINDS = 2
_CONTROL = 1


def connect(
    rank: int,
    addresses: Sequence[str],
    *,
    secret: bytes,
    timeout: float,
    reuse_port: bool = False,
    listening: Listening | None = None,
    share_memory: bool = True,
) -> list[Connection | None]:
    """Connects this rank to all others; all must do so at the same time.

    Args:
        rank: of this process.
        addresses: "host:port" of each rank, the same on all. Rank 0 listens at
            the first, until all have come; every rank then listens where
            `listening` says, until all are connected.
        secret: of the job; strangers are kept out by it.
        timeout: seconds that ranks wait for each other.
        reuse_port: whether somebody holds rank 0's port for it.
        listening: by default on the host of this rank's address, on a port
            that the system chooses.
        share_memory: whether ranks of one host talk through memory. It takes
            both to want it.

    Returns:
        By rank what joins this one to it; None for this rank itself.

    Raises:
        RuntimeError: not all ranks came, or this rank cannot listen.
        ValueError: this rank's address, or `listening`, is not of this host.
    """
    job = handshake.Job(f"connections {' '.join(addresses)}", secret)
    start = _Start(rank, addresses, job, timeout, time.monotonic() + timeout)
    listening = listening or Listening()
    with contextlib.ExitStack() as stack:
        door = stack.enter_context(_open(start, listening))
        neighbours = stack.enter_context(Neighbours(share_memory))
        # Where a rank says no host, it is the one that all know.
        host = door.address[0] if listening.interface else ""
        places = ranks.meet(
            rank,
            addresses,
            f"{host} {door.address[1]} {neighbours.name}".encode(),
            secret=secret,
            timeout=timeout,
            reuse_port=reuse_port,
        )
        found: dict[int, socket.socket] = {}
        with contextlib.ExitStack() as unfinished:
            for number, connection in _connections(start, door, places):
                unfinished.callback(connection.close)
                found[number] = connection
            shared = _share(start, neighbours, places, found)
            unfinished.pop_all()
    connections: list[Connection | None] = [None] * len(addresses)
    for peer in start.others:
        messages, control = (found[_KINDS * peer + k] for k in range(_KINDS))
        connections[peer] = Connection(messages, control, shared.get(peer))
    return connections


@dataclasses.dataclass(frozen=True)
class _Start:
    """This rank, those it connects to, and until when."""

    rank: int
    addresses: Sequence[str]
    job: handshake.Job
    timeout: float
    deadline: float

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
        """Whether the addresses say so."""
        ours, theirs = (self.addresses[each] for each in (self.rank, rank))
        return addresses_lib.split(ours)[0] == addresses_lib.split(theirs)[0]


def _connections(
    start: _Start, door: Door, places: Sequence[bytes]
) -> Iterator[tuple[int, socket.socket]]:
    """All connections of this rank, by `_KINDS` times rank plus kind."""
    for peer in start.earlier:
        host, port, _ = places[peer].decode().split(" ")
        host = host or addresses_lib.split(start.addresses[peer])[0]
        for kind in range(_KINDS):
            yield _KINDS * peer + kind, _reach(start, peer, kind, host, port)
    yield from door.let_in(start.deadline)
    if door.missing:
        missing = sorted({number // _KINDS for number in door.missing})
        raise RuntimeError(
            f"{start.name(start.rank)}: ranks {missing} have met it, but do "
            f"not connect within startup_timeout={start.timeout:g} s. Are the "
            "ports of this host open for them?"
        )


def _share(
    start: _Start,
    neighbours: Neighbours,
    places: Sequence[bytes],
    found: Mapping[int, socket.socket],
) -> dict[int, SharedMemory]:
    """Memory by rank, of those on this host."""
    control = {peer: found[_KINDS * peer + _CONTROL] for peer in start.others}
    earlier = {
        peer: (control[peer], places[peer].decode().split(" ")[2])
        for peer in start.earlier
    }
    later = {peer: control[peer] for peer in start.later}
    try:
        shared = neighbours.share(earlier, later, start.deadline)
    except OSError as error:
        raise RuntimeError(
            f"{start.name(start.rank)}: a rank that had connected has failed "
            f"then: {error}"
        ) from error
    without = [
        peer
        for peer in start.earlier
        if peer not in shared and start.shares_host_with(peer)
    ]
    if without and neighbours.name:
        _LOG.warning(
            "tfdist_ext: rank %d shares no memory with ranks %s of this host "
            "(other namespaces, or none is left): they talk by TCP.",
            start.rank,
            without,
        )
    return shared


def _open(start: _Start, listening: Listening) -> Door:
    address = start.addresses[start.rank]
    numbers = [
        _KINDS * peer + kind for peer in start.later for kind in range(_KINDS)
    ]
    try:
        return listening.open(address, start.job, numbers)
    except OSError as error:
        raise RuntimeError(
            f"{start.name(start.rank)} cannot listen on "
            f"{listening.host(address)} for the other ranks: {error}"
        ) from error


def _reach(
    start: _Start, peer: int, kind: int, host: str, port: str
) -> socket.socket:
    try:
        return knock(
            (host, int(port)),
            start.job,
            _KINDS * start.rank + kind,
            start.deadline,
        )
    except OSError as error:
        raise RuntimeError(
            f"rank {start.rank} cannot connect to {start.name(peer)} at "
            f"{host}, port {port}, where it listens: {error}"
        ) from error
