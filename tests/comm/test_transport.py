# SPDX-License-Identifier: Apache-2.0
"""How messages leave, what idle ranks cost, and how connections are kept."""

import concurrent.futures
import contextlib
import os
import socket
import struct
import threading
import time

import pytest
import tensorflow as tf

from tests.bare_peer import Rank
from tests.bare_peer import good_header
from tests.bare_peer import pack
from tests.thread_ranks import run_on_ranks
from tfdist_ext.comm import connection
from tfdist_ext.comm.connection import Connection
from tfdist_ext.comm.process_group import ProcessGroup
from tfdist_ext.ops import collective_ops


def wait_until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_messages_that_wait_leave_together():
    """What many operations have ready goes by few calls of the system."""
    count = 40

    def total(numbers, tag):
        with contextlib.suppress(tf.errors.OpError):  # it ends without answer
            collective_ops.all_reduce(rank.group, [tf.ones([numbers])], tag=tag)

    with Rank() as rank:
        large = threading.Thread(target=total, args=(1 << 20, 2))
        small = [
            threading.Thread(target=total, args=(5, 4 + 2 * i))
            for i in range(count)
        ]
        large.start()  # more than the system takes before the peer reads
        wait_until(lambda: rank.group.stats().writes > 0)
        time.sleep(0.2)
        for thread in small:
            thread.start()
        wait_until(lambda: rank.group.stats().messages_sent == 1 + count)
        before = rank.group.stats().writes
        left = 192 + (1 << 21) + count * (192 + 20)
        while left:
            left -= len(rank.peer[0].recv(min(left, 1 << 20)))
        # All but those that leave with the end of the large one.
        after = rank.group.stats().writes
        assert after - before < count / 2 + (1 << 21) / (100 << 10)
        for end in rank.peer:
            end.close()
        for thread in (large, *small):
            thread.join(20)


def test_a_full_bell_does_not_block():
    """The peer has its other end too, and may change its flags."""
    pairs = [socket.socketpair() for _ in range(2)]
    ours, theirs = connection.make_pair()
    ours_too = os.dup(ours.bell)
    os.set_blocking(ours_too, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(ours_too, b"x")
    os.set_blocking(ours_too, True)
    reader_waits = struct.pack("I", 1)
    os.pwrite(theirs.memory, reader_waits, 128)  # in the ring of rank 0
    connections = [None, Connection(*(pair[0] for pair in pairs), ours)]
    with ProcessGroup(0, 2, ["a:1", "b:1"], lambda: connections, 0.5) as group:
        with pytest.raises(tf.errors.UnavailableError, match="sent nothing"):
            collective_ops.all_reduce(group, [tf.ones([4])], tag=2)
        assert os.pread(theirs.memory, 4, 128) == bytes(4)  # it has rung
    for _, peer in pairs:
        peer.close()
    theirs.close()
    os.close(ours_too)


def test_many_operations_share_a_ring():
    """Whoever finds it full is told of room, whichever thread it is."""
    count, rounds = 4, 15

    def total(group, tag):
        for _ in range(rounds):
            x = tf.fill([700_000], float(group.rank))
            (result,) = collective_ops.all_reduce(group, [x], tag=tag)
            assert float(result[-1]) == 1.0

    def run(group):
        with concurrent.futures.ThreadPoolExecutor(count) as pool:
            done = [pool.submit(total, group, 2 * i) for i in range(count)]
            return [each.result() for each in done]

    run_on_ranks(2, run, timeout=10, all_reduce="ring")


@pytest.mark.parametrize("size", [1, 160_000])
def test_a_part_of_another_size_that_came_before_is_refused(size):
    """It would be written past the end of the tensor."""
    numbers = 70_000  # large: the peer then sums half of it
    with Rank() as rank:
        for part, bytes_ in ((1, size), (0, 2 * numbers)):
            header = good_header(2) | {
                "part": part,
                "bytes": bytes_,
                "agreed": 4 * numbers,
                "shape": (0x9E3779B97F4A7C15 + numbers) % (1 << 64),
                "shapes": b"[70000]",
            }
            rank.peer[0].sendall(pack(header) + bytes(bytes_))
        time.sleep(0.3)  # it has been read
        with pytest.raises(
            tf.errors.InternalError, match=f"sent {size} bytes for a part of"
        ):
            collective_ops.all_reduce(
                rank.group, [tf.ones([numbers])], tag=2, label="sum"
            )


def test_idle_ranks_use_no_processor():
    """Neither between operations nor while one waits for a rank."""

    def idle(group):
        used = []
        for waits in (False, True):
            collective_ops.barrier(group, tag=2)
            start = time.process_time()
            if not waits or group.rank == 0:
                time.sleep(1.0)
            collective_ops.barrier(group, tag=4)
            used.append(time.process_time() - start)
        return used

    # Of three ranks in one process; a thread that spins takes all of a core.
    for used in run_on_ranks(3, idle):
        assert max(used) < 0.3, used


def test_dead_hosts_are_found_out():
    with socket.create_server(("127.0.0.1", 0)) as server:
        pairs = []
        for _ in range(2):
            near = socket.create_connection(server.getsockname())
            pairs.append((near, server.accept()[0]))
    ours, theirs = zip(*pairs, strict=True)
    kept = [each.dup() for each in ours]
    connections = [None, Connection(*ours)]
    with ProcessGroup(0, 2, ["a:1", "b:1"], lambda: connections, 20):
        for connection in kept:
            for level, option, least in (
                (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
                (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
                (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
            ):
                value = connection.getsockopt(level, option)
                assert least <= value <= 60, option
            assert not os.get_blocking(connection.fileno())
        for connection in (*theirs, *kept):
            connection.close()
