# SPDX-License-Identifier: Apache-2.0
"""Connections between ranks, and the memory that ranks of one host share."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import secrets
import select
import socket
import time
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import NamedTuple

from tfdist_ext.comm.listener import peer_process

# Bytes of one ring buffer, a power of two. It should fit into the cache of a
# core.
_LARGEST_RING, _SMALLEST_RING = 1 << 20, 1 << 14
# Most bytes of all rings that one rank writes, unless the rings have the
# smallest size. The memory used on a host then grows with its ranks, not with
# their square.
_RINGS_OF_RANK = 8 << 20
_PAGE = 4096
_TOKEN_BYTES = 32
_FILES = 2
_SEND_SECONDS = 2.0  # for sending files to a rank of this host
_CHECK_SECONDS = 0.2
# Seconds to wait until a rank of this host accepts; it may be connecting to
# others itself.
_QUEUE_SECONDS = 10.0
_MOST_WAITING = 1024

_F_ADD_SEALS = 1033
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 1, 2, 4


@dataclasses.dataclass(frozen=True)
class SharedMemory:
    """File descriptors of one rank for the memory shared with another.

    Attributes:
        memory: descriptor of the memory with two ring buffers.
        bell: this rank's end of a pair of Unix sockets; a byte wakes the rank
            at the other end.
    """

    memory: int
    bell: int

    def close(self) -> None:
        """Closes the descriptors."""
        for descriptor in (self.memory, self.bell):
            os.close(descriptor)


def ring_bytes(ranks: int) -> int:
    """Size of one ring buffer in bytes; a pair of ranks has two.

    Args:
        ranks: number of ranks on the host.

    Returns:
        A power of two.
    """
    most = _RINGS_OF_RANK // max(ranks - 1, 1)
    size = 1 << most.bit_length() - 1
    return max(min(size, _LARGEST_RING), _SMALLEST_RING)


def make_pair(ring: int = _LARGEST_RING) -> tuple[SharedMemory, SharedMemory]:
    """Creates memory for two ranks; returns the descriptors of each.

    Args:
        ring: bytes of one of its two ring buffers, a power of two.

    Raises:
        OSError: there is too little memory, or too many files are open.
    """
    with contextlib.ExitStack() as unfinished:

        def keep(descriptor: int) -> int:
            unfinished.callback(os.close, descriptor)
            return descriptor

        size = 2 * (_PAGE + ring)
        memory = keep(
            os.memfd_create("tfdist", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        )
        # A write to memory that is not allocated might kill the process.
        os.posix_fallocate(memory, 0, size)
        seals = _F_SEAL_SEAL | _F_SEAL_SHRINK | _F_SEAL_GROW
        fcntl.fcntl(memory, _F_ADD_SEALS, seals)
        copy = keep(os.dup(memory))
        bells = [keep(each.detach()) for each in socket.socketpair()]
        unfinished.pop_all()
    return SharedMemory(memory, bells[0]), SharedMemory(copy, bells[1])


class Neighbours:
    """Shares memory with ranks of this host, once, when all connect.

    Attributes:
        name: name by which others connect to this rank; empty if it shares no
            memory.
        failure: why memory could not be shared with a rank; empty if it could.
    """

    def __init__(self, wanted: bool = True) -> None:
        """Listens on an abstract Unix socket.

        Args:
            wanted: whether this rank shares memory at all.
        """
        self.name = ""
        self.failure = ""
        self._listener: socket.socket | None = None
        if not wanted or not hasattr(os, "memfd_create"):
            return
        with contextlib.suppress(OSError):
            name = f"tfdist-{secrets.token_hex(16)}"
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(f"\0{name}")
            self._listener.listen(128)
            self._listener.settimeout(0)
            self.name = name

    def close(self) -> None:
        """Stops listening."""
        if self._listener is not None:
            self._listener.close()

    def __enter__(self) -> Neighbours:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def share(
        self,
        earlier: Mapping[int, tuple[socket.socket, str]],
        later: Mapping[int, socket.socket],
        deadline: float,
        check: Callable[[], None] | None = None,
        ring: int = _LARGEST_RING,
    ) -> dict[int, SharedMemory]:
        """Shares memory with the ranks of this host.

        Args:
            earlier: connection and name of each earlier rank, by rank.
            later: connection of each later rank, by rank.
            deadline: time limit, as of `time.monotonic()`.
            check: called while this waits; may raise.
            ring: see `make_pair`.

        Returns:
            The shared memory, by rank.

        Raises:
            OSError: a rank has ended, or does not answer in time.
        """
        shared: dict[int, SharedMemory] = {}
        try:
            for rank, (connection, name) in earlier.items():
                made = self._offer(connection, name, ring)
                if made is not None:
                    shared[rank] = made
            self._accept(later, shared, deadline, check)
            for rank in shared.keys() & earlier.keys():
                if _read(earlier[rank][0], 1, deadline, check) != b"Y":
                    shared.pop(rank).close()
        except BaseException:
            for made in shared.values():
                made.close()
            raise
        return shared

    def _offer(
        self, connection: socket.socket, name: str, ring: int
    ) -> SharedMemory | None:
        token = secrets.token_bytes(_TOKEN_BYTES)
        try:
            if not self.name or not name:
                raise OSError("one of the two ranks does not share memory")
            with socket.socket(socket.AF_UNIX) as there:
                there.settimeout(_SEND_SECONDS)
                _connect(there, f"\0{name}")
                theirs, ours = make_pair(ring)
                with contextlib.closing(theirs):
                    files = [theirs.memory, theirs.bell]
                    try:
                        socket.send_fds(there, [token], files)
                    except OSError:
                        ours.close()
                        raise
        except OSError as error:
            self.failure = str(error)
            connection.sendall(b"T" + token)
            return None
        connection.sendall(b"S" + token)
        return ours

    def _accept(
        self,
        later: Mapping[int, socket.socket],
        shared: dict[int, SharedMemory],
        deadline: float,
        check: Callable[[], None] | None,
    ) -> None:
        """Adds to `shared` the memory that later ranks of this host offer."""
        offers = {}
        accepted: list[socket.socket] = []
        for rank, connection in later.items():
            self._accept_until_readable(accepted, connection, deadline, check)
            offer = _read(connection, 1 + _TOKEN_BYTES, deadline, check)
            if offer[:1] == b"S":
                offers[offer[1:]] = rank
        missing = dict(offers)
        # A rank connects and sends its files before it sends its token.
        while missing and self._listener is not None:
            if not accepted:
                if not self._accept_one(accepted):
                    break
                continue
            token, files = _receive(accepted.pop(0))
            if token in missing and len(files) == _FILES:
                shared[missing.pop(token)] = SharedMemory(*files)
            else:  # not from a rank that has sent its token
                for descriptor in files:
                    os.close(descriptor)
        for peer in accepted:
            peer.close()
        for rank in offers.values():
            later[rank].sendall(b"Y" if rank in shared else b"N")

    def _accept_until_readable(
        self,
        accepted: list[socket.socket],
        connection: socket.socket,
        deadline: float,
        check: Callable[[], None] | None,
    ) -> None:
        """Accepts peers until the connection has something to read.

        Otherwise, processes that connect and send nothing could fill the queue.
        """
        if self._listener is None:
            return
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        poll.register(self._listener, select.POLLIN)
        while (left := deadline - time.monotonic()) > 0:
            if check is not None:
                check()
            ready = dict(poll.poll(1e3 * min(left, _CHECK_SECONDS)))
            if self._listener.fileno() in ready:
                self._accept_one(accepted)
            if connection.fileno() in ready:
                return

    def _accept_one(self, accepted: list[socket.socket]) -> bool:
        """Accepts a waiting peer, if any; rejects those of other users."""
        assert self._listener is not None
        try:
            peer, _ = self._listener.accept()
        except OSError:
            return False
        _, user = peer_process(peer)
        if user != os.geteuid():
            peer.close()
            return True
        accepted.append(peer)
        if len(accepted) > _MOST_WAITING:
            accepted.pop(0).close()
        return True


def _connect(there: socket.socket, name: str) -> None:
    """Connects; waits while the other end's queue is full."""
    deadline = time.monotonic() + _QUEUE_SECONDS
    while True:
        try:
            return there.connect(name)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.01)


