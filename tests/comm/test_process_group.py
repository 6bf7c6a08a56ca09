# SPDX-License-Identifier: Apache-2.0
"""Life of a process group: connecting, comparing plans, counting, closing."""

import os
import pathlib
import re
import socket
import struct
import subprocess
import sys
import time

import pytest
import tensorflow as tf

from tests.thread_ranks import run_on_ranks
from tfdist_ext.comm import connection
from tfdist_ext.comm import process_group
from tfdist_ext.comm.connection import Connection
from tfdist_ext.comm.connection import SharedMemory
from tfdist_ext.comm.process_group import GroupStats
from tfdist_ext.comm.process_group import ProcessGroup
from tfdist_ext.ops import collective_ops

ROOT = pathlib.Path(__file__).parents[2]


def test_one_rank_needs_nothing():
    with ProcessGroup(0, 1) as group:
        group.check_same(["anything"])
        assert group.stats() == GroupStats()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 2, "world_size": 2}, "rank=2"),
        ({"rank": 0, "world_size": 2, "addresses": ["a:1"]}, "a:1"),
        ({"rank": 0, "world_size": 1, "timeout": 0}, "timeout=0"),
        (
            {"rank": 0, "world_size": 2, "addresses": ["127.0.0.1:1"] * 2},
            "`connect`",
        ),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        ProcessGroup(**arguments)


@pytest.mark.parametrize("what", ["nothing", "a file", "a number", "memory"])
def test_what_is_no_connection_is_refused(what, tmp_path):
    def connect():
        path = tmp_path / "file"
        path.touch()
        if what == "memory":  # that is none of ours
            pairs = [socket.socketpair() for _ in range(2)]
            shared = SharedMemory(os.open(path, 0), os.open(path, 0))
            return [None, Connection(*(pair[0] for pair in pairs), shared)]
        numbers = {
            "a number": (12345, 12346),  # of no open file
            "nothing": (-2, -3),
            "a file": (os.open(path, 0), os.open(path, 0)),
        }[what]
        return [None, Connection(*map(Numbered, numbers))]

    with pytest.raises(tf.errors.OpError, match=r"rank 0 .* connections"):
        ProcessGroup(0, 2, ["127.0.0.1:1"] * 2, connect)


def test_the_limit_of_early_bytes_is_half_of_a_share_of_memory(tmp_path):
    container = tmp_path / "memory.max"
    container.write_text("1200\n")
    addresses = ["a:1", "a:2", "b:1"]
    limits = [
        process_group.default_early_bytes(rank, addresses, container)
        for rank in range(3)
    ]
    assert limits == [300, 300, 600]
    container.write_text("max\n")
    assert process_group.default_early_bytes(2, addresses, container) > 1 << 20


def tcp_pair():
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        return ours, server.accept()[0]


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_a_peer_that_has_reset_its_connection_is_named():
    """No descriptor stays open, so the healthy rank sees this one end."""

    def try_to_open():
        links = [[tcp_pair() for _ in range(2)] for _ in range(2)]
        memory = [connection.make_pair() for _ in range(2)]
        connections = [None] + [
            Connection(*(pair[0] for pair in link), shared[0])
            for link, shared in zip(links, memory, strict=True)
        ]
        at_once = struct.pack("ii", 1, 0)
        for _, theirs in links[1]:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
            theirs.close()
        with pytest.raises(
            tf.errors.UnavailableError, match=r"rank 2 \(c:1\).* has ended"
        ):
            ProcessGroup(0, 3, ["a:1", "b:1", "c:1"], lambda: connections)
        for _, healthy in links[0]:
            healthy.settimeout(5)
            assert healthy.recv(1) == b""  # the end of this rank
            healthy.close()
        for _, theirs in memory:
            theirs.close()

    try_to_open()
    before = descriptors()
    try_to_open()
    assert descriptors() == before


class Numbered:
    """Stands for a socket of this number."""

    def __init__(self, number):
        self.number = number

    def detach(self):
        return self.number


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_equal_plans(world_size):
    def check(group):
        for entries in ([], ["a"], [f"layer {i}" for i in range(2000)]):
            group.check_same(entries)
        return True

    assert run_on_ranks(world_size, check) == [True] * world_size


