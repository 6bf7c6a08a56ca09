# SPDX-License-Identifier: Apache-2.0
"""Where processes of a job come in, and strangers do not.

A door listens until everyone expected has come, and has several handshakes at
once: whoever is silent, slow or talks nonsense delays nobody. It keeps at most
`MOST_GUESTS` unfinished ones, each for `GREETING_SECONDS` and of fixed length.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import selectors
import socket
import time
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Generator
from collections.abc import Iterator

from tfdist_ext.rendezvous import handshake

MOST_GUESTS = 256
GREETING_SECONDS = 10.0
_RETRY_SECONDS = 0.1
_REFUSALS = 4  # that are named in an error


@dataclasses.dataclass
class _Guest:
    """Someone who has connected, in the middle of the handshake."""

    connection: socket.socket
    name: str
    deadline: float
    talk: Generator[handshake.Turn, bytes, int]
    wanted: int = 0
    received: bytes = b""
    answered: bool = False


class Door:
    """A listening socket that lets in who knows the secret of a job.

    Args:
        address: numeric host and port.
        job: whose processes are expected.
        numbers: that they have.
        reuse_port: whether somebody holds the port for this process.
        greeting_seconds: how long a handshake may take.

    Raises:
        OSError: the address cannot be bound.
    """

    def __init__(
        self,
        address: tuple[str, int],
        job: handshake.Job,
        numbers: Collection[int],
        reuse_port: bool = False,
        greeting_seconds: float = GREETING_SECONDS,
    ) -> None:
        self._job = job
        self._greeting_seconds = greeting_seconds
        self._numbers = frozenset(numbers)
        self._inside: dict[int, socket.socket] = {}
        self._guests: list[_Guest] = []
        self._refusals: collections.deque[str] = collections.deque(
            maxlen=_REFUSALS
        )
        self._listener = socket.create_server(
            address,
            family=socket.AF_INET6 if ":" in address[0] else socket.AF_INET,
            backlog=128,
            reuse_port=reuse_port,
        )
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def __enter__(self) -> Door:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops listening; those inside stay connected."""
        for guest in list(self._guests):
            self._send_away(guest)
        self._selector.close()
        self._listener.close()

    @property
    def address(self) -> tuple[str, int]:
        """Numeric host and port at which it listens."""
        host, port = self._listener.getsockname()[:2]
        return host, port

    @property
    def missing(self) -> list[int]:
        """Numbers that have not come yet."""
        return sorted(self._numbers - self._inside.keys())

    @property
    def refusals(self) -> str:
        """Who was refused last, and why; for an error."""
        return "; ".join(self._refusals)

    def let_in(self, deadline: float) -> Iterator[tuple[int, socket.socket]]:
        """Waits until all have come.

        A number that comes again replaces the first only if that has ended.

        Args:
            deadline: of `time.monotonic()`; ends the iteration early.

        Yields:
            Number and blocking socket of everyone who has come.
        """
        while self.missing:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            for guest in list(self._guests):
                left = min(left, guest.deadline - time.monotonic())
                if guest.deadline <= time.monotonic():
                    self._send_away(guest)
            for key, _ in self._selector.select(max(left, 0)):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data in self._guests:
                    came = self._hear(key.data)
                    if came is not None:
                        yield came

    def _accept(self) -> None:
        try:
            connection, peer = self._listener.accept()
        except OSError:  # it has gone again, or there are too many files
            time.sleep(0.001)
            return
        connection.setblocking(False)
        guest = _Guest(
            connection,
            f"{peer[0]}:{peer[1]}",
            time.monotonic() + self._greeting_seconds,
            handshake.listen(self._job, self._check),
        )
        if len(self._guests) >= MOST_GUESTS:
            self._send_away(self._guests[0])
        self._guests.append(guest)
        self._selector.register(connection, selectors.EVENT_READ, guest)
        _, guest.wanted = next(guest.talk)

    def _check(self, number: int) -> handshake.Verdict:
        if number not in self._numbers:
            return handshake.Verdict.TAKEN
        first = self._inside.get(number)
        if first is not None and not has_ended(first):
            return handshake.Verdict.TAKEN
        return handshake.Verdict.WELCOME

    def _hear(self, guest: _Guest) -> tuple[int, socket.socket] | None:
        """Goes on with a handshake; returns who has come in by it."""
        try:
            data = guest.connection.recv(guest.wanted - len(guest.received))
            guest.received += data
            if not data:
                raise handshake.StrangerError("it has gone")
            if len(guest.received) < guest.wanted:
                return None
            message, guest.received = guest.received, b""
            self._answer(guest, guest.talk.send(message))
            if guest.wanted > 0:
                return None
            self._answer(guest, next(guest.talk))
        except StopIteration as end:
            return self._admit(guest, end.value)
        except handshake.RefusedError as error:
            self._refusals.append(f"{guest.name} ({error})")
            self._send_away(guest)
        except BlockingIOError:
            return None
        except OSError:
            if guest.answered:  # it has not liked the answer
                self._refusals.append(f"{guest.name} (left; another secret?)")
            self._send_away(guest)
        return None

    def _answer(self, guest: _Guest, turn: handshake.Turn) -> None:
        answer, guest.wanted = turn
        guest.answered = True
        # Some hundred bytes always fit into the buffer of a new connection.
        if answer and guest.connection.send(answer) < len(answer):
            raise handshake.StrangerError("it does not read")

    def _admit(self, guest: _Guest, number: int) -> tuple[int, socket.socket]:
        self._guests.remove(guest)
        self._selector.unregister(guest.connection)
        guest.connection.setblocking(True)
        if number in self._inside:
            self._inside[number].close()
        self._inside[number] = guest.connection
        return number, guest.connection

    def _send_away(self, guest: _Guest) -> None:
        self._guests.remove(guest)
        self._selector.unregister(guest.connection)
        guest.connection.close()


