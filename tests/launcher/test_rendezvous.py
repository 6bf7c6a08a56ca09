# SPDX-License-Identifier: Apache-2.0
"""Tests of tfdist-run on several hosts, which all are this one.

The launchers run as processes with a limit; what a stranger on the network may
send is tested on `meet` itself.
"""

import json
import os
import pathlib
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from tfdist_ext.launcher import rendezvous

LIMIT = 30.0
HOST = "127.0.0.1"


def free_port() -> int:
    with socket.create_server((HOST, 0)) as server:
        return int(server.getsockname()[1])


def start_node(
    node: int, nnodes: int, port: int, ranks: int, script: pathlib.Path
) -> "subprocess.Popen[str]":
    dropped = ("TF_CONFIG", "PYTHONUNBUFFERED")
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "tfdist_ext.launch", "-n", str(ranks)),
            *("--nnodes", str(nnodes), "--node-rank", str(node)),
            *("--master", f"{HOST}:{port}", "--start-timeout", "20"),
            *("--grace", "2", str(script)),
        ],
        env={k: v for k, v in os.environ.items() if k not in dropped},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_nodes(
    tmp_path: pathlib.Path, ranks: list[int], body: str
) -> list["subprocess.CompletedProcess[str]"]:
    """Runs one launcher per entry of `ranks`, the last host first."""
    script = tmp_path / "train.py"
    script.write_text(
        "import json, os, signal, sys, time\n"
        "CONFIG = json.loads(os.environ['TF_CONFIG'])\n"
        "RANK = CONFIG['task']['index']\n" + textwrap.dedent(body)
    )
    port = free_port()
    nodes: list[subprocess.Popen[str]] = []
    try:
        for node in reversed(range(len(ranks))):
            nodes.append(
                start_node(node, len(ranks), port, ranks[node], script)
            )
            time.sleep(0.1)
        return [
            subprocess.CompletedProcess(
                node.args, code, *node.communicate(timeout=LIMIT)
            )
            for node in reversed(nodes)
            for code in [node.wait(LIMIT)]
        ]
    finally:
        for node in nodes:
            node.kill()
            node.communicate(timeout=LIMIT)


def test_three_hosts_agree_on_the_cluster(tmp_path: pathlib.Path) -> None:
    body = "print(json.dumps(CONFIG), flush=True)"
    ends = run_nodes(tmp_path, [2, 1, 3], body)
    assert [end.returncode for end in ends] == [0, 0, 0], ends
    configs = [
        [json.loads(line[line.index("{") :]) for line in e.stdout.splitlines()]
        for e in ends
    ]
    ranks = [sorted(c["task"]["index"] for c in node) for node in configs]
    assert ranks == [[0, 1], [2], [3, 4, 5]]
    clusters = [c["cluster"] for node in configs for c in node]
    assert all(cluster == clusters[0] for cluster in clusters)
    assert len(set(clusters[0]["worker"])) == 6


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_failure_on_one_host_stops_all(
    tmp_path: pathlib.Path, culprit: int
) -> None:
    body = f"""
        if RANK == {culprit}:
            time.sleep(0.5)
            sys.exit(9)
        time.sleep(600)
    """
    ends = run_nodes(tmp_path, [1, 1, 1], body)
    codes = [end.returncode for end in ends]
    assert codes == [9 if node == culprit else 1 for node in range(3)], ends
    assert all(f"rank {culprit} (pid " in end.stderr for end in ends)


def test_a_killed_launcher_stops_the_other_hosts(
    tmp_path: pathlib.Path,
) -> None:
    body = """
        if RANK == 1:
            time.sleep(0.5)
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
    """
    ends = run_nodes(tmp_path, [1, 1], body)
    assert [end.returncode for end in ends] == [1, -9]
    assert "lost host 1" in ends[0].stderr


