# SPDX-License-Identifier: Apache-2.0
"""Whatever a peer sends, a rank ends with a result or a reason.

The peer is a pair of bare sockets. It knew the secret, so it may be broken
rather than hostile: nothing it sends may crash this process, write where it
should not, or be taken for a result.
"""

import random
import socket

import numpy as np
import pytest
import tensorflow as tf

from tests import fuzzing
from tests.bare_peer import HEADER
from tests.bare_peer import NUMBERS
from tests.bare_peer import Rank
from tests.bare_peer import good_header
from tests.bare_peer import pack


@pytest.fixture
def rank():
    """A rank of two, and the other's ends of its connections."""
    with Rank() as rank:
        yield rank


def test_a_good_message_is_taken(rank):
    """Also in pieces, and before it is wanted."""
    payload = np.ones(NUMBERS, np.float32).tobytes()
    expected = np.arange(NUMBERS) + 1
    message = pack(good_header(2)) + payload
    rank.peer[0].sendall(message)
    np.testing.assert_array_equal(rank.sum(), expected)
    for cut in (1, 100, 192, 200):
        call = good_header(4) | {"call": (1, 100, 192, 200).index(cut)}
        message = pack(call) + payload
        rank.peer[0].sendall(message[:cut])
        rank.peer[0].sendall(message[cut:])
        np.testing.assert_array_equal(rank.sum(tag=4), expected)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"magic": 1}, "message of another build"),
        ({"bytes": 1 << 63}, "message of another build"),
        ({"bytes": 1 << 43}, "no memory|sent 8796093022208 bytes"),
        ({"kind": 1}, "runs all_to_all 'sum'"),
        ({"kind": 77}, "runs unknown 'sum'"),
        ({"dtype": 2}, "double"),
        ({"dtype": -5}, "dtype -5"),
        ({"agreed": 24}, "24 bytes"),
        ({"shape": 0, "shapes": b"[1,5]"}, r"\[5\].*\[1,5\]"),
        ({"flags": 2}, "weighted"),
        ({"label": b"\xff" * 72}, "runs all_reduce"),
        ({"flags": 1, "bytes": 2001}, "disagree"),
        ({"bytes": 16}, "sent 16 bytes .*, expected 20"),
    ],
    ids=str,
)
def test_a_message_of_something_else_is_named(rank, change, error):
    header = good_header(2) | change
    rank.peer[0].sendall(pack(header) + bytes(min(header["bytes"], 4000)))
    with pytest.raises(tf.errors.OpError, match=error) as raised:
        rank.sum()
    assert "rank 1 (b:1)" in raised.value.message


def test_the_same_message_twice_is_named(rank):
    message = pack(good_header(8)) + bytes(4 * NUMBERS)
    rank.peer[0].sendall(2 * message)
    with pytest.raises(tf.errors.InternalError, match="twice"):
        rank.sum()


def test_control_frames_of_another_build_are_named(rank):
    rank.peer[1].sendall(b"x" * 1024)
    with pytest.raises(tf.errors.InternalError, match="control message"):
        rank.sum()


def damaged(generator):
    """A message with something wrong, or one for later."""
    header = good_header(2)
    kind = generator.randrange(4)
    if kind == 0:  # one for later
        header["tag"] = generator.randrange(3, 1 << 40)
        header["bytes"] = generator.randrange(100)
        return pack(header) + generator.randbytes(header["bytes"])
    message = bytearray(pack(header) + generator.randbytes(4 * NUMBERS))
    if kind == 1:
        for _ in range(generator.randint(1, 4)):
            place = generator.randrange(8 * HEADER.size)
            message[place // 8] ^= 1 << place % 8
    elif kind == 2:
        del message[generator.randrange(len(message)) :]
    else:
        message = bytearray(generator.randbytes(generator.randrange(1, 400)))
    return bytes(message)


@pytest.mark.parametrize("seed", range(4))
def test_damaged_messages_end_with_a_reason(seed):
    """10,000 messages over all; the connection then ends."""
    generator = random.Random(seed)
    for _ in range(fuzzing.inputs(10_000, parts=4 * 4)):
        with Rank() as rank:
            messages = b"".join(damaged(generator) for _ in range(4))
            control = generator.randbytes(generator.choice((0, 0, 7, 1024)))
            for end, data in zip(rank.peer, (messages, control), strict=True):
                try:
                    end.sendall(data)
                except OSError:  # it is known to be broken already
                    continue
                finally:
                    end.shutdown(socket.SHUT_WR)
            try:
                total = rank.sum()
            except tf.errors.OpError as error:
                assert error.message
            else:  # only a whole message is taken
                assert total.shape == (NUMBERS,)