def knock(
    address: tuple[str, int],
    job: handshake.Job,
    number: int,
    deadline: float,
) -> socket.socket:
    """Connects to a door; tries until somebody opens.

    Args:
        address: host and port of the door.
        job: of this process.
        number: of this process.
        deadline: of `time.monotonic()`.

    Returns:
        The blocking socket, both sides of which know the secret.

    Raises:
        handshake.RefusedError: nobody will let this process in.
        OSError: nobody did in time; the last reason.
    """
    # Where nobody listens on a port of the system's own range, TCP may connect
    # a socket to itself.
    while True:
        left = max(deadline - time.monotonic(), 1e-3)
        try:
            connection = socket.create_connection(address, timeout=left)
            with contextlib.ExitStack() as stack:
                stack.callback(connection.close)
                if connection.getsockname() == connection.getpeername():
                    raise handshake.StrangerError("it is this very socket")
                _talk(connection, handshake.connect(job, number), left)
                stack.pop_all()
            connection.settimeout(None)
            return connection
        except handshake.RefusedError:
            raise
        except OSError:  # not there yet, or something else is
            if time.monotonic() + _RETRY_SECONDS >= deadline:
                raise
        time.sleep(_RETRY_SECONDS)


def _talk(
    connection: socket.socket,
    talk: Generator[handshake.Turn, bytes, None],
    seconds: float,
) -> None:
    connection.settimeout(min(seconds, GREETING_SECONDS))
    answer, wanted = next(talk)
    while True:
        connection.sendall(answer)
        message = _read(connection.recv, wanted)
        try:
            answer, wanted = talk.send(message)
        except StopIteration:
            return


def _read(receive: Callable[[int], bytes], wanted: int) -> bytes:
    message = b""
    while len(message) < wanted:
        data = receive(wanted - len(message))
        if not data:
            raise handshake.StrangerError("it closed the connection")
        message += data
    return message


def has_ended(connection: socket.socket) -> bool:
    """Whether the other end of an idle connection has closed it."""
    try:
        flags = socket.MSG_PEEK | socket.MSG_DONTWAIT
        return connection.recv(1, flags) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
