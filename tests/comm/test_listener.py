# SPDX-License-Identifier: Apache-2.0
"""Unauthenticated connections delay nobody; all expected ones are accepted."""

import contextlib
import itertools
import socket
import threading
import time

import pytest

from tfdist_ext.comm import connector
from tfdist_ext.comm.connector import connect
from tfdist_ext.comm.handshake import Job
from tfdist_ext.comm.handshake import RefusedError
from tfdist_ext.comm.handshake import Verdict
from tfdist_ext.comm.listener import HANDSHAKE_SECONDS
from tfdist_ext.comm.listener import MAX_HANDSHAKES
from tfdist_ext.comm.listener import Listener

HOST = "127.0.0.1"
JOB = Job("ranks", b"secret")
LIMIT = 30.0


def deadline(seconds=LIMIT):
    return time.monotonic() + seconds


class Accepting(threading.Thread):
    """Accepts all that come."""

    def __init__(self, listener, seconds=LIMIT, job=JOB):
        super().__init__(daemon=True)
        self.listener, self.seconds, self.job = listener, seconds, job
        self.came = []
        self.start()

    def run(self):
        with contextlib.suppress(ValueError):  # the listener is closed
            self.accept_all()

    def accept_all(self):
        for number, connection in self.listener.accept(
            self.job, deadline(self.seconds)
        ):
            self.came.append(number)
            connection.sendall(b"hello %d" % number)


@pytest.fixture
def listener():
    with Listener((HOST, 0), [1, 2]) as listener:
        yield listener


@pytest.fixture
def come():
    """Connects as a process of some number; stays connected."""
    with contextlib.ExitStack() as stack:

        def come(address, number, job=JOB):
            connection = connect(address, job, number, deadline())
            return stack.enter_context(connection)

        yield come


def test_all_come_in_any_order(listener, come):
    accepting = Accepting(listener)
    for number in (2, 1):
        connection = come(listener.address, number)
        assert connection.recv(100) == b"hello %d" % number
    accepting.join(LIMIT)
    assert accepting.came == [2, 1] and listener.missing == []


@pytest.mark.parametrize(
    "noise",
    [b"", b"GET / HTTP/1.0\r\n\r\n", b"tfdist\r\n", b"\0" * 48, b"x" * 100_000],
    ids=["nothing", "http", "a-part", "zeros", "long"],
)
def test_unauthenticated_peers_are_sent_away(listener, noise, come):
    accepting = Accepting(listener)
    with (
        socket.create_connection(listener.address, timeout=LIMIT) as peer,
        contextlib.suppress(OSError),
    ):
        peer.sendall(noise)
        peer.shutdown(socket.SHUT_WR)
        assert peer.recv(100) == b""
    for number in (1, 2):
        come(listener.address, number)
    accepting.join(LIMIT)
    assert accepting.came == [1, 2]


def test_silent_unauthenticated_peers_delay_nobody(listener, come):
    """Many more than are kept at a time: the oldest have to go."""
    accepting, began = Accepting(listener), time.monotonic()
    with contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(
                socket.create_connection(listener.address, timeout=LIMIT)
            )
            for _ in range(MAX_HANDSHAKES + 50)
        ]
        for number in (1, 2):
            come(listener.address, number)
        accepting.join(LIMIT)
        assert accepting.came == [1, 2]
        assert time.monotonic() - began < HANDSHAKE_SECONDS
        silent[0].settimeout(LIMIT)
        assert silent[0].recv(1) == b""


def test_whoever_is_slow_is_sent_away():
    with Listener((HOST, 0), [1, 2], handshake_seconds=0.2) as listener:
        Accepting(listener)
        with socket.create_connection(listener.address, timeout=LIMIT) as slow:
            slow.sendall(b"tfdist")
            assert slow.recv(1) == b""


