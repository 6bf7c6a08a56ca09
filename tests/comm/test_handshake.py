# SPDX-License-Identifier: Apache-2.0
"""Who knows the secret gets in, and nobody else, whatever is sent."""

import random
import struct

import pytest

from tests import fuzzing
from tfdist_ext.comm import handshake
from tfdist_ext.comm.handshake import Job
from tfdist_ext.comm.handshake import ProtocolError
from tfdist_ext.comm.handshake import RefusedError
from tfdist_ext.comm.handshake import Verdict

JOB = Job("ranks a:1 b:1", b"secret")


def welcome(number):
    return Verdict.ACCEPTED if number == 1 else Verdict.TAKEN


def step(side, message):
    """What a side sends next, and how it has ended, if it has."""
    try:
        return side.send(message)[0], None
    except (StopIteration, ConnectionError) as end:
        return b"", end


def talk(listener, connector):
    """Lets both talk until both have ended; returns how."""
    answer, listened, connected = next(connector)[0], None, None
    next(listener)
    for _ in range(4):
        answer, listened = step(listener, answer)
        if listened is None and listener.gi_frame is not None:
            message, connected = step(connector, answer)
            if connected is not None:  # let the listener end as well
                _, listened = step(listener, b"")
                return listened, connected
            answer = message
    raise AssertionError("they talk for ever")


def test_both_know_the_secret():
    listened, connected = talk(
        handshake.listen(JOB, welcome), handshake.connect(JOB, 1)
    )
    assert isinstance(listened, StopIteration) and listened.value == 1
    assert isinstance(connected, StopIteration)


@pytest.mark.parametrize(
    ("theirs", "number", "verdict"),
    [
        (Job(JOB.name, b"guess"), 1, Verdict.WRONG_SECRET),
        (Job(JOB.name, b""), 1, Verdict.WRONG_SECRET),
        (Job("ranks a:1 c:1", JOB.secret), 1, Verdict.OTHER_JOB),
        (JOB, 2, Verdict.TAKEN),
        (JOB, -1, Verdict.TAKEN),
    ],
)
def test_who_is_refused_learns_why(theirs, number, verdict):
    listened, connected = talk(
        handshake.listen(JOB, welcome), handshake.connect(theirs, number)
    )
    assert isinstance(connected, RefusedError)
    assert connected.verdict == verdict
    assert not isinstance(listened, StopIteration)


def test_a_listener_without_the_secret_is_refused():
    _, connected = talk(
        handshake.listen(Job(JOB.name, b"guess"), welcome),
        handshake.connect(JOB, 1),
    )
    assert isinstance(connected, RefusedError)
    assert connected.verdict == Verdict.WRONG_SECRET


def test_a_number_taken_during_the_handshake_is_refused():
    verdicts = iter([Verdict.ACCEPTED, Verdict.TAKEN])
    listened, connected = talk(
        handshake.listen(JOB, lambda _: next(verdicts)),
        handshake.connect(JOB, 1),
    )
    assert connected.verdict == Verdict.TAKEN
    assert listened.verdict == Verdict.TAKEN


def test_a_proof_does_not_serve_twice_nor_for_the_other_side():
    """What was overheard proves nothing in another handshake."""
    proofs = set()
    for _ in range(2):
        connector = handshake.connect(JOB, 1)
        listener = handshake.listen(JOB, welcome)
        next(listener)
        challenge, _ = listener.send(next(connector)[0])
        proof = connector.send(challenge)[0]
        proofs |= {proof, listener.send(proof)[0][-32:]}
    assert len(proofs) == 4


def test_the_listener_proves_nothing_to_who_does_not_know_the_secret():
    """Nobody gets a text of which only the secret has to be guessed."""
    listener = handshake.listen(JOB, welcome)
    next(listener)
    peer = handshake.connect(Job(JOB.name, b"guess"), 1)
    challenge, _ = listener.send(next(peer)[0])
    verdict, _ = listener.send(peer.send(challenge)[0])
    assert verdict == struct.pack("<H", Verdict.WRONG_SECRET) + bytes(32)
    # It holds a nonce, and nothing else that is not known.
    again = handshake.listen(JOB, welcome)
    next(again)
    hello = next(handshake.connect(Job(JOB.name, b"guess"), 1))[0]
    assert challenge[:-32] == again.send(hello)[0][:-32]


@pytest.mark.parametrize(
    ("secret", "is_strong"),
    [
        (b"sunshine1", False),
        (b"a long sentence is not a number of 128 bits", False),
        (b"0123456789abcdef", False),
        (b"0123456789abcdef" * 2, True),
        (b"0123456789ABCDEF" * 4, True),
    ],
)
def test_a_secret_that_may_be_guessed_is_stretched(secret, is_strong):
    key = Job("ranks", secret, "a:1 b:1").key
    assert (key == secret) == is_strong
    assert key == Job("connections", secret, "a:1 b:1").key
    if not is_strong:  # what was computed for one start serves no other
        assert key != Job("ranks", secret, "c:1 d:1").key
    assert Job("ranks").key == b""


def fuzz(random_bytes, good):
    """A message of the right length: random, or a good one with bits off."""
    if random_bytes.random() < 0.5:
        return random_bytes.randbytes(len(good))
    message = bytearray(good)
    for _ in range(random_bytes.randint(1, 8)):
        place = random_bytes.randrange(8 * len(message))
        message[place // 8] ^= 1 << place % 8
    return bytes(message)


@pytest.mark.parametrize("seed", range(4))
def test_no_damaged_message_gets_in(seed):
    """10,000 in all, in every place of the handshake."""
    generator = random.Random(seed)
    for i in range(fuzzing.inputs(10_000, parts=4)):
        connector = handshake.connect(JOB, 1)
        listener = handshake.listen(JOB, welcome)
        next(listener)
        hello = next(connector)[0]
        try:
            if i % 4 == 0:
                damaged = fuzz(generator, hello)
                if damaged == hello:
                    continue
                challenge, _ = listener.send(damaged)
                # A nonce may be any: the proof is then of another.
                proof, _ = connector.send(challenge)
                listener.send(proof)
                next(listener)
            elif i % 4 == 1:
                challenge, _ = listener.send(hello)
                damaged = fuzz(generator, challenge)
                good = bytes(len(challenge))
                proof, _ = connector.send(
                    damaged if damaged != challenge else good
                )
                # A nonce may be any: the proof is then of another.
                listener.send(proof)
                next(listener)
            elif i % 4 == 2:
                challenge, _ = listener.send(hello)
                verdict, _ = listener.send(connector.send(challenge)[0])
                damaged = fuzz(generator, verdict)
                connector.send(
                    damaged if damaged != verdict else bytes(len(verdict))
                )
                raise AssertionError("the connector has not noticed")
            else:
                challenge, _ = listener.send(hello)
                proof = connector.send(challenge)[0]
                damaged = fuzz(generator, proof)
                listener.send(damaged if damaged != proof else bytes(32))
                next(listener)
            raise AssertionError(f"let in after {i}")
        except (RefusedError, ProtocolError):
            pass
        except StopIteration:
            raise AssertionError(f"let in after {i}") from None
