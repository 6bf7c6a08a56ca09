# SPDX-License-Identifier: Apache-2.0
"""Jobs that fail are started again, with the hosts that come back."""

import contextlib
import json
import signal
import socket

import pytest

from tests.launch import launcher

HOST = "127.0.0.1"

# Fails in the starts that a file names by rank; tells all else.
PROGRAM = """
import json, os, pathlib, sys, time
cluster = json.loads(os.environ["TF_CONFIG"])
rank, size = cluster["task"]["index"], len(cluster["cluster"]["worker"])
start = os.environ["TFDIST_RESTART"]
print(f"start {start} rank {rank} of {size} pid {os.getpid()}", flush=True)
if start in sys.argv[1].split(",") and rank == size - 1:
    sys.exit(7)
time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return str(path)


def test_all_ranks_start_again(program, tmp_path):
    logs = str(tmp_path / "logs")
    done = launcher.launch(
        *("-n", "2", "--max-restarts", "3", "--log-dir", logs),
        *(program, "0,1", "0.5"),
    )
    assert done.returncode == 0, done.stderr
    assert "failed: exit code 7" in done.stderr
    assert "starts again (2 of 3 restarts)" in done.stderr
    assert "(3 of 3" not in done.stderr
    for folder, start in (("", 0), ("restart-1", 1), ("restart-2", 2)):
        log = tmp_path / "logs" / folder / "rank-1.log"
        assert log.read_text().startswith(f"start {start} rank 1 of 2 pid")


def test_what_always_fails_ends(program):
    done = launcher.launch("--max-restarts", "1", program, "0,1,2", "0")
    assert done.returncode == 7
    assert done.stdout.count("rank 0 of 1") == 2


def test_who_is_told_to_stop_does_not_start_again(program):
    with launcher.started("--max-restarts", "9", program, "", "60") as process:
        pids = launcher.read_pids(process, 1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(launcher.LIMIT) == 143
        launcher.check_all_dead(pids)
        assert "starts again" not in process.stderr.read()


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        (["--min-ranks", "2"], {}, "--min-ranks needs --max-restarts, and"),
        (["--max-restarts", "-1"], {}, "must be a number"),
        (
            ["--max-restarts", "1"],
            {"TF_CONFIG": json.dumps({"task": {"index": 0}})},
            "TF_CONFIG is set, so a cluster manager has placed this rank: "
            "--max-restarts is for",
        ),
    ],
)
def test_wrong_options_are_named(program, arguments, variables, said):
    done = launcher.launch(*arguments, program, "", "0", **variables)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())


@contextlib.contextmanager
def hosts(port, program, *options):
    """Starts launchers of a host with one rank each, by number."""
    with contextlib.ExitStack() as stack:

        def start(node):
            arguments = (
                *("--nnodes", "3", "--node-rank", str(node), "--grace", "1"),
                *("--master", f"{HOST}:{port}", "--max-restarts", "1"),
                *("--restart-timeout", "1", *options, program, "", "60"),
            )
            return stack.enter_context(
                launcher.started(*arguments, TFDIST_SECRET="secret")
            )

        yield start


def line_of(process):
    """What a rank has said first, without the launcher's mark of its rank."""
    return process.stdout.readline().partition("start ")[2].split(" pid")[0]


@pytest.mark.parametrize("comes_back", [False, True], ids=["two", "three"])
def test_hosts_that_are_left_meet_again(program, comes_back):
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
    with hosts(port, program, "--min-ranks", "2") as start:
        running = [start(node) for node in range(3)]
        for rank, process in enumerate(running):
            assert line_of(process) == f"0 rank {rank} of 3"
        running[1].send_signal(signal.SIGKILL)
        ranks = [(0, 0), (2, 1)]
        if comes_back:
            running[1] = start(1)
            ranks = [(0, 0), (1, 1), (2, 2)]
        for node, rank in ranks:
            # To whoever comes back, it is the first start.
            begun = int(not (comes_back and node == 1))
            expected = f"{begun} rank {rank} of {len(ranks)}"
            assert line_of(running[node]) == expected


def test_too_few_hosts_end(program):
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
    with hosts(port, program) as start:
        running = [start(node) for node in range(3)]
        for process in running:
            assert line_of(process)
        running[1].send_signal(signal.SIGKILL)
        for node in (0, 2):
            said = running[node].communicate(timeout=launcher.LIMIT)[1]
            assert running[node].returncode == 1
            assert "hosts [1] of 3 did not connect within" in said
