# SPDX-License-Identifier: Apache-2.0
"""Listens for the processes of a job, and rejects all others."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import fcntl
import ipaddress
import os
import pathlib
import resource
import select
import selectors
import socket
import struct
import time
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Generator
from collections.abc import Iterator
from collections.abc import Mapping

from tfdist_ext.comm import addresses as addresses_lib
from tfdist_ext.comm import handshake
from tfdist_ext.comm.addresses import Address

_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def allow_descriptors(count: int) -> int:
    """Raises the soft limit on open files, up to the hard limit.

    Args:
        count: number of descriptors that are about to be opened.

    Returns:
        The number that can be opened now, which may be lower.
    """
    used = _used()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = used + count
    if soft < wanted:
        soft = min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft - used


def shortage_of_files(count: int) -> str:
    """A text that says how many files are needed, and what to do.

    Args:
        count: number of descriptors needed in addition to the open ones.
    """
    used = _used()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"it has {used} open files and needs {count} more, {used + count} in "
        f"all, but may have {hard}. Raise the hard limit: `ulimit -Hn "
        f"{used + count}`, LimitNOFILE= of systemd, or --ulimit nofile= of "
        "the container"
    )


def are_descriptors_exhausted(error: OSError) -> bool:
    """Whether a call failed because no descriptor or memory is left."""
    return error.errno in _ERRORS


def _used() -> int:
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # without the listing's own
    except OSError:  # no descriptor is left
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


# Variable that tells a rank that the port of its address is reserved for it.
HELD_VARIABLE = "TFDIST_PORT_IS_HELD"


# Range that lets the system choose the port.
ANY_PORT = range(1)


@contextlib.contextmanager
def reserve_ports(
    count: int, host: str, first: range = ANY_PORT
) -> Iterator[list[int]]:
    """Reserves `count` distinct free TCP ports of `host`.

    The sockets are bound, do not listen, and allow reuse. The system assigns
    their ports to no other process. A process of the same user that also allows
    reuse (a rank with `HELD_VARIABLE`) can bind the same port, and it receives
    all connections.

    Args:
        count: number of ports.
        host: address to bind, "" for all of IPv4 and IPv6.
        first: range that the first port is taken from.

    Yields:
        The port numbers.

    Raises:
        OSError: no port is free.
    """
    with contextlib.ExitStack() as stack:
        held = [
            stack.enter_context(_hold(host, first if number == 0 else ANY_PORT))
            for number in range(count)
        ]
        yield [each.getsockname()[1] for each in held]


def _hold(host: str, candidates: range) -> socket.socket:
    both = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    for port in candidates:
        held = socket.socket(family, socket.SOCK_STREAM)
        try:
            if both:
                held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            held.bind((host, port))
        except OSError as error:
            held.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            # Reuse is allowed after `bind`: otherwise a port that another
            # launcher has reserved would seem to be free.
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            return held
    raise OSError(
        errno.EADDRINUSE,
        f"ports {candidates[0]} to {candidates[-1]} are all taken",
    )


MAX_HANDSHAKES = 256
HANDSHAKE_SECONDS = 10.0
CHECK_SECONDS = 0.2
_REFUSALS = 4  # most rejections that an error names
_BACKLOG = 4096
_SPARE_DESCRIPTORS = 64


@dataclasses.dataclass(eq=False)
class _Handshake:
    """A connection and the state of its handshake."""

    connection: socket.socket
    name: str
    deadline: float
    protocol: Generator[handshake.Move, bytes, int]
    wanted: int = 0
    received: bytes = b""


class Listener:
    """Accepts connections of processes that know the secret of a job.

    Args:
        address: numeric host and port; or the name of an abstract Unix socket,
            which only accepts processes of the same user.
        numbers: numbers of the expected processes.
        reuse_port: whether another process has reserved the port for this one.
        handshake_seconds: time limit of a handshake.

    Raises:
        OSError: the address cannot be bound.
    """

    def __init__(
        self,
        address: Address,
        numbers: Collection[int],
        reuse_port: bool = False,
        handshake_seconds: float = HANDSHAKE_SECONDS,
    ) -> None:
        self._handshake_seconds = handshake_seconds
        self._numbers = frozenset(numbers)
        self._connected: dict[int, _Handshake] = {}
        self._handshakes: list[_Handshake] = []
        self._refusals: collections.deque[str] = collections.deque(
            maxlen=_REFUSALS
        )
        allow_descriptors(len(numbers) + _SPARE_DESCRIPTORS)
        self._listener = _listen(address, reuse_port)
        self._listener.setblocking(False)
        # It is readable when a connected peer has closed its end. `recv` would
        # not show that while there is unread data.
        self._ended = select.epoll()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._ended, selectors.EVENT_READ)

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops listening; accepted connections stay open."""
        for each in list(self._handshakes):
            self._reject(each)
        self._selector.close()
        self._ended.close()
        self._listener.close()

    @property
    def address(self) -> tuple[str, int]:
        """Numeric host and port that it listens on."""
        host, port = self._listener.getsockname()[:2]
        return host, port

    @property
    def missing(self) -> list[int]:
        """Numbers of the processes that are not connected."""
        return sorted(self._numbers - set(self._connected))

    def all_connected(self) -> bool:
        """Whether all are connected now; drops connections that have ended."""
        self._drop_ended()
        return not self.missing

    @property
    def refusals(self) -> str:
        """The last rejected processes and the reasons, for an error."""
        return "; ".join(self._refusals)

    def accept(
        self,
        job: handshake.Job,
        deadline: float,
        check: Callable[[], None] | None = None,
    ) -> Iterator[tuple[int, socket.socket]]:
        """Waits until all are connected at the same time.

        When a connection ends, its number is missing again, and the next
        process with this number replaces it. While it is open, other processes
        with this number are rejected.

        Args:
            job: job whose processes are accepted.
            deadline: time limit, as of `time.monotonic()`; the iteration then
                ends.
            check: called every `CHECK_SECONDS`; may raise.

        Yields:
            Number and blocking socket of each connected process.

        Raises:
            OSError: this process has no descriptors left.
        """
        _ = job.key  # computed here, as it would delay a handshake
        while True:
            self._drop_ended()
            if check is not None:
                check()
            now = time.monotonic()
            if not self.missing or now >= deadline:
                return
            until = deadline if check is None else now + CHECK_SECONDS
            for each in list(self._handshakes):
                until = min(until, each.deadline)
                if each.deadline <= now:
                    self._reject(each, "it is silent or slow")
            for key, _ in self._selector.select(max(until - now, 0)):
                if key.fileobj is self._listener:
                    self._accept(job)
                elif key.data in self._handshakes:
                    accepted = self._advance(key.data)
                    if accepted is not None:
                        yield accepted

    def _drop_ended(self) -> None:
        for descriptor, _ in self._ended.poll(0):
            for number, each in list(self._connected.items()):
                if each.connection.fileno() == descriptor:
                    self._ended.unregister(descriptor)
                    each.connection.close()
                    del self._connected[number]
                    self._add_refusal(f"{each.name} (it connected and ended)")

    def _accept(self, job: handshake.Job) -> None:
        try:
            connection, peer = self._listener.accept()
        except OSError as error:
            if not are_descriptors_exhausted(error):
                return  # the peer has closed the connection already
            if not self._handshakes:
                needed = len(self.missing) + _SPARE_DESCRIPTORS
                raise OSError(
                    error.errno,
                    f"{error.strerror}: {len(self.missing)} connections are "
                    f"missing, and {shortage_of_files(needed)}",
                ) from error
            self._reject(
                self._handshakes[0], "this process had no file descriptor left"
            )
            return
        connection.setblocking(False)
        if connection.family == socket.AF_UNIX:
            process, user = peer_process(connection)
            name = f"process {process} of user {user}"
            if user != os.geteuid():
                self._add_refusal(f"{name} (another user)")
                connection.close()
                return
        else:
            name = f"{peer[0]}:{peer[1]}"
        each = _Handshake(
            connection,
            name,
            time.monotonic() + self._handshake_seconds,
            handshake.listen(job, self.check),
        )
        if len(self._handshakes) >= MAX_HANDSHAKES:
            self._reject(self._handshakes[0], "too many others connected")
        self._handshakes.append(each)
        self._selector.register(connection, selectors.EVENT_READ, each)
        _, each.wanted = next(each.protocol)

    def check(self, number: int) -> handshake.Verdict:
        """Whether a process with this number is accepted now."""
        if number not in self._numbers:
            return handshake.Verdict.UNEXPECTED
        self._drop_ended()
        if number in self._connected:
            return handshake.Verdict.TAKEN
        return handshake.Verdict.ACCEPTED

    def _advance(self, each: _Handshake) -> tuple[int, socket.socket] | None:
        """Continues a handshake; returns its connection once accepted."""
        try:
            data = each.connection.recv(each.wanted - len(each.received))
            each.received += data
            if not data:
                raise handshake.ProtocolError("it closed the connection")
            if len(each.received) < each.wanted:
                return None
            message, each.received = each.received, b""
            self._answer(each, each.protocol.send(message))
            if each.wanted > 0:
                return None
            self._answer(each, next(each.protocol))
        except StopIteration as end:
            return self._admit(each, end.value)
        except handshake.RefusedError as error:
            self._reject(each, str(error))
        except BlockingIOError:
            return None
        except OSError:
            self._reject(each)
        return None

    def _answer(self, each: _Handshake, move: handshake.Move) -> None:
        answer, each.wanted = move
        # A few hundred bytes always fit into the buffer of a new connection.
        if answer and each.connection.send(answer) < len(answer):
            raise handshake.ProtocolError("it does not read")

    def _admit(
        self, each: _Handshake, number: int
    ) -> tuple[int, socket.socket]:
        self._handshakes.remove(each)
        self._selector.unregister(each.connection)
        each.connection.setblocking(True)
        self._connected[number] = each
        self._ended.register(each.connection, select.EPOLLRDHUP)
        return number, each.connection

    def _add_refusal(self, refusal: str) -> None:
        if refusal not in self._refusals:
            self._refusals.append(refusal)

    def _reject(self, each: _Handshake, reason: str = "") -> None:
        if reason:
            self._add_refusal(f"{each.name} ({reason})")
        self._handshakes.remove(each)
        self._selector.unregister(each.connection)
        each.connection.close()


