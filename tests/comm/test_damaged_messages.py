# SPDX-License-Identifier: Apache-2.0
"""Whatever a peer sends, a rank ends with a result or a reason.

The peer is a pair of bare sockets. It knew the secret, so it may be broken
rather than hostile: nothing it sends may crash this process, write where it
should not, or be taken for a result.
"""

import contextlib
import random
import socket
import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from tests import fuzzing
from tests.bare_peer import ABORT
from tests.bare_peer import HEADER
from tests.bare_peer import INSERT
from tests.bare_peer import INSERTED
from tests.bare_peer import LEAVE
from tests.bare_peer import NUMBERS
from tests.bare_peer import PING
from tests.bare_peer import VALUE
from tests.bare_peer import Rank
from tests.bare_peer import frame
from tests.bare_peer import gather_header
from tests.bare_peer import good_header
from tests.bare_peer import pack
from tests.bare_peer import read_frames


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
        ({"magic": 1}, "unknown header.*same version"),
        ({"bytes": 1 << 63}, "unknown header.*same version"),
        ({"bytes": 1 << 43}, "bytes that this rank has not asked for yet"),
        ({"kind": 1}, "runs all_to_all 'sum'"),
        ({"kind": 77}, "runs unknown 'sum'"),
        ({"dtype": 2}, "double"),
        ({"dtype": -5}, "dtype -5"),
        ({"agreed": 24}, "24 bytes"),
        ({"shape": 0, "shapes": b"[1,5]"}, r"\[5\].*\[1,5\]"),
        ({"flags": 2}, "weighted"),
        ({"label": b"\xff" * 72}, "runs all_reduce"),
        ({"flags": 1, "bytes": 2001}, "disagree"),
        (
            {"bytes": 16},
            "sent 16 bytes .*, expected 20 bytes. Use the same version",
        ),
    ],
    ids=str,
)
def test_a_message_of_something_else_is_named(rank, change, error):
    header = good_header(2) | change
    rank.peer[0].sendall(pack(header) + bytes(min(header["bytes"], 4000)))
    with pytest.raises(tf.errors.OpError, match=error) as raised:
        rank.sum()
    assert "rank 1 (b:1)" in raised.value.message


def test_bytes_that_are_not_the_announced_rows_are_named(rank):
    header = gather_header(2)
    rank.peer[0].sendall(pack(header) + bytes(header["bytes"]))
    np.testing.assert_array_equal(rank.gather()[NUMBERS:], np.zeros(NUMBERS))
    for rows in (NUMBERS - 1, -1, 1 << 50):
        with Rank() as other:
            wrong = pack(header | {"rows": rows}) + bytes(header["bytes"])
            other.peer[0].sendall(wrong)
            with pytest.raises(tf.errors.InternalError) as raised:
                other.gather()
        assert (
            f"rank 1 (b:1) sent 20 bytes and {rows} as the number of rows for "
            "all_gather 'sum'"
        ) in raised.value.message
        assert (
            "expected a number of rows, and 4 bytes for each. Use the same "
            "version of tfdist_ext on all ranks"
        ) in raised.value.message


def test_the_same_message_twice_is_named(rank):
    message = pack(good_header(8)) + bytes(4 * NUMBERS)
    rank.peer[0].sendall(2 * message)
    with pytest.raises(tf.errors.InternalError, match="duplicate message"):
        rank.sum()


def test_control_frames_of_another_build_are_named(rank):
    rank.peer[1].sendall(b"x" * 1024)
    with pytest.raises(tf.errors.InternalError, match="control message"):
        rank.sum()


@contextlib.contextmanager
def flood(connection, data):
    """Sends it again and again until the end, of 10 s at most."""
    end = time.monotonic() + 10
    over = threading.Event()

    def send():
        with contextlib.suppress(OSError):
            for part in data:
                if over.is_set() or time.monotonic() > end:
                    return
                connection.sendall(part)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        over.set()
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        thread.join(20)
        assert not thread.is_alive()