def test_an_early_end_on_one_host_lets_the_others_go_on(
    tmp_path: pathlib.Path,
) -> None:
    body = "time.sleep(0.5 * RANK); print('done')"
    ends = run_nodes(tmp_path, [1, 1, 1], body)
    assert [end.returncode for end in ends] == [0, 0, 0], ends
    assert "done" in ends[2].stdout


def meet_as_master(port: int, outcome: list[object], timeout: float) -> None:
    try:
        meeting = rendezvous.meet(
            master=(HOST, port),
            node_rank=0,
            nnodes=2,
            host=None,
            ports=[1],
            timeout=timeout,
        )
    except rendezvous.RendezvousError as error:
        outcome.append(str(error))
        return
    with meeting:
        outcome.append(meeting.workers)


def start_master(
    timeout: float = 20.0,
) -> tuple[int, list[object], threading.Thread]:
    port, outcome = free_port(), []
    thread = threading.Thread(
        target=meet_as_master, args=(port, outcome, timeout), daemon=True
    )
    thread.start()
    return port, outcome, thread


def connect(port: int) -> socket.socket:
    deadline = time.monotonic() + LIMIT
    while True:
        try:
            return socket.create_connection((HOST, port), timeout=LIMIT)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.mark.parametrize(
    "noise",
    [
        b"",
        b"GET / HTTP/1.0\r\n\r\n",
        b"\xff\xfe\n",
        b"[]\n",
        b'{"node_rank": "x"}\n',
        b"x" * (2 << 20),
    ],
    ids=["nothing", "http", "not-utf8", "list", "no-number", "too-long"],
)
def test_noise_from_strangers_is_ignored(noise: bytes) -> None:
    port, outcome, thread = start_master()
    with connect(port) as stranger:
        try:
            stranger.sendall(noise)
            stranger.shutdown(socket.SHUT_WR)
            answer_to_noise = stranger.recv(100)
        except OSError:  # Sent away before it had finished.
            answer_to_noise = b""
    assert answer_to_noise == b""
    hello = {"nnodes": 2, "node_rank": 1, "workers": ["b:7"]}
    with connect(port) as launcher:
        launcher.sendall(json.dumps(hello).encode() + b"\n")
        answer = json.loads(launcher.makefile().readline())
    thread.join(LIMIT)
    assert answer == {"workers": [f"{HOST}:1", "b:7"], "first_rank": 1}
    assert outcome == [[f"{HOST}:1", "b:7"]]


@pytest.mark.parametrize("node, nnodes", [(1, 3), (0, 2), (2, 2)])
def test_hosts_that_disagree_are_told(node: int, nnodes: int) -> None:
    port, outcome, thread = start_master()
    hello = {"nnodes": nnodes, "node_rank": node, "workers": ["b:7"]}
    with connect(port) as launcher:
        launcher.sendall(json.dumps(hello).encode() + b"\n")
        answer = json.loads(launcher.makefile().readline())
    thread.join(LIMIT)
    assert f"came with --nnodes {nnodes}" in answer["error"]
    assert outcome == [answer["error"]]


def test_a_missing_host_is_named_in_time() -> None:
    begin = time.monotonic()
    _, outcome, thread = start_master(timeout=0.5)
    thread.join(LIMIT)
    assert time.monotonic() - begin < 10
    assert "hosts [1] of 2 did not come" in str(outcome)


def test_a_missing_master_is_reported_in_time() -> None:
    begin = time.monotonic()
    with pytest.raises(rendezvous.RendezvousError, match="did not answer"):
        rendezvous.meet(
            master=(HOST, free_port()),
            node_rank=1,
            nnodes=2,
            host=None,
            ports=[1],
            timeout=0.5,
        )
    assert time.monotonic() - begin < 10


def test_a_master_address_of_another_host_is_explained() -> None:
    with pytest.raises(rendezvous.RendezvousError, match="address of host 0"):
        rendezvous.meet(
            master=("192.0.2.1", 7000),  # TEST-NET-1, nobody's address.
            node_rank=0,
            nnodes=2,
            host=None,
            ports=[1],
            timeout=0.5,
        )
