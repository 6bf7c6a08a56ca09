# SPDX-License-Identifier: Apache-2.0
"""Connects the launchers of several hosts, and reports failures to all.

Every launcher has chosen free ports for its ranks. The launcher of host 0
listens at the master's address. The launchers of hosts 1 to N-1 connect there
and send the addresses of their ranks. Host 0 answers each of them with the list
of all addresses. A launcher that ends before it has the list is replaced by its
next start. The connections stay open, so that a failure on one host stops the
ranks on the others:

    host 1 -> host 0   {"nnodes": 2, "workers": ["b:41", ...]}
    host 0 -> host 1   {"workers": ["a:52", ..., "b:41", ...], "first_rank": 4,
                        "secret": "..."}
    each -> others     {"ended": null} or {"ended": "rank 5 (...) failed: ..."}

Messages are JSON, one per line, of limited length. The handshake tells which
host a message is from.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import sys
import time
from collections.abc import Sequence

from tfdist_ext.comm import addresses as addresses_lib
from tfdist_ext.comm import connector
from tfdist_ext.comm import handshake
from tfdist_ext.comm.handshake import Link
from tfdist_ext.comm.handshake import Message
from tfdist_ext.comm.listener import Listener

_MESSAGE_SECONDS = 10.0
_MOST_RANKS = 1 << 16
_ALL = _MOST_RANKS + 1
_JOB = "hosts"
_REMEDIES = {
    handshake.Verdict.OTHER_PROTOCOL: "it has another version of tfdist_ext",
    handshake.Verdict.OTHER_JOB: "it has another version of tfdist_ext",
    handshake.Verdict.TAKEN: (
        "another launcher has connected with this --node-rank. Give every "
        "host its own"
    ),
    handshake.Verdict.UNEXPECTED: (
        "it expects other hosts: --nnodes differs. Give all hosts the same"
    ),
    handshake.Verdict.WRONG_SECRET: (
        "it has another secret; set the same TFDIST_SECRET or "
        "TFDIST_SECRET_FILE on all hosts"
    ),
}


class RendezvousError(Exception):
    """The hosts are not all connected; the message says what to change."""


class Rendezvous:
    """The connections between launchers, after the exchange of addresses.

    Attributes:
        workers: addresses of all ranks, in rank order.
        first_rank: rank of this host's first process.
        secret: generated secret of the ranks; empty if the job has one.
    """

    def __init__(
        self,
        links: Sequence[Link],
        workers: list[str],
        first_rank: int,
        secret: str,
    ) -> None:
        self.workers = workers
        self.first_rank = first_rank
        self.secret = secret
        self._links = list(links)
        for link in self._links:
            link.watch(False)  # ranks set their own limit for an interruption

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, *exception: object) -> None:
        for link in self._links:
            link.close()

    def failure(self) -> str | None:
        """What has failed on another host, None if nothing has.

        A host whose ranks have all succeeded is no longer watched.
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
        """Sends the other hosts how this one ended, None for success."""
        for link in self._links:
            with contextlib.suppress(OSError):
                link.send({"ended": failure}, _MESSAGE_SECONDS)

    def _drop(self, link: Link) -> None:
        self._links.remove(link)
        link.close()