def peer_process(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end of a Unix socket.

    The kernel provides them.
    """
    layout = struct.Struct("3i")
    process, user, _ = layout.unpack(
        connection.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, layout.size
        )
    )
    return process, user


def _listen(address: Address, reuse_port: bool) -> socket.socket:
    if not isinstance(address, str):
        return socket.create_server(
            address,
            family=socket.AF_INET6 if ":" in address[0] else socket.AF_INET,
            backlog=_BACKLOG,
            reuse_port=reuse_port,
        )
    with contextlib.ExitStack() as unfinished:
        listener = socket.socket(socket.AF_UNIX)
        unfinished.callback(listener.close)
        listener.bind(f"\0{address}")
        listener.listen(_BACKLOG)
        unfinished.pop_all()
    return listener


INTERFACE_VARIABLE = "TFDIST_INTERFACE"
PORTS_VARIABLE = "TFDIST_PORT_RANGE"

_SIOCGIFADDR = 0x8915
_GLOBAL_SCOPE = "00"
_SYSTEMS_CHOICE = range(1)


@dataclasses.dataclass(frozen=True)
class Listening:
    """Where a rank listens, as its environment says.

    Attributes:
        interface: name of a network interface, or numeric address, by which
            other ranks reach this one; empty for the host in `TF_CONFIG`.
        ports: range that the port is taken from; `range(1)` lets the system
            choose.
    """

    interface: str = ""
    ports: range = _SYSTEMS_CHOICE

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Listening:
        """Reads `TFDIST_INTERFACE` and `TFDIST_PORT_RANGE`.

        Args:
            environment: variables of the process.

        Raises:
            ValueError: the range is invalid.
        """
        text = environment.get(PORTS_VARIABLE, "")
        return cls(
            environment.get(INTERFACE_VARIABLE, ""),
            _ports(text) if text else _SYSTEMS_CHOICE,
        )

    def host(self, address: str) -> str:
        """Numeric address to listen on.

        Args:
            address: "host:port" of this rank in `TF_CONFIG`.

        Raises:
            ValueError: there is no such interface, or it has no address.
        """
        if not self.interface:
            return addresses_lib.bind_address(address)
        try:
            return str(ipaddress.ip_address(self.interface))
        except ValueError:
            return _address_of(self.interface)

    def open(self, address: str, numbers: Collection[int]) -> Listener:
        """Listens on the first free port of the range.

        Args:
            address: see `host`.
            numbers: see `Listener`.

        Raises:
            OSError: no port is free, or the address is not of this host.
            ValueError: see `host`.
        """
        host = self.host(address)
        for port in self.ports:
            try:
                return Listener((host, port), numbers)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
        raise OSError(
            errno.EADDRINUSE,
            f"all ports of {PORTS_VARIABLE}={self.ports[0]}-{self.ports[-1]} "
            "are taken",
        )


def _ports(text: str) -> range:
    first, _, last = text.partition("-")
    try:
        ports = range(int(first), int(last or first) + 1)
    except ValueError:
        ports = range(0)
    if not ports or ports[0] < 1 or ports[-1] > 65535:
        raise ValueError(
            f"{PORTS_VARIABLE} must be FIRST-LAST, within 1 to 65535, like "
            f"20000-20999. Received: {PORTS_VARIABLE}={text}"
        )
    return ports


def _address_of(interface: str) -> str:
    """The first address of a network interface, IPv4 if it has one."""
    names = [name for _, name in socket.if_nameindex()]
    if interface not in names:
        raise ValueError(
            f"{INTERFACE_VARIABLE}={interface} is neither an address nor a "
            f"network interface of this host, which has {', '.join(names)}."
        )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        request = struct.pack("256s", interface.encode())
        try:
            answer = fcntl.ioctl(query, _SIOCGIFADDR, request)
            return socket.inet_ntoa(answer[20:24])
        except OSError:
            pass  # it has no IPv4 address
    known = pathlib.Path("/proc/net/if_inet6")
    for line in known.read_text().splitlines() if known.exists() else ():
        number, _, _, scope, _, name = line.split()
        if name == interface and scope == _GLOBAL_SCOPE:
            return str(ipaddress.IPv6Address(bytes.fromhex(number)))
    raise ValueError(
        f"{INTERFACE_VARIABLE}={interface}: this interface has no address by "
        "which other hosts reach it."
    )
