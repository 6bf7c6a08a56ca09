# SPDX-License-Identifier: Apache-2.0
"""Strangers at a door delay nobody; whoever is expected comes in."""

import contextlib
import socket
import threading
import time

import pytest

from tfdist_ext.rendezvous.door import GREETING_SECONDS
from tfdist_ext.rendezvous.door import MOST_GUESTS
from tfdist_ext.rendezvous.door import Door
from tfdist_ext.rendezvous.door import knock
from tfdist_ext.rendezvous.handshake import Job
from tfdist_ext.rendezvous.handshake import RefusedError

HOST = "127.0.0.1"
JOB = Job("ranks", b"secret")
LIMIT = 30.0


def deadline(seconds=LIMIT):
    return time.monotonic() + seconds


class Inside(threading.Thread):
    """Lets in whoever comes."""

    def __init__(self, door, seconds=LIMIT):
        super().__init__(daemon=True)
        self.door, self.seconds, self.came = door, seconds, []
        self.start()

    def run(self):
        with contextlib.suppress(ValueError):  # the door is closed
            self.let_in()

    def let_in(self):
        for number, connection in self.door.let_in(deadline(self.seconds)):
            self.came.append(number)
            connection.sendall(b"hello %d" % number)


@pytest.fixture
def door():
    with Door((HOST, 0), JOB, [1, 2]) as door:
        yield door


def test_all_come_in_any_order(door):
    inside = Inside(door)
    for number in (2, 1):
        with knock(door.address, JOB, number, deadline()) as connection:
            assert connection.recv(100) == b"hello %d" % number
    inside.join(LIMIT)
    assert inside.came == [2, 1] and door.missing == []


@pytest.mark.parametrize(
    "noise",
    [b"", b"GET / HTTP/1.0\r\n\r\n", b"tfdist\r\n", b"\0" * 48, b"x" * 100_000],
    ids=["nothing", "http", "a-part", "zeros", "long"],
)
def test_strangers_are_sent_away(door, noise):
    inside = Inside(door)
    with (
        socket.create_connection(door.address, timeout=LIMIT) as stranger,
        contextlib.suppress(OSError),
    ):
        stranger.sendall(noise)
        stranger.shutdown(socket.SHUT_WR)
        assert stranger.recv(100) == b""
    for number in (1, 2):
        knock(door.address, JOB, number, deadline()).close()
    inside.join(LIMIT)
    assert inside.came == [1, 2]


def test_silent_strangers_delay_nobody(door):
    """Many more than are kept at a time: the oldest have to go."""
    inside, began = Inside(door), time.monotonic()
    with contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(
                socket.create_connection(door.address, timeout=LIMIT)
            )
            for _ in range(MOST_GUESTS + 50)
        ]
        for number in (1, 2):
            knock(door.address, JOB, number, deadline()).close()
        inside.join(LIMIT)
        assert inside.came == [1, 2]
        assert time.monotonic() - began < GREETING_SECONDS
        silent[0].settimeout(LIMIT)
        assert silent[0].recv(1) == b""


def test_whoever_is_slow_is_sent_away():
    with Door((HOST, 0), JOB, [1, 2], greeting_seconds=0.2) as door:
        Inside(door)
        with socket.create_connection(door.address, timeout=LIMIT) as slow:
            slow.sendall(b"tfdist")
            assert slow.recv(1) == b""


def test_a_wrong_secret_is_refused_and_told(door):
    inside = Inside(door, 1.0)
    with pytest.raises(RefusedError, match="wrong secret"):
        knock(door.address, Job("ranks", b"guess"), 1, deadline())
    inside.join(LIMIT)
    assert inside.came == [] and door.missing == [1, 2]


def test_refusals_are_named(door):
    inside = Inside(door, 1.0)
    with pytest.raises(RefusedError, match="other job"):
        knock(door.address, Job("another", b"secret"), 1, deadline())
    inside.join(LIMIT)
    assert "127.0.0.1" in door.refusals and "other job" in door.refusals


def test_a_number_comes_twice_only_if_the_first_has_ended(door):
    inside = Inside(door)
    with knock(door.address, JOB, 1, deadline()) as first:
        assert first.recv(100)
        with pytest.raises(RefusedError, match="taken"):
            knock(door.address, JOB, 1, deadline())
    with knock(door.address, JOB, 1, deadline()) as second:
        assert second.recv(100) == b"hello 1"
    knock(door.address, JOB, 2, deadline()).close()
    inside.join(LIMIT)
    assert inside.came == [1, 1, 2]


def test_nobody_opens(free_port):
    began = time.monotonic()
    with pytest.raises(OSError):
        knock((HOST, free_port()), JOB, 1, deadline(0.5))
    assert time.monotonic() - began < 10


def test_whoever_listens_without_the_secret_is_refused():
    """Nobody can take the place of rank 0 either."""
    with Door((HOST, 0), Job("ranks", b"guess"), [1]) as door:
        Inside(door, 1.0)
        with pytest.raises(RefusedError, match="wrong secret"):
            knock(door.address, JOB, 1, deadline())


def test_a_door_starts_before_or_after_those_who_knock(free_port):
    port, came = free_port(), []

    def come():
        knock((HOST, port), JOB, 1, deadline()).close()
        came.append(1)

    thread = threading.Thread(target=come, daemon=True)
    thread.start()
    time.sleep(0.3)
    with Door((HOST, port), JOB, [1]) as door:
        assert [number for number, _ in door.let_in(deadline())] == [1]
    thread.join(LIMIT)
    assert came == [1]
