# SPDX-License-Identifier: Apache-2.0
"""Two processes prove to each other that they know the secret of their job.

    connector -> listener   hello      magic, protocol, number, job, nonce
    listener -> connector   challenge  magic, protocol, verdict, nonce, proof
    connector -> listener   proof
    listener -> connector   verdict

All have a fixed length, so neither side reads more than it expects. A proof is
the HMAC-SHA256 (RFC 2104), keyed with the secret, of who gives it, the job, the
connector's number and both nonces: the three passes of ISO/IEC 9798-4. Nothing
is encrypted, then or later. Without a secret the key is empty, and the
handshake only keeps out what does not speak this protocol.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import hmac
import os
import struct
from collections.abc import Callable
from collections.abc import Generator

from tfdist_ext.version import VERSION

_MAGIC = b"tfdist\r\n"
_PROTOCOL = 1
_NONCE, _PROOF, _JOB = 32, 32, 16
_HELLO = struct.Struct(f"<8sHi{_JOB}s{_NONCE}s")
_CHALLENGE = struct.Struct(f"<8sHH{_NONCE}s{_PROOF}s")
_VERDICT = struct.Struct("<H")

# What a side does next: bytes to send, and how many it then waits for.
Turn = tuple[bytes, int]


class Verdict(enum.IntEnum):
    """What the listener thinks of whoever has connected."""

    WELCOME = 0
    OTHER_PROTOCOL = 1
    OTHER_JOB = 2
    TAKEN = 3
    WRONG_SECRET = 4


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
    """

    name: str
    secret: bytes = b""

    @property
    def digest(self) -> bytes:
        """Identifies name and build, 16 bytes."""
        text = f"{VERSION}\n{self.name}".encode()
        return hashlib.sha256(text).digest()[:_JOB]

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
        return hmac.digest(self.secret, message, "sha256")


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
    proof = job.proof(b"listener", number, theirs, ours)
    challenge = _CHALLENGE.pack(_MAGIC, _PROTOCOL, verdict, ours, proof)
    if verdict != Verdict.WELCOME:
        yield challenge, 0
        raise RefusedError(verdict, number)
    received = yield challenge, _PROOF
    expected = job.proof(b"connector", number, theirs, ours)
    if not hmac.compare_digest(received, expected):
        verdict = Verdict.WRONG_SECRET
    else:
        verdict = check(number)  # another one may have come meanwhile
    yield _VERDICT.pack(verdict), 0
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
    magic, protocol, verdict, theirs, proof = _CHALLENGE.unpack(
        (yield hello, _CHALLENGE.size)
    )
    if magic != _MAGIC:
        raise StrangerError("it speaks another protocol")
    if protocol != _PROTOCOL:
        raise RefusedError(Verdict.OTHER_PROTOCOL, number)
    _raise_unless_welcome(verdict, number)
    expected = job.proof(b"listener", number, ours, theirs)
    if not hmac.compare_digest(proof, expected):
        raise RefusedError(Verdict.WRONG_SECRET, number)
    proof = job.proof(b"connector", number, ours, theirs)
    (verdict,) = _VERDICT.unpack((yield proof, _VERDICT.size))
    _raise_unless_welcome(verdict, number)


def _raise_unless_welcome(verdict: int, number: int) -> None:
    try:
        found = Verdict(verdict)
    except ValueError:
        raise StrangerError(f"it gives the verdict {verdict}") from None
    if found != Verdict.WELCOME:
        raise RefusedError(found, number)