@pytest.mark.parametrize("world_size", [2, 4])
def test_different_plans_name_ranks_and_entries(world_size):
    def check(group):
        entries = ["dense", "emb/ids", "emb/rows"]
        if group.rank == 1:
            entries[1] = "other/ids"
        if group.rank == 3:
            entries.pop()
        with pytest.raises(tf.errors.InvalidArgumentError) as error:
            group.check_same(entries)
        group.check_same(["agreed"])  # the group goes on
        return error.value.message

    for message in run_on_ranks(world_size, check):
        assert re.search(
            r"Entry 1: rank 0 \(\S+\) has 'emb/ids', "
            r"rank 1 \(\S+\) has 'other/ids'",
            message,
        )
        assert ("rank 3" in message) == (world_size == 4)
        assert ("no such entry" in message) == (world_size == 4)


@pytest.mark.parametrize("world_size", [2, 4])
def test_stats_count_messages_and_bytes(world_size):
    def run(group):
        rows = tf.zeros([world_size * 100, 8])
        for _ in range(3):
            collective_ops.all_to_all(
                group, rows, [100] * world_size, tag=2, label="emb"
            )
        return group.stats()

    for stats in run_on_ranks(world_size, run):
        payload = 3 * (world_size - 1) * 100 * 8 * 4
        calls, sent, seconds = stats.labels["emb"]
        assert calls == stats.calls == 3
        assert payload < sent == stats.bytes_sent < payload * 1.1 + 2500
        assert stats.bytes_received == stats.bytes_sent
        assert stats.messages_sent == 3 * (world_size - 1)
        assert 0 < seconds < 60


@pytest.mark.parametrize("form", ["", "ring", "tree"])
def test_waits_and_bytes_are_known_by_rank(form):
    def run(group):
        group.trace(True)
        collective_ops.barrier(group, tag=0)
        for tag in (2, 4):
            if group.rank == 2:
                time.sleep(0.2)
            collective_ops.all_reduce(group, [tf.ones([5000])], tag=tag)
        return group.stats(), group.trace(False)

    ended = run_on_ranks(4, run, all_reduce=form)
    total = [sum(stats.waited) for stats, _ in ended]
    assert total[2] + 0.1 < min(total[:2] + total[3:]), total
    if not form:  # In others a rank waits for those that wait.
        for rank in (0, 1, 3):
            waited = ended[rank][0].waited
            assert max(waited) == waited[2], (rank, waited)
    for rank, (stats, traced) in enumerate(ended):
        assert [each.kind for each in traced] == ["barrier"] + [
            "all_reduce"
        ] * 2
        assert stats.bytes_sent == sum(sum(each.sent) for each in traced)
        for i, each in enumerate(traced):
            assert each.sent[rank] == each.received[rank] == 0
            there = [ended[peer][1][i].received[rank] for peer in range(4)]
            assert each.sent == there
            assert (each.tag, each.call) == (2 * i, 0), each
        forward = [s > 0 for s in traced[1].sent]
        assert sum(forward) == {"": 3, "ring": 3, "tree": 2}[form], traced


def test_closing_twice_and_ops_after_it():
    def run(group):
        collective_ops.barrier(group, tag=2)
        handle = group.handle
        group.close()
        group.close()
        group.handle = handle
        with pytest.raises(tf.errors.FailedPreconditionError, match="group"):
            collective_ops.barrier(group, tag=2)
        group.handle = -1
        return group.stats()

    assert run_on_ranks(2, run) == [GroupStats()] * 2


def test_many_groups_one_after_another():
    for _ in range(10):
        totals = run_on_ranks(
            2,
            lambda group: collective_ops.all_reduce(
                group, [tf.ones([2])], tag=2
            )[0].numpy(),
        )
        assert [total.tolist() for total in totals] == [[2, 2]] * 2


DEBUG_PROGRAM = """
import tensorflow as tf
from tests.thread_ranks import run_on_ranks
from tfdist_ext.ops import collective_ops

run_on_ranks(2, lambda group: collective_ops.all_reduce(
    group, [tf.ones([2])], tag=6, label="dense"))
"""


@pytest.mark.parametrize("value", ["1", "0"])
def test_debug_lines(value):
    done = subprocess.run(
        [sys.executable, "-c", DEBUG_PROGRAM],
        env={**os.environ, "TFDIST_DEBUG": value, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        start = f"r{rank} | all_reduce 'dense' tag=6 start"
        end = rf"r{rank} \| all_reduce 'dense' tag=6 done in [\d.e-]+ ms, "
        end += r"sent 200 B, received 200 B"
        assert (start in done.stderr) == (value == "1")
        assert bool(re.search(end, done.stderr)) == (value == "1")