def _receive(peer: socket.socket) -> tuple[bytes, list[int]]:
    """Receives a token and files; empty if they have not arrived."""
    with peer:
        peer.setblocking(False)
        try:
            token, files, _, _ = socket.recv_fds(peer, _TOKEN_BYTES, _FILES)
        except OSError:
            return b"", []
        return token, list(files)


def _read(
    connection: socket.socket,
    size: int,
    deadline: float,
    check: Callable[[], None] | None,
) -> bytes:
    data = b""
    try:
        while len(data) < size:
            if check is not None:
                check()
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("it does not answer")
            connection.settimeout(min(left, _CHECK_SECONDS))
            try:
                part = connection.recv(size - len(data))
            except TimeoutError:
                continue
            if not part:
                raise ConnectionError("it has ended")
            data += part
    finally:
        connection.settimeout(None)
    return data


BUSY_POLL_VARIABLE = "TFDIST_BUSY_POLL"
_SO_BUSY_POLL = 46  # Linux; Python has no name for it


class Connection(NamedTuple):
    """This rank's ends of its connections to another rank.

    Attributes:
        messages: socket for the messages of exchanges.
        control: socket for everything else.
        shared: shared memory, used for the messages instead; None between two
            hosts.
    """

    messages: socket.socket
    control: socket.socket
    shared: SharedMemory | None = None


def poll_busily(
    connections: Sequence[Connection | None], environment: Mapping[str, str]
) -> None:
    """Makes the system poll for messages for some time before it waits.

    Args:
        connections: connections by rank.
        environment: variables; `TFDIST_BUSY_POLL` sets the microseconds, by
            default 0.

    Raises:
        ValueError: the variable is no number, or the system does not allow it.
    """
    text = environment.get(BUSY_POLL_VARIABLE) or "0"
    if not text.isdecimal():
        raise ValueError(
            f"{BUSY_POLL_VARIABLE} must be a number of microseconds. "
            f"Received: {BUSY_POLL_VARIABLE}={text}"
        )
    for each in connections if int(text) else ():
        if each is None:
            continue
        try:
            each.messages.setsockopt(
                socket.SOL_SOCKET, _SO_BUSY_POLL, int(text)
            )
        except (OSError, OverflowError) as error:
            raise ValueError(
                f"{BUSY_POLL_VARIABLE}={text}: the system does not allow it "
                f"({error}). It needs the capability CAP_NET_ADMIN, or a "
                "number of at most `sysctl net.core.busy_read`."
            ) from error