def exchange_addresses(
    *,
    master: tuple[str, int],
    node_rank: int,
    nnodes: int,
    host: str | None,
    ports: Sequence[int],
    timeout: float,
    secret: bytes = b"",
    min_ranks: int | None = None,
    allow_unauthenticated: bool = False,
) -> Rendezvous:
    """Exchanges the addresses of all ranks.

    Args:
        master: host and port where the launcher of host 0 listens.
        node_rank: number of this host.
        nnodes: number of hosts.
        host: address by which others reach this host; by default the local
            address of the connection to the master, and on host 0 the master's.
        ports: one port per rank of this host.
        timeout: seconds to wait for the other hosts.
        secret: secret of the job. Without one, launchers that connect by
            loopback only accept processes of their own user.
        min_ranks: number of ranks that suffices to go on without hosts that are
            missing after `timeout`; None if all hosts are needed.
        allow_unauthenticated: whether to accept other users by loopback too.

    Raises:
        RendezvousError: hosts are missing after `timeout`, or they disagree.
    """
    deadline = time.monotonic() + timeout
    job = handshake.Job(_JOB, secret)
    where: addresses_lib.Address = master
    if not (secret or allow_unauthenticated):
        where = addresses_lib.of_this_user(*master)
    if node_rank == 0:
        _check_master(master)
        workers = [addresses_lib.join(host or master[0], p) for p in ports]
        return _receive_hosts(
            master, where, job, nnodes, workers, deadline, min_ranks
        )
    while True:
        link = _reach(master, where, job, node_rank, deadline)
        address = host or link.own_host() or master[0]
        hello = {
            "nnodes": nnodes,
            "workers": [addresses_lib.join(address, port) for port in ports],
        }
        try:
            return _exchange(link, hello, deadline, timeout)
        except ConnectionError as error:
            if time.monotonic() >= deadline:
                raise RendezvousError(
                    f"no answer from {link.name}: {error}"
                ) from error
            _print(
                f"{link.name} ended before all hosts had connected ({error}); "
                "waiting until it starts again"
            )


def _exchange(
    link: Link, hello: Message, deadline: float, timeout: float
) -> Rendezvous:
    """Sends host 0 the addresses of this host, and receives all.

    Raises:
        ConnectionError: host 0 has ended.
        RendezvousError: host 0 has failed, or sent an invalid message.
    """
    with contextlib.ExitStack() as unfinished:
        unfinished.callback(link.close)
        try:
            link.send(hello, _MESSAGE_SECONDS)
            answer = link.receive(max(0.0, deadline - time.monotonic()))
            if answer is None:
                raise TimeoutError(
                    "it has waited for other hosts for longer than "
                    f"--start-timeout {timeout:g}"
                )
            rendezvous = _checked(link, answer, len(hello["workers"]))
        except ConnectionError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RendezvousError(
                f"no answer from {link.name}: {error}"
            ) from error
        unfinished.pop_all()
    return rendezvous


def _print(text: str) -> None:
    print(f"tfdist-run: {text}", file=sys.stderr, flush=True)


def _check_master(master: tuple[str, int]) -> None:
    """Rejects a name that means loopback on host 0 only."""
    host, port = master
    try:
        numeric = addresses_lib.bind_address(addresses_lib.join(host, port))
    except ValueError as error:
        raise RendezvousError(f"--master: {error}") from error
    if addresses_lib.is_loopback(numeric) and not addresses_lib.is_local_name(
        host
    ):
        raise RendezvousError(
            f"cannot listen on --master {addresses_lib.join(host, port)}: "
            f"this host resolves its name {host!r} to {numeric}, which other "
            "hosts cannot reach. Give all hosts the address by which they "
            f"reach this one, or correct the line of {host!r} in /etc/hosts"
        )


def _checked(link: Link, answer: Message, ranks: int) -> Rendezvous:
    """Checks the answer of host 0 to a host with `ranks` ranks."""
    if "error" in answer:
        raise RendezvousError(f"{link.name} says: {answer['error']}")
    workers = _addresses(answer)
    first_rank, secret = answer["first_rank"], answer["secret"]
    if not (
        type(first_rank) is int
        and 0 <= first_rank <= len(workers) - ranks
        and type(secret) is str
    ):
        raise ValueError("it sent no ranks for this host")
    return Rendezvous([link], workers, first_rank, secret)


