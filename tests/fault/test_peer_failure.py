# SPDX-License-Identifier: Apache-2.0
"""Every survivor of a failure says which rank failed, where and in what."""

import contextlib
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from benchmarks import network
from tests.ranks.servers import ENTER

pytestmark = pytest.mark.fault

PROGRAM = pathlib.Path(__file__).with_name("collective_rank.py")
START_LIMIT = 120
DETECTION_LIMIT = 10


@pytest.fixture
def running_ranks(servers, tmp_path):
    """Ranks in the middle of a scenario, as a list of processes."""
    return functools.partial(_running_ranks, servers, tmp_path)


@contextlib.contextmanager
def _running_ranks(servers, folder, scenario, world_size, timeout, net=None):
    # A fork would be in its server's network.
    program = [sys.executable, *([] if net else [ENTER])]
    net = net or network.loopback(world_size)
    env = {
        **servers.environment(keras=3, ranks=1),
        "TF_CPP_MIN_LOG_LEVEL": "1",  # shows warnings
    }
    ranks = []
    try:
        for rank in range(world_size):
            with open(folder / f"output.{rank}", "w") as output:
                arguments = [scenario, rank, world_size, timeout, folder]
                arguments += net.hosts
                command = [*net.prefixes[rank], *program, PROGRAM, *arguments]
                own = {"TFDIST_TEST_PID": str(folder / f"pid.{rank}")}
                ranks.append(
                    subprocess.Popen(
                        [*map(str, command)],
                        env={**env, **own},
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
        wait_for_files(folder, "ready", range(world_size), START_LIMIT)
        time.sleep(0.3)
        yield ranks
    finally:
        for process in ranks:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()


def send(folder, rank, number):
    """Sends a signal to a rank itself, not to what stands for it."""
    os.kill(int((folder / f"pid.{rank}").read_text()), number)


def wait_for_files(folder, stem, ranks, limit):
    deadline = time.time() + limit
    paths = [folder / f"{stem}.{rank}" for rank in ranks]
    while not all(path.exists() for path in paths):
        if time.time() > deadline:
            outputs = [path.read_text() for path in folder.glob("output.*")]
            missing = [path.name for path in paths if not path.exists()]
            raise AssertionError(f"no {missing}\n" + "\n".join(outputs))
        time.sleep(0.02)
    return paths


def results(folder, ranks, limit):
    paths = wait_for_files(folder, "result", ranks, limit)
    return [json.loads(path.read_text()) for path in paths]


def assert_blames(result, rank, label, folder, host="127.0.0.1"):
    """The error names the failed rank, its address, the op and the stage."""
    port = (folder / "port").read_text() if rank == 0 else 9000 + rank
    assert result["class"] == "UnavailableError"
    assert f"rank {rank} ({host}:{port})" in result["message"]
    assert label in result["message"]
    assert "stage " in result["message"]
    assert f"rank {rank} ({host}:{port})" in result["later"]
    assert result["later_seconds"] < 1


@pytest.mark.parametrize(
    ("scenario", "world_size", "victim"), [("small", 2, 0), ("large", 4, 2)]
)
def test_kill(running_ranks, scenario, world_size, victim, tmp_path):
    with running_ranks(scenario, world_size, 60) as ranks:
        killed = time.time()
        send(tmp_path, victim, signal.SIGKILL)
        survivors = [rank for rank in range(world_size) if rank != victim]
        for result in results(tmp_path, survivors, DETECTION_LIMIT + 5):
            assert_blames(result, victim, "'layer ", tmp_path)
            assert "died or was killed" in result["message"]
            assert result["time"] - killed < DETECTION_LIMIT
        for rank in survivors:
            assert ranks[rank].wait(timeout=20) == 0


@pytest.mark.parametrize(
    ("scenario", "world_size", "victim"), [("large", 2, 1), ("small", 4, 0)]
)
def test_stop(running_ranks, scenario, world_size, victim, tmp_path):
    timeout = 3
    with running_ranks(scenario, world_size, timeout) as ranks:
        stopped = time.time()
        send(tmp_path, victim, signal.SIGSTOP)
        survivors = [rank for rank in range(world_size) if rank != victim]
        limit = timeout + DETECTION_LIMIT
        for result in results(tmp_path, survivors, limit + 5):
            assert_blames(result, victim, "'layer ", tmp_path)
            assert "sent nothing" in result["message"]
            assert "(timeout: 3 s)" in result["message"]
            assert timeout - 1 < result["time"] - stopped < limit
        for rank in survivors:
            assert ranks[rank].wait(timeout=20) == 0
        send(tmp_path, victim, signal.SIGCONT)  # finds the notice
        (result,) = results(tmp_path, [victim], DETECTION_LIMIT)
        assert result["class"] == "UnavailableError"


def assert_goes_on(folder, world_size, limit):
    """All ranks make a step within `limit` seconds, and no operation fails."""
    counts = [folder / f"steps.{rank}" for rank in range(world_size)]
    before = [path.read_text() for path in counts]
    end = time.time() + limit
    while any(
        path.read_text() == count
        for path, count in zip(counts, before, strict=True)
    ):
        failed = [path.read_text() for path in folder.glob("result.*")]
        assert not failed
        assert time.time() < end
        time.sleep(0.02)


def test_a_pause_of_all_ranks_is_survived(running_ranks, tmp_path):
    """As of a host that sleeps, though the ranks wake one after the other."""
    timeout = 3
    with running_ranks("counted", 2, timeout):
        send(tmp_path, 1, signal.SIGSTOP)
        time.sleep(0.3)  # the other waits for it
        send(tmp_path, 0, signal.SIGSTOP)
        time.sleep(timeout + 1)
        for rank in range(2):
            send(tmp_path, rank, signal.SIGCONT)
            time.sleep(1)
        assert_goes_on(tmp_path, 2, DETECTION_LIMIT)


NO_NAMESPACES = network.reason_unavailable()


@pytest.mark.skipif(bool(NO_NAMESPACES), reason=NO_NAMESPACES)
@pytest.mark.parametrize(
    ("scenario", "world_size", "victim"), [("small", 2, 1), ("large", 4, 2)]
)
def test_link_down(running_ranks, scenario, world_size, victim, tmp_path):
    timeout = 3
    with (
        network.namespaces(world_size, None) as net,
        running_ranks(scenario, world_size, timeout, net),
    ):
        down = time.time()
        namespace = net.prefixes[victim][3]
        link = namespace.replace("n", "v")  # its end outside
        subprocess.run(["ip", "link", "set", link, "down"], check=True)
        survivors = [rank for rank in range(world_size) if rank != victim]
        limit = timeout + DETECTION_LIMIT
        for result in results(tmp_path, survivors, limit + 5):
            assert_blames(
                result, victim, "'layer ", tmp_path, net.hosts[victim]
            )
            assert result["time"] - down < limit
        (cut_off,) = results(tmp_path, [victim], limit + 5)
        assert cut_off["class"] == "UnavailableError"
        assert cut_off["time"] - down < limit


# Refuses TCP_RTO_MAX_MS, as Linux before 6.15 does.
OLDER_LINUX = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <netinet/in.h>
#include <sys/socket.h>

int setsockopt(int fd, int level, int name, const void* value, socklen_t size) {
  static int (*next)(int, int, int, const void*, socklen_t) = 0;
  if (level == IPPROTO_TCP && name == 44) {
    errno = ENOPROTOOPT;
    return -1;
  }
  if (next == 0) *(void**)&next = dlsym(RTLD_NEXT, "setsockopt");
  return next(fd, level, name, value, size);
}
"""


@pytest.fixture(params=["linux", "older_linux"])
def any_linux(request, monkeypatch, tmp_path):
    """Ranks under this Linux, and as under one without TCP_RTO_MAX_MS."""
    if request.param == "older_linux":
        library = tmp_path / "older_linux.so"
        command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", library]
        subprocess.run(command, input=OLDER_LINUX, text=True, check=True)
        monkeypatch.setenv("LD_PRELOAD", str(library))


@pytest.mark.skipif(bool(NO_NAMESPACES), reason=NO_NAMESPACES)
@pytest.mark.usefixtures("any_linux")
def test_a_link_that_comes_back_costs_two_seconds(running_ranks, tmp_path):
    timeout = 10
    with (
        network.namespaces(2, None) as net,
        running_ranks("counted", 2, timeout, net),
    ):
        link = net.prefixes[1][3].replace("n", "v")
        subprocess.run(["ip", "link", "set", link, "down"], check=True)
        time.sleep(timeout - 2)
        subprocess.run(["ip", "link", "set", link, "up"], check=True)
        assert_goes_on(tmp_path, 2, 2.0)


def test_death_between_gpus(running_ranks, emulated_ops, monkeypatch, tmp_path):
    """NCCL sees that too, and does not say of whom."""
    monkeypatch.setenv("TFDIST_TEST_EMULATED", str(emulated_ops))
    monkeypatch.setenv("FAKE_NCCL_DIE", "1@5")
    with running_ranks("between_gpus", 2, 60):
        (result,) = results(tmp_path, [0], DETECTION_LIMIT + 5)
        assert_blames(result, 1, "'layer ", tmp_path)
        assert "over NCCL) failed" in result["message"]
        assert "died or was killed" in result["message"]


def test_leaving_between_gpus(
    running_ranks, emulated_ops, monkeypatch, tmp_path
):
    """NCCL would wait for ever: it is aborted, on the rank that leaves too."""
    monkeypatch.setenv("TFDIST_TEST_EMULATED", str(emulated_ops))
    monkeypatch.setenv("FAKE_NCCL_HANG", "1@5")
    with running_ranks("leaving_gpus", 2, 60) as ranks:
        (result,) = results(tmp_path, [0], DETECTION_LIMIT + 5)
        assert result["step"] == 4
        assert_blames(result, 1, "'layer dense/bucket'", tmp_path)
        assert "over NCCL) failed" in result["message"]
        assert "closed its process group" in result["message"]
        assert ranks[1].wait(timeout=DETECTION_LIMIT) == 0


def test_kill_reaches_those_who_wait_for_survivors(running_ranks, tmp_path):
    with running_ranks("chain", 4, 60):
        killed = time.time()
        send(tmp_path, 3, signal.SIGKILL)
        first, second, third = results(tmp_path, range(3), DETECTION_LIMIT + 5)
        for result in (first, second):
            assert_blames(result, 3, "'of the waiting'", tmp_path)
        assert_blames(third, 3, "'of the sleeper'", tmp_path)
        for result in (first, second, third):
            assert result["time"] - killed < DETECTION_LIMIT


def warnings_of(folder, rank):
    """What a rank has said while it waited."""
    lines = (folder / f"output.{rank}").read_text().splitlines()
    return [line for line in lines if "has waited" in line]


# Three ranks, here and below: whatever happens has two witnesses.
def test_absent_rank_is_told_from_a_silent_one(running_ranks, tmp_path):
    timeout = 2
    with running_ranks("absent", 3, timeout):
        limit = 5 * timeout + DETECTION_LIMIT
        for result in results(tmp_path, range(2), limit):
            assert_blames(result, 2, "'layer dense/bucket'", tmp_path)
            assert "is alive and has not started it" in result["message"]
            assert "(timeout: 2 s)" in result["message"]
        for rank in range(2):
            said = warnings_of(tmp_path, rank)
            assert 1 <= len(said) <= 4  # at most every timeout but the last
            assert "rank 2 (" in said[0]


def test_slow_rank_is_waited_for(running_ranks, tmp_path):
    timeout = 2
    with running_ranks("slow", 3, timeout):
        limit = 2.5 * timeout + DETECTION_LIMIT
        for result in results(tmp_path, range(3), limit):
            assert result["class"] == "OutOfRangeError"
            assert "later" not in result  # a further exchange works
        assert warnings_of(tmp_path, 0)


def test_ranks_that_wait_for_each_other_fail_after_one_timeout(
    running_ranks, tmp_path
):
    with running_ranks("apart", 3, 2):
        limit = 2 + DETECTION_LIMIT
        for result in results(tmp_path, range(3), limit):
            assert result["class"] == "UnavailableError"
            assert "(timeout: 2 s)" in result["message"]
            assert "'layer apart'" in result["message"]
            assert "'layer dense/bucket'" in result["message"]
        assert not warnings_of(tmp_path, 0)


def test_rank_that_ends_early(running_ranks, tmp_path):
    with running_ranks("leaving", 3, 60):
        for result in results(tmp_path, range(2), DETECTION_LIMIT):
            assert_blames(result, 2, "'layer dense/bucket'", tmp_path)
            assert "left" in result["message"]


def test_rank_whose_step_fails(running_ranks, tmp_path):
    """At once there, though an exchange of the step waits; then on all."""
    with running_ranks("failing", 3, 60):
        for result in results(tmp_path, [0, 1], 15):
            assert_blames(result, 2, "'layer dense/bucket'", tmp_path)
            assert "failed: another op of the same step" in result["message"]
    output = (tmp_path / "output.2").read_text()
    assert "too many" in output


def test_different_ops_under_one_tag(running_ranks, tmp_path):
    with running_ranks("disagreeing", 3, 60):
        for result in results(tmp_path, range(3), DETECTION_LIMIT):
            assert result["class"] == "InvalidArgumentError"
            assert "all_reduce 'layer dense/bucket'" in result["message"]
            assert "all_gather 'layer other'" in result["message"]
            assert "rank 2 (" in result["message"]


@pytest.mark.parametrize(
    ("scenario", "steps"), [("dying_parent", 3), ("ending_child", 50)]
)
def test_children_have_no_part(running_ranks, scenario, steps, tmp_path):
    """They keep nobody's connection open, and close none."""
    with running_ranks(scenario, 2, 60):
        (result,) = results(tmp_path, [0], DETECTION_LIMIT + 5)
        assert_blames(result, 1, "'layer dense/bucket'", tmp_path)
        assert "died or was killed" in result["message"]
        assert result["step"] == steps
