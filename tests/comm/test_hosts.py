# SPDX-License-Identifier: Apache-2.0
"""Tests of tfdist-run on several hosts, which all are this one.

The launchers run as processes with a limit; what an unauthenticated peer may
send is tested on `exchange_addresses` itself, and on its listener in
test_listener.py.
"""

import contextlib
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

from tfdist_ext.comm import connector
from tfdist_ext.comm import hosts
from tfdist_ext.comm.handshake import Job
from tfdist_ext.comm.handshake import Link
from tfdist_ext.comm.listener import Listener
from tfdist_ext.launch import command

LIMIT = 30.0
HOST = "127.0.0.1"
SECRET = b"0123456789abcdef" * 2


def free_port() -> int:
    with socket.create_server((HOST, 0)) as server:
        return int(server.getsockname()[1])


def start_node(
    node: int,
    nnodes: int,
    port: int,
    ranks: int,
    script: pathlib.Path,
    environment: dict[str, str],
) -> "subprocess.Popen[str]":
    dropped = ("TF_CONFIG", "PYTHONUNBUFFERED", "TFDIST_SECRET")
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "tfdist_ext.launch", "-n", str(ranks)),
            *("--nnodes", str(nnodes), "--node-rank", str(node)),
            *("--master", f"{HOST}:{port}", "--start-timeout", "20"),
            *("--grace", "2", str(script)),
        ],
        env={
            **{k: v for k, v in os.environ.items() if k not in dropped},
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_nodes(
    tmp_path: pathlib.Path,
    ranks: list[int],
    body: str,
    environment: dict[str, str] | None = None,
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
                start_node(
                    node,
                    len(ranks),
                    port,
                    ranks[node],
                    script,
                    environment or {},
                )
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


def meet_as_master(
    port: int, outcome: list[object], timeout: float, secret: bytes
) -> None:
    try:
        meeting = hosts.exchange_addresses(
            master=(HOST, port),
            node_rank=0,
            nnodes=2,
            host=None,
            ports=[1],
            timeout=timeout,
            secret=secret,
        )
    except hosts.RendezvousError as error:
        outcome.append(str(error))
        return
    with meeting:
        outcome.append(meeting.workers)


def start_master(
    timeout: float = 20.0, secret: bytes = SECRET
) -> tuple[int, list[object], threading.Thread]:
    port, outcome = free_port(), []
    thread = threading.Thread(
        target=meet_as_master,
        args=(port, outcome, timeout, secret),
        daemon=True,
    )
    thread.start()
    return port, outcome, thread


def connect(port: int, node: int = 1) -> Link:
    """A launcher of our own that has come to the master."""
    until = time.monotonic() + LIMIT
    return Link(
        connector.connect((HOST, port), Job("hosts", SECRET), node, until),
        "host 0",
    )


def test_unauthenticated_peers_delay_nobody() -> None:
    """Silent ones, and such as talk nonsense, before and after the host."""
    port, outcome, thread = start_master(timeout=LIMIT)
    peers = []
    for noise in (
        b"",
        b"",
        b"",
        b"",
        b"GET / HTTP/1.0\r\n\r\n",
        b"[" * 500_000,
    ):
        link = connect_anyhow(port)
        peers.append(link)
        with contextlib.suppress(OSError):
            link.sendall(noise)
    launcher = connect(port)
    launcher.send({"nnodes": 2, "workers": ["b:7"]}, LIMIT)
    answer = launcher.receive(LIMIT)
    thread.join(LIMIT)
    for link in peers:
        link.close()
    workers = [f"{HOST}:1", "b:7"]
    assert answer == {"workers": workers, "first_rank": 1, "secret": ""}
    assert outcome == [[f"{HOST}:1", "b:7"]]


def come(port: int, node: int, secret: bytes = SECRET) -> None:
    """Comes to the master as a launcher."""
    hosts.exchange_addresses(
        master=(HOST, port),
        node_rank=node,
        nnodes=2,
        host=None,
        ports=[1],
        timeout=LIMIT,
        secret=secret,
    )


def connect_anyhow(port: int) -> socket.socket:
    deadline = time.monotonic() + LIMIT
    while True:
        try:
            return socket.create_connection((HOST, port), timeout=LIMIT)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_a_host_that_disagrees_is_told() -> None:
    port, outcome, thread = start_master()
    launcher = connect(port)
    launcher.send({"nnodes": 3, "workers": ["b:7"]}, LIMIT)
    answer = launcher.receive(LIMIT)
    thread.join(LIMIT)
    assert answer is not None
    assert "connected with --nnodes 3; expected 2" in answer["error"]
    assert outcome == [answer["error"]]


@pytest.mark.parametrize("node", [2, 5, -1])
def test_a_host_with_a_number_of_no_host_is_refused(node: int) -> None:
    port, outcome, thread = start_master(timeout=4.0)
    with pytest.raises(hosts.RendezvousError, match="--nnodes differs"):
        come(port, node)
    thread.join(LIMIT)
    assert "hosts [1] of 2 did not connect" in str(outcome)
    assert "Refused: 127.0.0.1:" in str(outcome)


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 500_000,
        b'{"nnodes": Infinity, "workers": []}',
        b'{"nnodes": 2, "workers": {"a": 1}}',
        b'{"nnodes": 2, "workers": [1]}',
        b'{"nnodes": 2}',
        b"\xff",
    ],
    ids=lambda line: line[:30].decode(errors="replace"),
)
def test_a_host_that_sends_nonsense_is_named(line: bytes) -> None:
    port, outcome, thread = start_master()
    until = time.monotonic() + LIMIT
    connection = connector.connect((HOST, port), Job("hosts", SECRET), 1, until)
    connection.sendall(line + b"\n")
    answer = Link(connection, "host 0").receive(LIMIT)
    thread.join(LIMIT)
    connection.close()
    assert answer == {"error": outcome[0]}
    assert str(outcome[0]).startswith("host 1 (127.0.0.1:")


