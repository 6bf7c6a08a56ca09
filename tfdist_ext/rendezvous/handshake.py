# SPDX-License-Identifier: Apache-2.0
"""Two processes prove to each other that they know the secret of their job.

    connector -> listener   hello      magic, protocol, number, job, nonce
    listener -> connector   challenge  magic, protocol, verdict, nonce
    connector -> listener   proof
    listener -> connector   verdict, proof

All messages have a fixed length, so neither side reads more than it expects. A
proof is the HMAC-SHA256 (RFC 2104), keyed with the secret, of its side, the
job, the connector's number and both nonces: the three passes of ISO/IEC 9798-4.
The job names the listener and the addresses of all, and the number the
connector and the kind of connection, so a relay cannot lead a connection to
another process than the intended one. The connector proves first: whoever
connects without the secret gets nothing to guess it from. Nothing is encrypted,
then or later. Without a secret the key is empty, and the handshake only keeps
out what does not speak this protocol.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import hmac
import os
import re
import struct
from collections.abc import Callable
from collections.abc import Generator

from tfdist_ext.version import VERSION

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
Turn = tuple[bytes, int]


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
        secret: that strangers do not know; may be empty.
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
) -> Generator[Turn, bytes, int]:
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


def connect(job: Job, number: int) -> Generator[Turn, bytes, None]:
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
