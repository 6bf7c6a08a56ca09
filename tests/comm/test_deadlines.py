# SPDX-License-Identifier: Apache-2.0
"""A deadline is one of silence: whoever still sends is waited for."""

import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from tests.bare_peer import GOODBYE
from tests.bare_peer import NUMBERS
from tests.bare_peer import PING
from tests.bare_peer import PONG
from tests.bare_peer import Rank
from tests.bare_peer import frame
from tests.bare_peer import good_header
from tests.bare_peer import pack
from tests.bare_peer import read_frames

MESSAGE = pack(good_header(2)) + np.ones(NUMBERS, np.float32).tobytes()
EXPECTED = np.arange(NUMBERS) + 1


def sum_while(rank, peer_does):
    """The sum, while the peer's thread does something."""
    thread = threading.Thread(target=peer_does)
    thread.start()
    try:
        return rank.sum()
    finally:
        thread.join()


def test_a_slow_transfer_takes_as_long_as_it_takes():
    """Three timeouts, of a peer that answers no ping."""

    def send_slowly():
        for byte in range(0, len(MESSAGE), 8):
            rank.peer[0].sendall(MESSAGE[byte : byte + 8])
            time.sleep(0.12)

    with Rank(timeout=1.0) as rank:
        start = time.monotonic()
        np.testing.assert_array_equal(sum_while(rank, send_slowly), EXPECTED)
        assert time.monotonic() - start > 2.5


@pytest.mark.parametrize("begun", [0, 100])
def test_silence_shorter_than_the_timeout_is_survived(begun):
    """Also of control messages: a stopped process answers no ping."""

    def pause():
        rank.peer[0].sendall(MESSAGE[:begun])
        time.sleep(3)
        rank.peer[0].sendall(MESSAGE[begun:])

    with Rank(timeout=5.0) as rank:
        np.testing.assert_array_equal(sum_while(rank, pause), EXPECTED)


@pytest.mark.parametrize("begun", [0, 100])
def test_longer_silence_is_named(begun):
    with Rank(timeout=1.0) as rank:
        rank.peer[0].sendall(MESSAGE[:begun])
        start = time.monotonic()
        with pytest.raises(tf.errors.UnavailableError, match="sent nothing"):
            rank.sum()
        assert 0.9 < time.monotonic() - start < 5


MOVING = 2


def test_a_peer_that_says_for_ever_that_it_moves_is_given_up():
    def answer():
        for kind, _, nonce, _ in read_frames(rank.peer[1]):
            if kind == PING:
                pong = frame(PONG, code=MOVING, nonce=nonce, text=b"is in it")
                rank.peer[1].sendall(pong)
            else:
                return

    with Rank(timeout=0.2) as rank:
        start = time.monotonic()
        with pytest.raises(
            tf.errors.UnavailableError, match=r"did not take part .* is in it"
        ):
            sum_while(rank, answer)
        assert 3.5 < time.monotonic() - start < 8


def test_a_peer_that_says_goodbye_and_stays_is_not_waited_for():
    with Rank(timeout=30.0) as rank:
        start = time.monotonic()
        rank.peer[1].sendall(frame(GOODBYE))
        with pytest.raises(tf.errors.UnavailableError, match="and left"):
            rank.sum()
        assert time.monotonic() - start < 10


def test_the_end_of_a_connection_is_known_at_once():
    def end():
        time.sleep(0.3)
        for connection in rank.peer:
            connection.close()

    with Rank(timeout=60.0) as rank:
        start = time.monotonic()
        with pytest.raises(tf.errors.UnavailableError, match="is gone"):
            sum_while(rank, end)
        assert time.monotonic() - start < 3


def test_a_timeout_of_three_centuries_is_one():
    def send_late():
        time.sleep(0.5)
        rank.peer[0].sendall(MESSAGE)

    with Rank(timeout=1e10) as rank:
        np.testing.assert_array_equal(sum_while(rank, send_late), EXPECTED)