def test_a_secret_keeps_others_out(tmp_path: pathlib.Path) -> None:
    """It is not sent, and the ranks find it where the launcher has."""
    body = "print(os.environ['TFDIST_SECRET'], flush=True)"
    environment = {"TFDIST_SECRET": "of this job"}
    ends = run_nodes(tmp_path, [1, 1], body, environment)
    assert [end.returncode for end in ends] == [0, 0], ends
    assert all("of this job" in end.stdout for end in ends)
    port, outcome, thread = start_master(timeout=4.0, secret=b"of this job")
    with pytest.raises(hosts.RendezvousError, match="another secret"):
        come(port, 1, b"another")
    thread.join(LIMIT)
    assert "did not connect" in str(outcome)


def test_without_a_secret_the_ranks_get_one_of_their_own(
    tmp_path: pathlib.Path,
) -> None:
    body = "print(os.environ['TFDIST_SECRET'], flush=True)"
    ends = run_nodes(tmp_path, [1, 2], body)
    assert [end.returncode for end in ends] == [0, 0], ends
    printed = "".join(end.stdout for end in ends).split()
    found = {word for word in printed if len(word) == 64}
    assert len(found) == 1, ends


def test_without_a_secret_other_hosts_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("TFDIST_SECRET", "TFDIST_SECRET_FILE", "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    arguments = ["--nnodes", "2", "--node-rank", "1"]
    assert command.main([*arguments, "--master", "10.9.8.7:7000", "x.py"]) == 1
    error = capsys.readouterr().err
    assert "no secret, so anybody who reaches --master 10.9.8.7:7000" in error
    assert "--allow-unauthenticated" in error


def test_launchers_of_another_user_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On loopback without a secret the kernel tells whose they are."""
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    port, outcome, thread = start_master(timeout=4.0, secret=b"")
    with pytest.raises(hosts.RendezvousError, match="of user 0 listens there"):
        hosts.exchange_addresses(
            master=(HOST, port),
            node_rank=1,
            nnodes=2,
            host=None,
            ports=[1],
            timeout=3.0,
        )
    thread.join(LIMIT)
    assert "(another user)" in str(outcome)


def test_hosts_of_ipv6_meet() -> None:
    """Their ranks get addresses that can be used."""
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        port = server.getsockname()[1]
    found: list[list[str]] = []

    def run(node: int) -> None:
        with hosts.exchange_addresses(
            master=("::1", port),
            node_rank=node,
            nnodes=2,
            host=None,
            ports=[node + 1],
            timeout=LIMIT,
            secret=SECRET,
        ) as meeting:
            found.append(meeting.workers)

    threads = [threading.Thread(target=run, args=[node]) for node in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert found == [["[::1]:1", "[::1]:2"]] * 2


def test_a_host_that_is_lost_is_noticed_while_others_wait() -> None:
    """Later an interruption may last as long as the ranks allow."""
    option = (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    keepalive = (socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    with (
        socket.create_server((HOST, 0)) as server,
        socket.create_connection(server.getsockname()) as connection,
    ):
        link = Link(connection, "host 1")
        assert connection.getsockopt(*option) == 9000
        assert connection.getsockopt(*keepalive)
        with hosts.Rendezvous([link], ["a:1", "b:1"], 0, ""):
            assert connection.getsockopt(*option) == 0
            assert not connection.getsockopt(*keepalive)


def test_launchers_start_again_while_others_wait() -> None:
    """Any of them, host 0 too; nobody gets an address of before."""
    port = free_port()
    ends: dict[object, object] = {}

    def run(node: int, name: object, ports: list[int]) -> threading.Thread:
        def meet() -> None:
            with hosts.exchange_addresses(
                master=(HOST, port),
                node_rank=node,
                nnodes=4,
                host=None,
                ports=ports,
                timeout=LIMIT,
                secret=SECRET,
            ) as meeting:
                ends[name] = meeting.workers

        thread = threading.Thread(target=meet, daemon=True)
        thread.start()
        return thread

    threads = [run(2, 2, [3])]
    with Listener(
        (HOST, port), [1, 2, 3]
    ) as first:  # a launcher that is killed
        until = time.monotonic() + LIMIT
        for _, came in first.accept(Job("hosts", SECRET), until):
            came.close()
            break
    threads.append(run(0, 0, [1]))
    killed = connect(port)
    killed.send({"nnodes": 4, "workers": [f"{HOST}:9"]}, LIMIT)
    killed.close()
    threads += [run(1, 1, [2]), run(3, 3, [4])]
    for thread in threads:
        thread.join(LIMIT)
    expected = [f"{HOST}:{number}" for number in (1, 2, 3, 4)]
    assert ends == dict.fromkeys(range(4), expected)


@pytest.mark.parametrize("numeric", ["127.0.1.1", "::1"])
def test_a_master_that_is_loopback_to_itself_is_refused(
    numeric: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in Debian's /etc/hosts."""
    family = socket.AF_INET6 if ":" in numeric else socket.AF_INET
    found = [(family, socket.SOCK_STREAM, 6, "", (numeric, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(hosts.RendezvousError, match=rf"'n0' to {numeric}"):
        hosts.exchange_addresses(
            master=("n0", free_port()),
            node_rank=0,
            nnodes=2,
            host=None,
            ports=[1],
            timeout=LIMIT,
            secret=SECRET,
        )


def test_a_missing_host_is_named_in_time() -> None:
    begin = time.monotonic()
    _, outcome, thread = start_master(timeout=0.5)
    thread.join(LIMIT)
    assert time.monotonic() - begin < 10
    assert "hosts [1] of 2 did not connect" in str(outcome)


def test_a_missing_master_is_reported_in_time() -> None:
    begin = time.monotonic()
    with pytest.raises(hosts.RendezvousError, match="did not answer"):
        hosts.exchange_addresses(
            master=(HOST, free_port()),
            node_rank=1,
            nnodes=2,
            host=None,
            ports=[1],
            timeout=0.5,
        )
    assert time.monotonic() - begin < 10


def test_a_master_address_of_another_host_is_explained() -> None:
    with pytest.raises(hosts.RendezvousError, match="address of host 0"):
        hosts.exchange_addresses(
            master=("192.0.2.1", 7000),  # TEST-NET-1, nobody's address.
            node_rank=0,
            nnodes=2,
            host=None,
            ports=[1],
            timeout=0.5,
        )