def unknown_messages():
    for first in range(0, 1 << 40, 1000):
        yield b"".join(
            pack(good_header(4 + 2 * i) | {"bytes": 0})
            for i in range(first, first + 1000)
        )


def of_control(kind):
    for number in range(1 << 40):
        yield frame(kind, nonce=number)


def test_messages_that_nobody_expects_have_a_limit(rank):
    with (
        flood(rank.peer[0], unknown_messages()),
        pytest.raises(tf.errors.InternalError, match=r"rank 1 \(b:1\).*131072"),
    ):
        rank.sum()


def payloads():
    for number in range(1 << 40):
        yield pack(good_header(4 + number) | {"bytes": 1 << 16}) + bytes(
            1 << 16
        )


def test_bytes_that_nobody_expects_have_a_limit():
    with (
        Rank(most_early=1 << 20) as rank,
        flood(rank.peer[0], payloads()),
        pytest.raises(
            tf.errors.InternalError,
            match=r"rank 1 \(b:1\).*1048576 bytes that",
        ),
    ):
        rank.sum()


def test_bytes_that_were_expected_later_do_not_count():
    payload = np.ones(NUMBERS, np.float32).tobytes()
    with Rank(most_early=2 * len(payload)) as rank:
        for call in range(3):
            for tag in (2, 4):  # as many as may come early
                header = good_header(tag) | {"call": call}
                rank.peer[0].sendall(pack(header) + payload)
            time.sleep(0.01)
            for tag in (2, 4):
                expected = np.arange(NUMBERS) + 1
                np.testing.assert_array_equal(rank.sum(tag), expected)


def test_bytes_that_nobody_wants_any_more_do_not_count():
    payload = bytes(4 * NUMBERS)
    with Rank(most_early=len(payload)) as rank:
        for generation in range(3):
            header = good_header(2) | {"generation": generation}
            rank.peer[0].sendall(pack(header) + payload)
            time.sleep(0.01)
            rank.group.leave("nothing")
        header = good_header(2) | {"generation": 3}
        rank.peer[0].sendall(pack(header) + payload)
        np.testing.assert_array_equal(rank.sum(), np.arange(NUMBERS))


def test_a_lost_peer_that_goes_on_sending_is_lost(rank):
    with flood(rank.peer[0], unknown_messages()):
        time.sleep(0.02)
        rank.peer[1].close()
        start = time.monotonic()
        with pytest.raises(tf.errors.OpError, match=r"rank 1 \(b:1\)"):
            rank.sum()
        assert time.monotonic() - start < 5


def test_keys_have_a_limit(rank):
    answers = read_frames(rank.peer[1])
    for number in range(4096):
        rank.peer[1].sendall(frame(INSERT, text=b"%d\0a" % number))
        assert {next(answers)[0], next(answers)[0]} == {INSERTED, VALUE}
    rank.peer[1].sendall(frame(INSERT, text=b"one more\0a"))
    with pytest.raises(tf.errors.InternalError, match=r"\(b:1\).*4096 keys"):
        rank.sum()


def test_generations_have_a_limit(rank):
    with (
        flood(rank.peer[1], of_control(LEAVE)),
        pytest.raises(tf.errors.InternalError, match=r"\(b:1\).*1024 failures"),
    ):
        rank.sum()


def test_only_rank_0_sets_keys(rank):
    rank.peer[1].sendall(frame(VALUE, text=b"key\0value"))
    with pytest.raises(
        tf.errors.InternalError, match="which only rank 0 may send"
    ):
        rank.sum()


def test_a_peer_that_does_not_read_is_named_and_told(rank):
    """The news of the failure comes after all that it has not read."""
    rank.peer[1].settimeout(10)
    with flood(rank.peer[1], of_control(PING)):
        with pytest.raises(tf.errors.InternalError) as raised:
            rank.sum()
        assert "rank 1 (b:1)" in raised.value.message
        assert "does not read" in raised.value.message
        frames = read_frames(rank.peer[1])
        assert any(kind == ABORT for kind, *_ in frames)


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