def test_a_wrong_secret_is_refused_and_told(listener):
    accepting = Accepting(listener, 1.0)
    with pytest.raises(RefusedError, match="wrong secret"):
        connect(listener.address, Job("ranks", b"guess"), 1, deadline())
    accepting.join(LIMIT)
    assert accepting.came == [] and listener.missing == [1, 2]


def test_refusals_are_named(listener):
    accepting = Accepting(listener, 1.0)
    with pytest.raises(RefusedError, match="other job"):
        connect(listener.address, Job("another", b"secret"), 1, deadline())
    accepting.join(LIMIT)
    assert "127.0.0.1" in listener.refusals and "other job" in listener.refusals


def test_a_number_that_lives_is_not_replaced(listener, come, monkeypatch):
    monkeypatch.setattr(connector, "TAKEN_SECONDS", 0.2)
    accepting = Accepting(listener)
    assert come(listener.address, 1).recv(100) == b"hello 1"
    with pytest.raises(RefusedError, match="taken"):
        come(listener.address, 1)
    come(listener.address, 2)
    accepting.join(LIMIT)
    assert accepting.came == [1, 2]


def test_a_number_may_be_taken_for_a_while(come, monkeypatch, free_port):
    """By a dead process, however long the new one has waited before."""
    monkeypatch.setattr(connector, "TAKEN_SECONDS", 1.0)
    port, came = free_port(), []
    thread = threading.Thread(
        target=lambda: came.append(come((HOST, port), 1)), daemon=True
    )
    thread.start()
    time.sleep(1.2)
    with Listener((HOST, port), [1, 2]) as listener:
        verdicts = itertools.chain([Verdict.TAKEN], itertools.repeat(0))
        monkeypatch.setattr(
            listener, "check", lambda _: Verdict(next(verdicts))
        )
        Accepting(listener)
        thread.join(LIMIT)
        assert len(came) == 1


def test_a_number_that_has_ended_is_replaced(listener, come):
    """What it has sent, and nobody has read, does not make it live."""
    accepting = Accepting(listener)
    with come(listener.address, 1) as first:
        first.sendall(b"never read")
        assert first.recv(100) == b"hello 1"
    assert come(listener.address, 1).recv(100) == b"hello 1"
    come(listener.address, 2)
    accepting.join(LIMIT)
    assert accepting.came == [1, 1, 2]


def test_all_must_be_connected_at_the_same_time(listener, come):
    """Who has ended is waited for again, also once all have come."""
    accepting = Accepting(listener)
    with come(listener.address, 1) as first:
        first.sendall(b"never read")
        assert first.recv(100)
    come(listener.address, 2)
    accepting.join(0.2)
    assert accepting.is_alive() and listener.missing == [1]
    assert "it connected and ended" in listener.refusals
    assert come(listener.address, 1).recv(100)
    accepting.join(LIMIT)
    assert not accepting.is_alive() and listener.missing == []


def test_nobody_opens(free_port):
    began = time.monotonic()
    with pytest.raises(OSError):
        connect((HOST, free_port()), JOB, 1, deadline(0.5))
    assert time.monotonic() - began < 10


def test_whoever_listens_without_the_secret_is_refused():
    """Nobody can take the place of rank 0 either."""
    with Listener((HOST, 0), [1]) as listener:
        Accepting(listener, 1.0, Job("ranks", b"guess"))
        with pytest.raises(RefusedError, match="wrong secret"):
            connect(listener.address, JOB, 1, deadline())


def test_a_listener_starts_before_or_after_those_who_connect(free_port):
    port, came = free_port(), []

    thread = threading.Thread(
        target=lambda: came.append(connect((HOST, port), JOB, 1, deadline())),
        daemon=True,
    )
    thread.start()
    time.sleep(0.3)
    with Listener((HOST, port), [1]) as listener:
        assert [number for number, _ in listener.accept(JOB, deadline())] == [1]
    thread.join(LIMIT)
    came.pop().close()
