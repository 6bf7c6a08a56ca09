# SPDX-License-Identifier: Apache-2.0
"""The first connection of all ranks to rank 0, and an exchange of bytes.

Rank 0 listens at its address until all ranks are connected. The others try to
connect until it listens. A rank that ends while others are missing is replaced
by its next process. All ranks get the bytes of all, or an error that names the
missing ranks. Rank 0 then stops listening. The connections may stay open until
the ranks have connected to each other, so that all learn of a rank that fails
meanwhile.

    rank 1 -> rank 0   {"blob": "..."}
    rank 0 -> rank 1   {"blobs": ["...", ...], "secret": "..."}
                       or {"error": "ranks [2] ..."}
    rank 1 -> rank 0   {"connected": true} or {"error": "..."}
    rank 0 -> rank 1   {"connected": true} or {"error": "..."}
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import select
import socket
import threading
import time
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NoReturn

from tfdist_ext.comm import addresses as addresses_lib
from tfdist_ext.comm import connector
from tfdist_ext.comm import handshake
from tfdist_ext.comm.handshake import Link
from tfdist_ext.comm.handshake import Message
from tfdist_ext.comm.listener import Listener

_LOG = logging.getLogger(__name__)

_MESSAGE_SECONDS = 10.0
_CHECK_SECONDS = 0.2
_NAMED_RANKS = 8  # most ranks named in an error

_REMEDIES = {
    handshake.Verdict.OTHER_PROTOCOL: (
        "another version of tfdist_ext runs there. Install the same on all "
        "hosts"
    ),
    handshake.Verdict.OTHER_JOB: (
        "it belongs to another job: its TF_CONFIG or launcher names other "
        "ranks, or its version of tfdist_ext differs. Give all ranks the same "
        "list of addresses, and every job ports of its own"
    ),
    handshake.Verdict.TAKEN: (
        "another process has connected with the number of this rank. Give "
        "every process its own task index"
    ),
    handshake.Verdict.UNEXPECTED: "it expects no rank with this number",
    handshake.Verdict.WRONG_SECRET: (
        "it has another secret. Set the same TFDIST_SECRET, or a file with "
        "the same contents as TFDIST_SECRET_FILE, for all ranks"
    ),
}


class Rendezvous:
    """The connections to rank 0, while ranks connect to each other.

    Attributes:
        blobs: bytes of all ranks, in rank order.
        secret: secret generated for this start, if the job has none.
    """

    def __init__(
        self,
        name: str,
        links: Mapping[int, Link],
        blobs: list[bytes],
        secret: bytes,
    ) -> None:
        """Takes over the connections.

        Args:
            name: name of this rank.
            links: connections by rank. Rank 0 has one to each other rank; other
                ranks have one to rank 0.
            blobs: bytes of all ranks.
            secret: see the class.
        """
        self.blobs = blobs
        self.secret = secret
        self._name = name
        self._links = dict(links)
        self._connected: set[int] = set()
        self._has_failed = False
        self._poll = select.poll()
        for link in self._links.values():
            self._poll.register(link, select.POLLIN)

    def check(self, seconds: float = 0.0) -> None:
        """Raises an error if another rank has ended or failed.

        Args:
            seconds: seconds to wait for a message or the end of a rank.

        Raises:
            RuntimeError: a rank has ended or failed; names it and the reason.
        """
        ready = [r for r, link in self._links.items() if link.has_message]
        if not ready:
            files = {file for file, _ in self._poll.poll(1000 * seconds)}
            ready = [
                r for r, each in self._links.items() if each.fileno() in files
            ]
        for rank in ready:
            try:
                message = self._links[rank].receive(0.0)
            except (OSError, ValueError) as error:
                self._fail(
                    f"{self._links[rank].name} ended while the ranks "
                    f"connected to each other ({error}). See its output"
                )
            if message is None:
                continue
            if "error" in message:
                self._fail(str(message["error"]))
            self._connected.add(rank)

    def finish(self, deadline: float) -> None:
        """Waits until all ranks are connected to each other.

        Args:
            deadline: time limit, as of `time.monotonic()`.

        Raises:
            RuntimeError: a rank has failed, or is not connected in time.
        """
        is_first = 0 not in self._links
        if not is_first:
            self._send_all({"connected": True})
        while missing := self._links.keys() - self._connected:
            if time.monotonic() >= deadline:
                names = ", ".join(self._links[r].name for r in sorted(missing))
                self._fail(f"{names} did not connect to all ranks in time")
            self.check(_CHECK_SECONDS)
        if is_first:
            self._send_all({"connected": True})

    def close(self, error: BaseException | None = None) -> None:
        """Closes the connections.

        Args:
            error: why this rank fails; it is sent to the others.
        """
        if isinstance(error, Exception) and not self._has_failed:
            self._send_all({"error": f"{self._name} failed: {error}"})
        for link in self._links.values():
            link.close()

    def _fail(self, reason: str) -> NoReturn:
        self._has_failed = True
        if 0 not in self._links:
            self._send_all({"error": reason})
        raise RuntimeError(f"{self._name}: {reason}")

    def _send_all(self, message: Message) -> None:
        _send_all(self._links, message)


def exchange_bytes(
    rank: int, addresses: Sequence[str], blob: bytes, **options: Any
) -> list[bytes]:
    """Gives every rank the bytes of all; see `rendezvous` for the arguments.

    Returns:
        The bytes of all ranks, in rank order.

    Raises:
        RuntimeError: see `rendezvous`.
    """
    with rendezvous(rank, addresses, blob, **options) as found:
        return found.blobs


@contextlib.contextmanager
def rendezvous(
    rank: int,
    addresses: Sequence[str],
    blob: bytes,
    *,
    secret: bytes,
    timeout: float,
    reuse_port: bool = False,
    patience: float = 5.0,
    allow_unauthenticated: bool = False,
) -> Iterator[Rendezvous]:
    """Gives every rank the bytes of all, and stays connected to rank 0.

    Args:
        rank: number of this process.
        addresses: "host:port" of each rank, the same on all; rank 0 listens at
            the first, on that interface only.
        blob: bytes of this rank.
        secret: secret of the job. Without one, ranks that connect by loopback
            only accept processes of their own user.
        timeout: seconds that ranks wait for each other.
        reuse_port: whether another process has reserved rank 0's port for it.
        patience: seconds that other ranks wait longer than rank 0, so that rank
            0 gives up first and sends the reason.
        allow_unauthenticated: whether to accept other users by loopback too.

    Yields:
        The connections, until the ranks are connected to each other.

    Raises:
        RuntimeError: ranks are missing, are not of this job, or rank 0's port
            is taken.
    """
    salt = " ".join(addresses)
    job = handshake.Job(f"ranks {salt}", secret, salt)
    where: addresses_lib.Address = addresses_lib.split(addresses[0])
    if not (secret or allow_unauthenticated):
        where = addresses_lib.of_this_user(*where)
    deadline = time.monotonic() + timeout
    if rank == 0:
        listener = _listen(addresses, where, reuse_port)
        found = _receive_all(listener, addresses, blob, job, deadline, timeout)
    else:
        deadline += patience
        found = _connect(rank, addresses, where, blob, job, deadline, timeout)
    error: BaseException | None = None
    try:
        yield found
    except BaseException as raised:
        error = raised
        raise
    finally:
        found.close(error)


def _name(rank: int, addresses: Sequence[str]) -> str:
    return f"rank {rank} ({addresses[rank]})"


def _connect(
    rank: int,
    addresses: Sequence[str],
    where: addresses_lib.Address,
    blob: bytes,
    job: handshake.Job,
    deadline: float,
    timeout: float,
) -> Rendezvous:
    """Connects another rank to rank 0; does so again if rank 0 restarts."""
    own, first = _name(rank, addresses), _name(0, addresses)

    def report(reason: str) -> None:
        _LOG.warning(
            "tfdist_ext: %s has not reached %s for %g s: %s. It goes on "
            "trying for startup_timeout=%g s.",
            own,
            first,
            connector.REPORT_SECONDS,
            reason,
            timeout,
        )

    while True:
        try:
            connection = connector.connect(
                where, job, rank, deadline, report=report
            )
        except handshake.RefusedError as error:
            raise RuntimeError(
                f"{own} is refused by {first}: {_REMEDIES[error.verdict]}."
            ) from error
        except OSError as error:
            raise RuntimeError(
                f"{own} cannot reach {first} within "
                f"startup_timeout={timeout:g} s: {error}. Is that rank "
                "running, and its port open for this host?"
            ) from error
        link = Link(connection, first)
        try:
            return _exchange(link, own, blob, deadline, timeout)
        except ConnectionError as error:
            link.close()
            if time.monotonic() >= deadline:
                raise RuntimeError(
                    f"{own} has reached {first}, which then ended: {error}"
                ) from error
            _LOG.warning(
                "tfdist_ext: %s: %s ended before all ranks had connected "
                "(%s). This rank waits until it starts again.",
                own,
                first,
                error,
            )
        except BaseException:
            link.close()
            raise


def _exchange(
    link: Link, own: str, blob: bytes, deadline: float, timeout: float
) -> Rendezvous:
    """Sends the bytes of this rank, and receives the bytes of all.

    Raises:
        ConnectionError: rank 0 has ended.
        RuntimeError: rank 0 has failed, or sent an invalid message.
    """
    try:
        link.send({"blob": blob.hex()}, _MESSAGE_SECONDS)
        answer = link.receive(max(0.0, deadline - time.monotonic()))
        if answer is None:
            raise TimeoutError(f"no answer for startup_timeout={timeout:g} s")
        if "error" not in answer:
            blobs = [bytes.fromhex(text) for text in answer["blobs"]]
            secret = str(answer["secret"]).encode()
            return Rendezvous(own, {0: link}, blobs, secret)
    except ConnectionError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RuntimeError(
            f"{own} has reached {link.name}, which then failed: {error}"
        ) from error
    raise RuntimeError(f"{own}: {link.name} says: {answer['error']}")


def _receive_all(
    listener: Listener,
    addresses: Sequence[str],
    blob: bytes,
    job: handshake.Job,
    deadline: float,
    timeout: float,
) -> Rendezvous:
    """Waits on rank 0 for all other ranks, then sends them the list."""
    links: dict[int, Link] = {}
    timer = threading.Timer(
        connector.REPORT_SECONDS,
        _report_missing,
        [listener, addresses, timeout],
    )
    timer.daemon = True
    with contextlib.ExitStack() as unfinished:
        unfinished.callback(timer.cancel)
        unfinished.callback(_close, links)
        try:
            with listener:
                timer.start()
                blobs = _blobs(
                    listener, addresses, job, deadline, timeout, links
                )
            timer.cancel()
        except (OSError, RuntimeError) as error:
            _send_all(links, {"error": str(error)})
            if isinstance(error, RuntimeError):
                raise
            raise RuntimeError(f"{_name(0, addresses)}: {error}") from error
        secret = "" if job.secret else secrets.token_hex(32)
        everyone = [blob, *(blobs[rank] for rank in sorted(blobs))]
        texts = [each.hex() for each in everyone]
        _send_all(links, {"blobs": texts, "secret": secret})
        unfinished.pop_all()
    return Rendezvous(_name(0, addresses), links, everyone, secret.encode())


def _listen(
    addresses: Sequence[str], where: addresses_lib.Address, reuse_port: bool
) -> Listener:
    if not isinstance(where, str):
        where = addresses_lib.bind_address(addresses[0]), where[1]
    others = range(1, len(addresses))
    try:
        return Listener(where, others, reuse_port)
    except OSError as error:
        raise RuntimeError(
            f"rank 0 cannot listen at its address {addresses[0]!r}: {error}. "
            "Another process may use the port: one of an earlier run, or one "
            "with the same task index. Give every process its own index, and "
            "every job a free port, in TF_CONFIG or as MASTER_PORT."
        ) from error


def _named(ranks: Sequence[int], addresses: Sequence[str]) -> str:
    names = [_name(rank, addresses) for rank in ranks[:_NAMED_RANKS]]
    more = len(ranks) - len(names)
    return f"{', '.join(names)}{f' and {more} more' if more else ''}"


def _missing(
    listener: Listener, addresses: Sequence[str], timeout: float
) -> str:
    refused = f" Refused: {listener.refusals}." if listener.refusals else ""
    return (
        f"{_named(listener.missing, addresses)} of {len(addresses)} ranks did "
        f"not connect to {addresses[0]} within startup_timeout={timeout:g} "
        f"s.{refused}"
    )


def _report_missing(
    listener: Listener, addresses: Sequence[str], timeout: float
) -> None:
    """Warns which ranks are missing, and which names are not resolved."""
    missing = listener.missing
    unresolved = []
    for rank in missing[:_NAMED_RANKS]:
        host, _, port = addresses[rank].rpartition(":")
        if not port.isdecimal():
            continue  # a launcher gave no address
        try:
            socket.getaddrinfo(host.strip("[]"), None)
        except (OSError, UnicodeError) as error:
            unresolved.append(f" {host} cannot be resolved here: {error}.")
    refused = f" Refused: {listener.refusals}." if listener.refusals else ""
    _LOG.warning(
        "tfdist_ext: rank 0 has waited %g s at %s for %s of %d ranks. It goes "
        "on for startup_timeout=%g s.%s%s",
        connector.REPORT_SECONDS,
        addresses[0],
        _named(missing, addresses),
        len(addresses),
        timeout,
        "".join(unresolved),
        refused,
    )


def _blobs(
    listener: Listener,
    addresses: Sequence[str],
    job: handshake.Job,
    deadline: float,
    timeout: float,
    links: dict[int, Link],
) -> dict[int, bytes]:
    """The bytes of all other ranks, when all are connected.

    Args:
        listener: listener of rank 0.
        addresses: addresses of all ranks.
        job: job of the ranks.
        deadline: time limit, as of `time.monotonic()`.
        timeout: seconds, for errors.
        links: gets the connections, by rank.

    Raises:
        RuntimeError: ranks are missing, or send invalid messages.
    """
    blobs: dict[int, bytes] = {}
    while True:
        for number, connection in listener.accept(job, deadline):
            links[number] = Link(connection, _name(number, addresses))
            blobs.pop(number, None)
        if listener.missing:
            raise RuntimeError(_missing(listener, addresses, timeout))
        # A rank that ends is missing again: the listener has closed its socket.
        with contextlib.suppress(ConnectionError):
            for number in links.keys() - blobs.keys():
                blobs[number] = _blob_of(links[number])
            if listener.all_connected():
                return blobs


def _blob_of(link: Link) -> bytes:
    try:
        message = link.receive(_MESSAGE_SECONDS)
        if message is None:
            raise TimeoutError(f"nothing for {_MESSAGE_SECONDS:g} s")
        return bytes.fromhex(message["blob"])
    except ConnectionError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RuntimeError(
            f"{link.name} connected and failed: {error}"
        ) from error


def _close(links: Mapping[int, Link]) -> None:
    for link in links.values():
        link.close()


def _send_all(links: Mapping[int, Link], message: Message) -> None:
    for link in links.values():
        # A rank that has ended meanwhile is noticed when the ranks connect.
        with contextlib.suppress(OSError):
            link.send(message, _MESSAGE_SECONDS)
