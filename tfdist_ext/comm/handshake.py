# SPDX-License-Identifier: Apache-2.0
"""Mutual authentication of two processes of a job, and their messages.

The secret comes from the environment. Messages are JSON objects, one per line.
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
from typing import TypeAlias

from tfdist_ext.version import VERSION

SECRET = "TFDIST_SECRET"
SECRET_FILE = "TFDIST_SECRET_FILE"
_LONGEST = 4096


def find_secret(environment: Mapping[str, str]) -> bytes:
    """The secret of this job, empty if none is set.

    Args:
        environment: variables with TFDIST_SECRET, the secret itself, or
            TFDIST_SECRET_FILE, the path of a file with the secret; white space
            around it is ignored.

    Raises:
        ValueError: the file cannot be read, is empty or has more than 4096
            bytes; or it belongs to this user, and others may read or change it.
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
    # As ssh does, only the mode of this user's own file is checked.
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

# Matches secrets of the form that `openssl rand -hex 16` prints, or longer:
# they cannot be guessed.
_STRONG = re.compile(rb"(?:[0-9a-f]{2}){16,}|(?:[0-9A-F]{2}){16,}")
# Each guess costs an attacker 32 MiB and about 0.1 s.
_SCRYPT = {"n": 1 << 15, "r": 8, "p": 1, "maxmem": 1 << 26, "dklen": 32}

# Next move of a side: bytes to send, and number of bytes to receive then.
Move = tuple[bytes, int]


class Verdict(enum.IntEnum):
    """The listener's decision on a process that has connected."""

    ACCEPTED = 0
    OTHER_PROTOCOL = 1
    OTHER_JOB = 2
    TAKEN = 3
    WRONG_SECRET = 4
    UNEXPECTED = 5


class ProtocolError(ConnectionError):
    """The other end does not use this protocol."""


class RefusedError(ConnectionError):
    """One side does not accept the other as a process of its job.

    Attributes:
        verdict: reason.
        number: number that the connector sent.
    """

    def __init__(self, verdict: Verdict, number: int) -> None:
        super().__init__(verdict.name.lower().replace("_", " "))
        self.verdict = verdict
        self.number = number


@dataclasses.dataclass(frozen=True)
class Job:
    """Values that all processes of a job share.

    Attributes:
        name: name of the job; all else that must be equal is part of it.
        secret: secret that only processes of the job know; may be empty.
        salt: salt of the jobs of one start; the same secret has another key in
            another start.
    """

    name: str
    secret: bytes = b""
    salt: str = ""

    @property
    def digest(self) -> bytes:
        """Identifies the name and the version of the package, 16 bytes."""
        text = f"{VERSION}\n{self.name}".encode()
        return hashlib.sha256(text).digest()[:_JOB]

    @property
    def key(self) -> bytes:
        """The key of proofs: the secret, or its scrypt if it is guessable."""
        if not self.secret or _STRONG.fullmatch(self.secret):
            return self.secret
        return _scrypt(self.secret, self.salt.encode())

    def proof(
        self, who: bytes, number: int, theirs: bytes, ours: bytes
    ) -> bytes:
        """The proof of one side, 32 bytes.

        Args:
            who: b"connector" or b"listener", so that the proof of one side
                cannot be sent back as the proof of the other.
            number: number of the connector.
            theirs: nonce of the connector.
            ours: nonce of the listener.
        """
        message = who + struct.pack("<i", number) + self.digest + theirs + ours
        return hmac.digest(self.key, message, "sha256")


@functools.lru_cache(maxsize=64)
def _scrypt(secret: bytes, salt: bytes) -> bytes:
    return hashlib.scrypt(secret, salt=salt, **_SCRYPT)