def _receive_hosts(
    master: tuple[str, int],
    where: addresses_lib.Address,
    job: handshake.Job,
    nnodes: int,
    own: list[str],
    deadline: float,
    min_ranks: int | None,
) -> Rendezvous:
    """Waits on host 0 for all others, then sends everyone the list."""
    workers = {0: own}
    links: dict[int, Link] = {}
    try:
        with _listen(master, where, nnodes) as listener:
            while True:
                for node, connection in listener.accept(job, deadline):
                    links[node] = Link(connection, _name(node, connection))
                    workers.pop(node, None)
                missing, refusals = listener.missing, listener.refusals
                for node in missing:
                    if node in links:
                        links.pop(node).close()
                        workers.pop(node, None)
                # A host whose launcher ends is missing again.
                with contextlib.suppress(ConnectionError):
                    for node in links.keys() - workers.keys():
                        workers[node] = _receive_addresses(links[node], nnodes)
                    if missing or listener.all_connected():
                        break
        if missing and sum(map(len, workers.values())) < (min_ranks or _ALL):
            refused = refusals and f". Refused: {refusals}"
            raise RendezvousError(
                f"hosts {missing} of {nnodes} did not connect within "
                f"--start-timeout{refused}"
            )
        everyone = [
            address for node in sorted(workers) for address in workers[node]
        ]
        # If all hosts have a secret already, none is sent.
        secret = "" if job.secret else secrets.token_hex(32)
        first_rank = 0
        first_ranks = {}
        for node in sorted(workers):
            first_ranks[node] = first_rank
            first_rank += len(workers[node])
        for node, link in sorted(links.items()):
            answer = {
                "workers": everyone,
                "first_rank": first_ranks[node],
                "secret": secret,
            }
            link.send(answer, _MESSAGE_SECONDS)
    except (OSError, RendezvousError) as error:
        for link in links.values():
            with contextlib.suppress(OSError):
                link.send({"error": str(error)}, _MESSAGE_SECONDS)
            link.close()
        raise RendezvousError(str(error)) from error
    return Rendezvous(list(links.values()), everyone, 0, secret)


def _receive_addresses(link: Link, nnodes: int) -> list[str]:
    """Receives the addresses of a host's ranks."""
    try:
        hello = link.receive(_MESSAGE_SECONDS)
        if hello is None:
            raise TimeoutError(f"nothing for {_MESSAGE_SECONDS:g} s")
        theirs, addresses = hello["nnodes"], _addresses(hello)
    except ConnectionError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RendezvousError(
            f"{link.name} has connected, but: {error}"
        ) from error
    if theirs != nnodes:
        raise RendezvousError(
            f"{link.name} connected with --nnodes {theirs}; expected {nnodes}"
        )
    return addresses


def _addresses(message: Message) -> list[str]:
    """The "workers" of a message.

    Raises:
        ValueError: they are not addresses.
    """
    found = message.get("workers")
    if (
        not isinstance(found, list)
        or len(found) > _MOST_RANKS
        or not all(isinstance(each, str) and ":" in each for each in found)
    ):
        raise ValueError("it sent no addresses of ranks")
    return found


def _name(node: int, connection: socket.socket) -> str:
    if connection.family == socket.AF_UNIX:
        return f"host {node} (this one)"
    host, port = connection.getpeername()[:2]
    return f"host {node} ({addresses_lib.join(host, port)})"


def _listen(
    master: tuple[str, int], where: addresses_lib.Address, nnodes: int
) -> Listener:
    if not isinstance(where, str):
        where = addresses_lib.bind_address(addresses_lib.join(*where)), where[1]
    try:
        return Listener(where, range(1, nnodes))
    except OSError as error:
        raise RendezvousError(
            f"cannot listen on --master {addresses_lib.join(*master)}: "
            f"{error}. It must be an address of host 0 and a free port"
        ) from error


def _reach(
    master: tuple[str, int],
    where: addresses_lib.Address,
    job: handshake.Job,
    node_rank: int,
    deadline: float,
) -> Link:
    """Retries until host 0 listens, as hosts start in any order."""
    name = f"host 0 ({addresses_lib.join(*master)})"

    def report(reason: str) -> None:
        _print(
            f"host {node_rank} has not reached {name} for "
            f"{connector.REPORT_SECONDS:g} s: {reason}; it goes on trying "
            "until --start-timeout"
        )

    try:
        connection = connector.connect(
            where, job, node_rank, deadline, report=report
        )
    except handshake.RefusedError as error:
        raise RendezvousError(
            f"{name} refuses this host: {_REMEDIES[error.verdict]}"
        ) from error
    except OSError as error:
        raise RendezvousError(
            f"{name} did not answer within --start-timeout: {error}"
        ) from error
    return Link(connection, name)
