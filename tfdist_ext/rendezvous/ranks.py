# SPDX-License-Identifier: Apache-2.0
"""The ranks of a job meet at rank 0 and exchange a few bytes each.

Rank 0 listens at its address until all have come; the others try until it
does. All end with everybody's bytes, or with an error that names who is
missing. Nobody listens afterwards.

    rank 1 -> rank 0   {"blob": "..."}
    rank 0 -> rank 1   {"blobs": ["...", ...]} or {"error": "ranks [2] ..."}
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

from tfdist_ext.rendezvous import addresses as addresses_lib
from tfdist_ext.rendezvous import handshake
from tfdist_ext.rendezvous.door import Door
from tfdist_ext.rendezvous.door import knock
from tfdist_ext.rendezvous.link import Link

_MESSAGE_SECONDS = 10.0

_REMEDIES = {
    handshake.Verdict.OTHER_PROTOCOL: (
        "another version of tfdist_ext runs there. Install the same on all "
        "hosts"
    ),
    handshake.Verdict.OTHER_JOB: (
        "it belongs to another job: its TF_CONFIG or launcher names other "
        "ranks, or its tfdist_ext is another version. All ranks need the same "
        "list of addresses, and two jobs different ports"
    ),
    handshake.Verdict.TAKEN: (
        "another process has come there with the number of this rank. Give "
        "every process its own task index"
    ),
    handshake.Verdict.WRONG_SECRET: (
        "it has another secret. Set the same TFDIST_SECRET, or a file with "
        "the same contents as TFDIST_SECRET_FILE, for all ranks"
    ),
}


def meet(
    rank: int,
    addresses: Sequence[str],
    blob: bytes,
    *,
    secret: bytes,
    timeout: float,
    reuse_port: bool = False,
    patience: float = 5.0,
) -> list[bytes]:
    """Gives every rank the bytes of all.

    Args:
        rank: of this process.
        addresses: "host:port" of each rank, the same on all; rank 0 listens
            at the first, on that interface only.
        blob: this rank's bytes.
        secret: of the job; strangers are kept out by it.
        timeout: seconds that ranks wait for each other.
        reuse_port: whether somebody holds rank 0's port for it.
        patience: seconds that the others wait longer than rank 0, which gives
            up first and says why.

    Returns:
        The bytes of all ranks, in their order.

    Raises:
        RuntimeError: ranks are missing, are not of this job, or rank 0's port
            is taken.
    """
    job = handshake.Job(f"ranks {' '.join(addresses)}", secret)
    deadline = time.monotonic() + timeout
    if rank == 0:
        return _receive_all(addresses, blob, job, deadline, timeout, reuse_port)
    name = f"rank 0 ({addresses[0]})"
    deadline += patience
    try:
        where = addresses_lib.split(addresses[0])
        link = Link(knock(where, job, rank, deadline), name)
    except handshake.RefusedError as error:
        raise RuntimeError(
            f"rank {rank} ({addresses[rank]}) is refused by {name}: "
            f"{_REMEDIES[error.verdict]}."
        ) from error
    except OSError as error:
        raise RuntimeError(
            f"rank {rank} ({addresses[rank]}) cannot reach {name} within "
            f"startup_timeout={timeout:g} s: {error}. Is that rank running, "
            "and its port open for this host?"
        ) from error
    with contextlib.closing(link):
        return _exchange(link, rank, blob, deadline, timeout)


def _exchange(
    link: Link, rank: int, blob: bytes, deadline: float, timeout: float
) -> list[bytes]:
    try:
        link.send({"blob": blob.hex()}, _MESSAGE_SECONDS)
        answer = link.receive(max(0.0, deadline - time.monotonic()))
        if answer is None:
            raise TimeoutError(f"no answer for startup_timeout={timeout:g} s")
        if "error" not in answer:
            return [bytes.fromhex(text) for text in answer["blobs"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RuntimeError(
            f"rank {rank} has reached {link.name}, which then failed: {error}"
        ) from error
    raise RuntimeError(f"rank {rank}: {link.name} says: {answer['error']}")


def _receive_all(
    addresses: Sequence[str],
    blob: bytes,
    job: handshake.Job,
    deadline: float,
    timeout: float,
    reuse_port: bool,
) -> list[bytes]:
    """Rank 0: waits for all others, then gives everyone the list."""
    links: dict[int, Link] = {}
    with contextlib.ExitStack() as stack:
        door = stack.enter_context(_open(addresses, job, reuse_port))
        for number, connection in door.let_in(deadline):
            name = f"rank {number} ({addresses[number]})"
            links[number] = Link(connection, name)
            stack.callback(links[number].close)
        try:
            if door.missing:
                raise RuntimeError(_missing(door, addresses, timeout))
            blobs = [blob]
            for number in range(1, len(addresses)):
                blobs.append(_blob_of(links[number]))
        except RuntimeError as error:
            _tell(links, {"error": str(error)})
            raise
        _tell(links, {"blobs": [each.hex() for each in blobs]})
    return blobs


def _open(
    addresses: Sequence[str], job: handshake.Job, reuse_port: bool
) -> Door:
    numeric = addresses_lib.bind_address(addresses[0])
    port = addresses_lib.split(addresses[0])[1]
    others = range(1, len(addresses))
    try:
        return Door((numeric, port), job, others, reuse_port)
    except OSError as error:
        raise RuntimeError(
            f"rank 0 cannot listen at its address {addresses[0]!r}: {error}. "
            "Perhaps another process has the port: one of an earlier run, or "
            "one with the same task index. Give every process its own index, "
            "and every job a free port, in TF_CONFIG or as MASTER_PORT."
        ) from error


def _missing(door: Door, addresses: Sequence[str], timeout: float) -> str:
    names = [f"rank {r} ({addresses[r]})" for r in door.missing[:8]]
    more = len(door.missing) - len(names)
    refused = f" Refused: {door.refusals}." if door.refusals else ""
    return (
        f"{', '.join(names)}{f' and {more} more' if more else ''} of "
        f"{len(addresses)} ranks did not come to {addresses[0]} within "
        f"startup_timeout={timeout:g} s.{refused}"
    )


def _blob_of(link: Link) -> bytes:
    try:
        message = link.receive(_MESSAGE_SECONDS)
        if message is None:
            raise TimeoutError(f"nothing for {_MESSAGE_SECONDS:g} s")
        return bytes.fromhex(message["blob"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RuntimeError(f"{link.name} has come and failed: {error}") from (
            error
        )


def _tell(links: dict[int, Link], message: dict[str, Any]) -> None:
    for link in links.values():
        # Whoever has gone meanwhile is found out when the ranks connect.
        with contextlib.suppress(OSError):
            link.send(message, _MESSAGE_SECONDS)