def listen(
    job: Job, check: Callable[[int], Verdict]
) -> Generator[Move, bytes, int]:
    """The listener's side, without a socket, so many may run at once.

    Args:
        job: job of the listener.
        check: returns the verdict on a number.

    Yields:
        Bytes to send, and the number of bytes to receive and send in here.

    Returns:
        The number of the connector, which knows the secret.

    Raises:
        ProtocolError: the connector does not use this protocol.
        RefusedError: the connector was rejected.
    """
    magic, protocol, number, digest, theirs = _HELLO.unpack(
        (yield b"", _HELLO.size)
    )
    if magic != _MAGIC:
        raise ProtocolError("it speaks another protocol")
    if protocol != _PROTOCOL:
        verdict = Verdict.OTHER_PROTOCOL
    elif digest != job.digest:
        verdict = Verdict.OTHER_JOB
    else:
        verdict = check(number)
    ours = os.urandom(_NONCE)
    challenge = _CHALLENGE.pack(_MAGIC, _PROTOCOL, verdict, ours)
    if verdict != Verdict.ACCEPTED:
        yield challenge, 0
        raise RefusedError(verdict, number)
    received = yield challenge, _PROOF
    expected = job.proof(b"connector", number, theirs, ours)
    if not hmac.compare_digest(received, expected):
        yield _VERDICT.pack(Verdict.WRONG_SECRET, _NO_PROOF), 0
        raise RefusedError(Verdict.WRONG_SECRET, number)
    verdict = check(number)  # another process may have connected since
    proof = job.proof(b"listener", number, theirs, ours)
    yield _VERDICT.pack(verdict, proof), 0
    if verdict != Verdict.ACCEPTED:
        raise RefusedError(verdict, number)
    return int(number)


def connect(job: Job, number: int) -> Generator[Move, bytes, None]:
    """The connector's side, without a socket.

    Args:
        job: job of the connector.
        number: number of the connector.

    Yields:
        Bytes to send, and the number of bytes to receive and send in here.

    Raises:
        ProtocolError: the listener does not use this protocol.
        RefusedError: the listener rejects this process, or does not know the
            secret.
    """
    ours = os.urandom(_NONCE)
    hello = _HELLO.pack(_MAGIC, _PROTOCOL, number, job.digest, ours)
    magic, protocol, verdict, theirs = _CHALLENGE.unpack(
        (yield hello, _CHALLENGE.size)
    )
    if magic != _MAGIC:
        raise ProtocolError("it speaks another protocol")
    if protocol != _PROTOCOL:
        raise RefusedError(Verdict.OTHER_PROTOCOL, number)
    _raise_unless_accepted(verdict, number)
    proof = job.proof(b"connector", number, ours, theirs)
    verdict, received = _VERDICT.unpack((yield proof, _VERDICT.size))
    _raise_unless_accepted(verdict, number)
    expected = job.proof(b"listener", number, ours, theirs)
    if not hmac.compare_digest(received, expected):
        raise RefusedError(Verdict.WRONG_SECRET, number)


def _raise_unless_accepted(verdict: int, number: int) -> None:
    try:
        found = Verdict(verdict)
    except ValueError:
        raise ProtocolError(f"it sent the unknown verdict {verdict}") from None
    if found != Verdict.ACCEPTED:
        raise RefusedError(found, number)


_LONGEST_MESSAGE = 1 << 24
# Times after which TCP considers a silent host lost.
_IDLE_SECONDS, _PROBE_SECONDS, _LOST_SECONDS = 3, 2, 9

# An object of JSON.
Message: TypeAlias = dict[str, Any]


class Link:
    """One end of an authenticated connection, for messages.

    Args:
        connection: socket, which the link owns from now on.
        name: name of the other end, for errors.
    """

    def __init__(self, connection: socket.socket, name: str) -> None:
        self.name = name
        self._connection = connection
        self._received = bytearray()
        self.watch(True)

    def watch(self, on: bool) -> None:
        """Makes the system end the connection if the other host is silent.

        Args:
            on: whether to do so; a lost host is then noticed within 9 s, and an
                interruption of that length ends the connection.
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
        """Whether a complete message has been received, but not returned."""
        return b"\n" in self._received

    def fileno(self) -> int:
        return self._connection.fileno()

    def own_host(self) -> str:
        """This host's address on the connection; "" for Unix sockets."""
        if self._connection.family == socket.AF_UNIX:
            return ""
        return str(self._connection.getsockname()[0])

    def close(self) -> None:
        self._connection.close()

    def send(self, message: dict[str, object], timeout: float) -> None:
        """Sends a message; raises OSError if it fails or times out."""
        self._connection.settimeout(timeout)
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout: float) -> Message | None:
        """Returns the next message, None if none came in time.

        Args:
            timeout: seconds to wait.

        Raises:
            ConnectionError: the other end has closed the connection.
            ValueError: the received bytes are not a message.
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
