# SPDX-License-Identifier: Apache-2.0
"""Connects to a listener of this job; retries until the listener is there.

A host name may have several addresses. All are tried, each 0.25 s after the
previous one. The first connection that completes its handshake is used (RFC
8305).
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import selectors
import socket
import time
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

from tfdist_ext.comm import handshake
from tfdist_ext.comm import listener
from tfdist_ext.comm.addresses import Address
from tfdist_ext.comm.addresses import is_local_name
from tfdist_ext.comm.listener import CHECK_SECONDS
from tfdist_ext.comm.listener import HANDSHAKE_SECONDS
from tfdist_ext.comm.listener import peer_process

REPORT_SECONDS = 10.0
# A listener learns within 9 s that the host of an earlier process is lost.
TAKEN_SECONDS = 15.0
TCP_SECONDS = 3.0  # until the other host accepts a connection
_STAGGER_SECONDS = 0.25
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0

Check = Callable[[], None]


def connect(
    address: Address,
    job: handshake.Job,
    number: int,
    deadline: float,
    *,
    check: Check | None = None,
    report: Callable[[str], None] | None = None,
) -> socket.socket:
    """Connects to a listener; retries until there is one.

    Args:
        address: host and port; or the name of an abstract Unix socket of the
            same user.
        job: job of this process.
        number: number of this process.
        deadline: time limit, as of `time.monotonic()`.
        check: called every `CHECK_SECONDS`; may raise.
        report: called once with the reason, after `REPORT_SECONDS` of failures.

    Returns:
        The blocking socket; both sides have proved that they know the secret.

    Raises:
        handshake.RefusedError: the listener rejects this process.
        OSError: no listener accepted it in time; has the last reason.
    """
    _ = job.key  # computed here, as it would delay a handshake
    began = time.monotonic()
    refusal: OSError | None = None  # says more than a closed port
    refused_at = 0.0
    while True:
        try:
            return _race(resolve(address), job, number, deadline, check)
        except handshake.RefusedError as error:
            if error.verdict != handshake.Verdict.TAKEN:
                raise
            # The number may be taken by an earlier process that has ended.
            refused_at = refused_at or time.monotonic()
            if time.monotonic() - refused_at >= TAKEN_SECONDS:
                raise
            failure: OSError = error
            refusal = error
        except OSError as error:
            failure = error
            if isinstance(error, handshake.ProtocolError):
                refusal = error
            if listener.are_descriptors_exhausted(error):
                raise OSError(
                    error.errno,
                    f"{error.strerror}: {listener.shortage_of_files(1)}",
                ) from error
        now = time.monotonic()
        if now >= deadline:
            raise refusal or failure
        if report is not None and now - began >= REPORT_SECONDS:
            report(str(failure))
            report = None
        seconds = pause(now - began, on_this_host=is_on_this_host(address))
        _sleep(min(seconds, deadline - now), check)


def pause(waited: float, *, on_this_host: bool = False) -> float:
    """Seconds until the next attempt, a tenth of the time so far.

    Pauses grow because many ranks may wait, and each attempt asks the name
    server. On one host an attempt is a system call that fails at once, so
    pauses stay short: the ranks that wait go on as soon as the last one comes.

    Args:
        waited: seconds since the first attempt.
        on_this_host: whether the listener is on this host.
    """
    seconds = max(waited / 10, _SHORTEST_PAUSE)
    longest = _SHORTEST_PAUSE if on_this_host else _LONGEST_PAUSE
    return min(seconds, longest) * random.uniform(0.8, 1.2)


def is_on_this_host(address: Address) -> bool:
    """Whether an address is a Unix socket or a name of loopback.

    Args:
        address: see `connect`.
    """
    return isinstance(address, str) or is_local_name(address[0])


def _sleep(seconds: float, check: Check | None) -> None:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if check is not None:
            check()
            left = min(left, CHECK_SECONDS)
        time.sleep(left)


# Family and address of a socket.
_Place = tuple[int, Any]


def resolve(address: Address) -> list[_Place]:
    """Finds all addresses of a listener.

    Args:
        address: see `connect`.

    Returns:
        Family and address of sockets, IPv4 and IPv6 alternating.

    Raises:
        OSError: the name cannot be resolved.
    """
    if isinstance(address, str):
        return [(socket.AF_UNIX, f"\0{address}")]
    try:
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(
            errno.EINVAL, f"{address[0]!r} is not a host name"
        ) from error
    places = [(int(family), where) for family, _, _, _, where in found]
    first = [each for each in places if each[0] == places[0][0]]
    others = [each for each in places if each[0] != places[0][0]]
    mixed = itertools.chain(*itertools.zip_longest(first, others))
    return list(dict.fromkeys(each for each in mixed if each is not None))


def _race(
    places: Sequence[_Place],
    job: handshake.Job,
    number: int,
    deadline: float,
    check: Check | None,
) -> socket.socket:
    """Returns the first connection that completes its handshake."""
    waiting = list(places)
    running: list[_Attempt] = []
    failures: list[tuple[_Attempt, OSError]] = []

    def fail(attempt: _Attempt, error: OSError) -> None:
        running.remove(attempt)
        selector.unregister(attempt.connection)
        attempt.connection.close()
        failures.append((attempt, error))

    start_at = 0.0
    with contextlib.ExitStack() as unfinished:
        selector = unfinished.enter_context(selectors.DefaultSelector())
        while waiting or running:
            if check is not None:
                check()
            now = time.monotonic()
            if waiting and (now >= start_at or not running):
                start_at = now + _STAGGER_SECONDS
                attempt = _Attempt(waiting.pop(0), job, number, deadline)
                unfinished.callback(attempt.close)
                running.append(attempt)
                connection = attempt.connection
                selector.register(connection, selectors.EVENT_WRITE, attempt)
            limits = [each.limit for each in running]
            if waiting:
                limits.append(start_at)
            if check is not None:
                limits.append(now + CHECK_SECONDS)
            for key, _ in selector.select(max(min(limits) - now, 0)):
                try:
                    if key.data.advance():
                        return key.data.take()
                    selector.modify(key.fileobj, selectors.EVENT_READ, key.data)
                except OSError as error:
                    fail(key.data, error)
            for attempt in list(running):
                if time.monotonic() >= attempt.limit:
                    fail(attempt, TimeoutError("no answer in time"))
    raise _summary(failures)


def _summary(failures: Sequence[tuple[_Attempt, OSError]]) -> OSError:
    for _, error in failures:
        if isinstance(error, handshake.RefusedError):
            return error
    if len(failures) == 1:
        return failures[0][1]
    return OSError("; ".join(f"{each.name}: {e}" for each, e in failures))


class _Attempt:
    """A connection to one address and its handshake; never blocks.

    Attributes:
        name: address, for errors.
        connection: the socket.
        limit: time limit of the current operation, as of `time.monotonic()`.
    """

    def __init__(
        self, place: _Place, job: handshake.Job, number: int, deadline: float
    ) -> None:
        family, self._where = place
        self.name = str(self._where[0])
        self.connection = socket.socket(family, socket.SOCK_STREAM)
        self.connection.setblocking(False)
        self._deadline = deadline
        self._limit_to(TCP_SECONDS)
        self._protocol = handshake.connect(job, number)
        self._received = b""
        self._wanted = 0
        self._is_taken = False
        # An error is raised by `advance`.
        self._error = self.connection.connect_ex(self._where)

    def advance(self) -> bool:
        """Continues when the socket is ready; returns whether it is done.

        Raises:
            OSError: the connection or the handshake has failed.
        """
        if not self._wanted:
            self._check_connection()
            self._limit_to(HANDSHAKE_SECONDS)
            self._send(next(self._protocol))
            return False
        try:
            data = self.connection.recv(self._wanted - len(self._received))
        except BlockingIOError:
            return False
        if not data:
            raise handshake.ProtocolError("it closed the connection")
        self._received += data
        if len(self._received) == self._wanted:
            message, self._received = self._received, b""
            try:
                self._send(self._protocol.send(message))
            except StopIteration:
                return True
        return False

    def take(self) -> socket.socket:
        """Returns the socket, blocking; `close` then leaves it open."""
        self._is_taken = True
        self.connection.setblocking(True)
        return self.connection

    def close(self) -> None:
        if not self._is_taken:
            self.connection.close()

    def _limit_to(self, seconds: float) -> None:
        self.limit = min(self._deadline, time.monotonic() + seconds)

    def _check_connection(self) -> None:
        error = self._error
        if error in (0, errno.EINPROGRESS):
            error = self.connection.getsockopt(
                socket.SOL_SOCKET, socket.SO_ERROR
            )
        if error:
            raise OSError(error, os.strerror(error))
        if self.connection.family == socket.AF_UNIX:
            process, user = peer_process(self.connection)
            if user != os.geteuid():
                raise handshake.ProtocolError(
                    f"process {process} of user {user} listens there, but "
                    f"this process is of user {os.geteuid()}"
                )
        # If no process listens on a port of the system's own range, TCP may
        # connect a socket to itself.
        elif self.connection.getsockname() == self.connection.getpeername():
            raise handshake.ProtocolError("the socket is connected to itself")

    def _send(self, move: handshake.Move) -> None:
        message, self._wanted = move
        # A few hundred bytes always fit into the buffer of a new connection.
        if self.connection.send(message) < len(message):
            raise handshake.ProtocolError("it does not read")
