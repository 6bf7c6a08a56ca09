# SPDX-License-Identifier: Apache-2.0
"""Connects every rank to every other, twice.

The ranks tell each other at rank 0 where they listen (`ranks.meet`). Then each
knocks at the doors of those before it and lets in those after it. Both ends of
a connection know the secret of the job, and when all are connected nobody
listens any more.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence

from tfdist_ext.rendezvous import addresses as addresses_lib
from tfdist_ext.rendezvous import handshake
from tfdist_ext.rendezvous import ranks
from tfdist_ext.rendezvous.door import Door
from tfdist_ext.rendezvous.door import knock
from tfdist_ext.rendezvous.listening import Listening

# What each of two connections is for: messages, and control.
_KINDS = 2

Pair = tuple[socket.socket, socket.socket]


def connect(
    rank: int,
    addresses: Sequence[str],
    *,
    secret: bytes,
    timeout: float,
    reuse_port: bool = False,
    listening: Listening | None = None,
) -> list[Pair | None]:
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

    Returns:
        By rank the connections for messages and for control; None for this
        rank itself.

    Raises:
        RuntimeError: not all ranks came, or this rank cannot listen.
        ValueError: this rank's address, or `listening`, cannot be of this
            host.
    """
    deadline = time.monotonic() + timeout
    job = handshake.Job(f"connections {' '.join(addresses)}", secret)
    later = [
        _KINDS * peer + kind
        for peer in range(rank + 1, len(addresses))
        for kind in range(_KINDS)
    ]
    found: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as stack:
        listening = listening or Listening()
        door = stack.enter_context(
            _open(rank, addresses[rank], job, later, listening)
        )
        # Where a rank says no host, it is the one that all know.
        host = door.address[0] if listening.interface else ""
        places = ranks.meet(
            rank,
            addresses,
            f"{host} {door.address[1]}".encode(),
            secret=secret,
            timeout=timeout,
            reuse_port=reuse_port,
        )
        with contextlib.ExitStack() as unfinished:
            for peer in range(rank):
                host, port = places[peer].decode().split(" ")
                host = host or addresses_lib.split(addresses[peer])[0]
                for kind in range(_KINDS):
                    connection = _reach(
                        rank,
                        f"rank {peer} ({addresses[peer]})",
                        (host, int(port)),
                        (job, _KINDS * rank + kind, deadline),
                    )
                    unfinished.callback(connection.close)
                    found[_KINDS * peer + kind] = connection
            for number, connection in door.let_in(deadline):
                unfinished.callback(connection.close)
                found[number] = connection
            if door.missing:
                missing = sorted({number // _KINDS for number in door.missing})
                raise RuntimeError(
                    f"rank {rank} ({addresses[rank]}): ranks {missing} have "
                    "met it, but do not connect within startup_timeout="
                    f"{timeout:g} s. Are the ports of this host open for them?"
                )
            unfinished.pop_all()
    return [
        None
        if peer == rank
        else (found[_KINDS * peer], found[_KINDS * peer + 1])
        for peer in range(len(addresses))
    ]


def _open(
    rank: int,
    address: str,
    job: handshake.Job,
    numbers: Sequence[int],
    listening: Listening,
) -> Door:
    try:
        return listening.open(address, job, numbers)
    except OSError as error:
        raise RuntimeError(
            f"rank {rank} ({address}) cannot listen on "
            f"{listening.host(address)} for the other ranks: {error}"
        ) from error


def _reach(
    rank: int,
    name: str,
    where: tuple[str, int],
    who: tuple[handshake.Job, int, float],
) -> socket.socket:
    try:
        return knock(where, *who)
    except OSError as error:
        raise RuntimeError(
            f"rank {rank} cannot connect to {name} at {where[0]}, port "
            f"{where[1]}, where it listens: {error}"
        ) from error
