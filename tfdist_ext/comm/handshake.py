# SPDX-License-Identifier: Apache-2.0
"""Mutual authentication of two processes of a job, and their messages.

The secret comes from the environment; messages are JSON objects, one a line.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import hmac
import json
import os
import pathlib
import re
import socket
import stat
import struct
import time
from collections.abc import Callable
from collections.abc import Generator
from collections.abc import Mapping
from typing import Any

from tfdist_ext.version import VERSION

SECRET = "TFDIST_SECRET"
SECRET_FILE = "TFDIST_SECRET_FILE"
_LONGEST = 4096


def find_secret(environment: Mapping[str, str]) -> bytes:
    """The secret of this job, empty if none is given.

    Args:
        environment: with TFDIST_SECRET, the secret itself, or
            TFDIST_SECRET_FILE, a file whose text without surrounding white
            space it is.

    Raises:
        ValueError: the file cannot be read, is empty or has more than 4096
            bytes; or it is this user's, and others may read or change it.
    """
    if text := environment.get(SECRET):
        return text.encode()
    name = environment.get(SECRET_FILE)
    if not name:
        return b""
    try:
        with pathlib.Path(name).open("rb") as file:
            status = os.fstat(file.fileno())
            secret = file.read(_LONGEST + 1)
    except OSError as error:
        raise ValueError(
            f"{SECRET_FILE} names a file that cannot be read: {error}"
        ) from error
    # As ssh does: the files of others are theirs to protect.
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid == os.geteuid() and mode & 0o077:
        raise ValueError(
            f"{SECRET_FILE} must name a file that only its user can read and "
            f"write. Received: {name!r} with mode {mode:04o}. Run: chmod 600 "
            f"{name} (in Kubernetes set defaultMode: 0400)"
        )
    if not secret.strip() or len(secret) > _LONGEST:
        raise ValueError(
            f"{SECRET_FILE} must name a file of 1 to {_LONGEST} bytes. "
            f"Received: {name!r} of {len(secret)} bytes or more"
        )
    return secret.strip()


_MAGIC = b"tfdist\r\n"
_PROTOCOL = 2
_NONCE, _PROOF, _JOB = 32, 32, 16
_HELLO = struct.Struct(f"<8sHi{_JOB}s{_NONCE}s")
_CHALLENGE = struct.Struct(f"<8sHH{_NONCE}s")
_VERDICT = struct.Struct(f"<H{_PROOF}s")
_NO_PROOF = bytes(_PROOF)

# As `openssl rand -hex 16` prints, or longer: it cannot be guessed.
_STRONG = re.compile(rb"(?:[0-9a-f]{2}){16,}|(?:[0-9A-F]{2}){16,}")
# Costs an attacker 32 MiB and about 0.1 s for every guess.
_SCRYPT = {"n": 1 << 15, "r": 8, "p": 1, "maxmem": 1 << 26, "dklen": 32}

# What a side does next: bytes to send, and how many it then waits for.
Move = tuple[bytes, int]


class Verdict(enum.IntEnum):
    """What the listener thinks of whoever has connected."""

    WELCOME = 0
    OTHER_PROTOCOL = 1
    OTHER_JOB = 2
    TAKEN = 3
    WRONG_SECRET = 4
    UNEXPECTED = 5


class StrangerError(ConnectionError):
    """Whoever is at the other end does not speak this protocol."""


class RefusedError(ConnectionError):
    """One side does not take the other for one of its job.

    Attributes:
        verdict: why.
        number: that the connector gave.
    """

    def __init__(self, verdict: Verdict, number: int) -> None:
        super().__init__(verdict.name.lower().replace("_", " "))
        self.verdict = verdict
        self.number = number


@dataclasses.dataclass(frozen=True)
class Job:
    """What all processes that meet have in common.

    Attributes:
        name: of the job; whatever else must be equal everywhere is part of it.
        secret: that only processes of the job know; may be empty.
        salt: common to the jobs of one start, by which the same secret has
            another key in other starts.
    """

    name: str
    secret: bytes = b""
    salt: str = ""

    @property
    def digest(self) -> bytes:
        """Identifies name and build, 16 bytes."""
        text = f"{VERSION}\n{self.name}".encode()
        return hashlib.sha256(text).digest()[:_JOB]

    @property
    def key(self) -> bytes:
        """The key of proofs: the secret, or its scrypt if it may be guessed."""
        if not self.secret or _STRONG.fullmatch(self.secret):
            return self.secret
        return _scrypt(self.secret, self.salt.encode())

    def proof(
        self, who: bytes, number: int, theirs: bytes, ours: bytes
    ) -> bytes:
        """The proof of one side, 32 bytes.

        Args:
            who: b"connector" or b"listener", so that neither side's proof
                can be sent back as the other's.
            number: of the connector.
            theirs: the connector's nonce.
            ours: the listener's nonce.
        """
        message = who + struct.pack("<i", number) + self.digest + theirs + ours
        return hmac.digest(self.key, message, "sha256")


@functools.lru_cache(maxsize=64)
def _scrypt(secret: bytes, salt: bytes) -> bytes:
    return hashlib.scrypt(secret, salt=salt, **_SCRYPT)


def listen(
    job: Job, check: Callable[[int], Verdict]
) -> Generator[Move, bytes, int]:
    """The listener's side, without any socket: it may talk to many at once.

    Args:
        job: of the listener.
        check: what to think of a number.

    Yields:
        What to send, and how many bytes to read and send in here.

    Returns:
        The number of the connector, which knows the secret.

    Raises:
        StrangerError: it speaks no protocol of ours.
        RefusedError: it was told that it is not welcome.
    """
    magic, protocol, number, digest, theirs = _HELLO.unpack(
        (yield b"", _HELLO.size)
    )
    if magic != _MAGIC:
        raise StrangerError("it speaks another protocol")
    if protocol != _PROTOCOL:
        verdict = Verdict.OTHER_PROTOCOL
    elif digest != job.digest:
        verdict = Verdict.OTHER_JOB
    else:
        verdict = check(number)
    ours = os.urandom(_NONCE)
    challenge = _CHALLENGE.pack(_MAGIC, _PROTOCOL, verdict, ours)
    if verdict != Verdict.WELCOME:
        yield challenge, 0
        raise RefusedError(verdict, number)
    received = yield challenge, _PROOF
    expected = job.proof(b"connector", number, theirs, ours)
    if not hmac.compare_digest(received, expected):
        yield _VERDICT.pack(Verdict.WRONG_SECRET, _NO_PROOF), 0
        raise RefusedError(Verdict.WRONG_SECRET, number)
    verdict = check(number)  # another one may have come meanwhile
    proof = job.proof(b"listener", number, theirs, ours)
    yield _VERDICT.pack(verdict, proof), 0
    if verdict != Verdict.WELCOME:
        raise RefusedError(verdict, number)
    return int(number)


def connect(job: Job, number: int) -> Generator[Move, bytes, None]:
    """The connector's side, without any socket.

    Args:
        job: of the connector.
        number: by which the listener shall know it.

    Yields:
        What to send, and how many bytes to read and send in here.

    Raises:
        StrangerError: the listener speaks no protocol of ours.
        RefusedError: the listener refuses, or does not know the secret.
    """
    ours = os.urandom(_NONCE)
    hello = _HELLO.pack(_MAGIC, _PROTOCOL, number, job.digest, ours)
    magic, protocol, verdict, theirs = _CHALLENGE.unpack(
        (yield hello, _CHALLENGE.size)
    )
    if magic != _MAGIC:
        raise StrangerError("it speaks another protocol")
    if protocol != _PROTOCOL:
        raise RefusedError(Verdict.OTHER_PROTOCOL, number)
    _raise_unless_welcome(verdict, number)
    proof = job.proof(b"connector", number, ours, theirs)
    verdict, received = _VERDICT.unpack((yield proof, _VERDICT.size))
    _raise_unless_welcome(verdict, number)
    expected = job.proof(b"listener", number, ours, theirs)
    if not hmac.compare_digest(received, expected):
        raise RefusedError(Verdict.WRONG_SECRET, number)


def _raise_unless_welcome(verdict: int, number: int) -> None:
    try:
        found = Verdict(verdict)
    except ValueError:
        raise StrangerError(f"it gives the verdict {verdict}") from None
    if found != Verdict.WELCOME:
        raise RefusedError(found, number)


_LONGEST_MESSAGE = 1 << 24
# When TCP takes a silent host for lost.
_IDLE_SECONDS, _PROBE_SECONDS, _LOST_SECONDS = 3, 2, 9


class Link:
    """One end of such a connection.

    Args:
        connection: a socket, which the link owns from now on.
        name: of the other end, for errors.
    """

    def __init__(self, connection: socket.socket, name: str) -> None:
        self.name = name
        self._connection = connection
        self._received = bytearray()
        self.watch(True)

    def watch(self, on: bool) -> None:
        """Lets the system end the connection once the other host is silent.

        Args:
            on: whether to watch; a host that is lost is then noticed within
                9 s, and an interruption of that length ends the connection.
        """
        tcp = {
            socket.TCP_KEEPIDLE: _IDLE_SECONDS,
            socket.TCP_KEEPINTVL: _PROBE_SECONDS,
            socket.TCP_USER_TIMEOUT: 1000 * _LOST_SECONDS if on else 0,
        }
        if self._connection.family == socket.AF_UNIX:
            return
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, on)
        for option, value in tcp.items():
            self._connection.setsockopt(socket.IPPROTO_TCP, option, value)

    @property
    def has_message(self) -> bool:
        """Whether a whole message has been read, but not been taken."""
        return b"\n" in self._received

    def fileno(self) -> int:
        return self._connection.fileno()

    def own_host(self) -> str:
        """The address of this host on this connection; "" for Unix sockets."""
        if self._connection.family == socket.AF_UNIX:
            return ""
        return str(self._connection.getsockname()[0])

    def close(self) -> None:
        self._connection.close()

    def send(self, message: dict[str, Any], timeout: float) -> None:
        """Sends a message within some seconds; raises OSError if it cannot."""
        self._connection.settimeout(timeout)
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout: float) -> dict[str, Any] | None:
        """Returns the next message, None if none came in time.

        Args:
            timeout: seconds.

        Raises:
            ConnectionError: the other end is gone.
            ValueError: what came is not a message.
        """
        deadline = time.monotonic() + timeout
        while (end := self._received.find(b"\n")) < 0:
            # A timeout of 0 would make the socket non-blocking.
            left = max(deadline - time.monotonic(), 1e-3)
            self._connection.settimeout(left)
            try:
                data = self._connection.recv(1 << 16)
            except TimeoutError:
                if time.monotonic() >= deadline:
                    return None
                continue
            if not data:
                raise ConnectionError(f"{self.name} closed its connection")
            self._received += data
            if len(self._received) > _LONGEST_MESSAGE:
                raise ValueError(f"{self.name} sent too long a message")
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        try:
            message = json.loads(line)
        except RecursionError as error:
            raise ValueError(f"{self.name} sent {line[:100]!r}") from error
        if not isinstance(message, dict):
            raise ValueError(f"{self.name} sent {line[:100]!r}")
        return message
