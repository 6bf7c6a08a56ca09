# SPDX-License-Identifier: Apache-2.0
"""Tests of tfdist-run --hostfile.

What stands for ssh runs the command here, in an empty environment, and writes
down its own command line. Where the real one is installed with its server,
that is tried too.
"""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import time

import pytest

from tests.launch.launcher import LIMIT
from tests.launch.launcher import check_all_dead
from tests.launch.launcher import launch
from tests.launch.launcher import read_pids
from tests.launch.launcher import started
from tfdist_ext.launch import launch_options

SSH = """#!/bin/sh
echo "$@" >> {log}
for word; do host=$command; command=$word; done
case $host in
10.*) echo "ssh: connect to host $host port 22: No route" >&2; exit 255 ;;
esac
if [ -e {log}.down ]; then
  case $host in me@*)
    [ -s {log}.down ] || rm {log}.down
    echo "ssh: connect to host $host port 22: Refused" >&2; exit 255 ;;
  esac
fi
echo "Welcome to $host"
env -i PATH="$PATH" sh -c "$command"
"""
HOSTS = "127.0.0.1 slots=2\nme@127.0.0.2  # one\n"


@pytest.fixture
def hosts(tmp_path, monkeypatch):
    """Writes a file of hosts; the options that name it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    ssh = folder / "ssh"
    ssh.write_text(SSH.format(log=tmp_path / "log"))
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    # The package comes from where it is, as it would from an installation.
    root = pathlib.Path(launch_options.__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", str(root))

    def write(text=HOSTS):
        path = tmp_path / "hosts"
        path.write_text(text)
        return ["--hostfile", str(path)]

    return write


def test_all_ranks_of_all_hosts_are_one_job(hosts, program, tmp_path) -> None:
    script = program("""
        wanted = {k: os.environ.get(k) for k in ("TFDIST_SECRET", "TF_X", "Y")}
        print("=", json.dumps([CONFIG, wanted, sys.argv[1:]]), flush=True)
    """)
    done = launch(
        *hosts(),
        *("--env", "Y=a b", script, "it's"),
        TF_X="1",
        TFDIST_SECRET="of the user",
    )
    assert done.returncode == 0, done.stderr
    lines = [line.partition("= ") for line in done.stdout.splitlines()]
    assert sorted(line[0] for line in lines) == ["", "[1] ", "[2] "]
    said = [json.loads(line[2]) for line in sorted(lines)]
    workers = said[0][0]["cluster"]["worker"]
    heads = [worker.partition(":")[0] for worker in workers]
    assert heads == ["127.0.0.1", "127.0.0.1", "127.0.0.2"]
    for rank, (config, variables, arguments) in enumerate(said):
        assert config["task"] == {"type": "worker", "index": rank}
        assert config["cluster"] == {"worker": workers}
        assert arguments == ["it's"]
        assert variables == {**said[0][1], "TF_X": "1", "Y": "a b"}
    secret = said[0][1]["TFDIST_SECRET"]
    log = (tmp_path / "log").read_text()
    assert len(secret) == 64 and secret not in log and "a b" not in log
    assert log.count("-o BatchMode=yes") == 2, log
    assert "Welcome to me@127.0.0.2" in done.stderr
    fewer = launch(*hosts(), "-n", "1", "--ssh-options", "-p 9", script)
    assert fewer.stdout.count("127.0.0.") == 1, fewer.stdout + fewer.stderr
    assert "-p 9 " in (tmp_path / "log").read_text()


def test_a_failure_on_one_host_ends_the_others(hosts, program) -> None:
    script = program("""
        print("pid", os.getpid(), flush=True)
        meet()
        if RANK == 2:
            time.sleep(1.5)
            sys.exit(9)
        time.sleep(600)
    """)
    with started(*hosts(), "--stats-every", "1", script) as process:
        pids = read_pids(process, 3)
        _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 9
    assert errors.count("tfdist-run: no rank has a strategy") >= 1
    assert "rank 2 (pid" in errors and "127.0.0.2" in errors
    assert "ranks on host me@127.0.0.2 failed: exit code 9" in errors
    check_all_dead(pids)


def test_a_host_out_of_reach_is_named(hosts, program) -> None:
    script = program("print('started')")
    done = launch(*hosts("127.0.0.3\n10.0.0.9 slots=4\n"), script)
    assert done.returncode == 2  # one of the two is of this host only
    assert "name this host as they do" in done.stderr
    done = launch(*hosts("10.0.0.9 slots=4\n"), script)
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        "tfdist-run: cannot start ranks on host 10.0.0.9: exit code 255, ssh: "
        "connect to host 10.0.0.9 port 22: No route\n"
    ) in done.stderr


FAILS = """
start = os.environ["TFDIST_RESTART"]
print(f"start {start} rank {RANK} of", len(CONFIG["cluster"]["worker"]))
sys.stdout.flush()
if start == "0" and RANK == 2:
    open(sys.argv[1], "w").write(sys.argv[2])
    sys.exit(9)
if start == "0":
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("down", "options", "ranks"),
    [("", [], 3), ("for good", ["--min-ranks", "2"], 2)],
    ids=["comes back", "stays away"],
)
def test_all_hosts_start_again(
    hosts, program, tmp_path, down, options, ranks
) -> None:
    """While one that has failed is out of reach, for a while or for good."""
    away = str(tmp_path / "log.down")
    done = launch(
        *(*hosts(), *options, "--max-restarts", "2", "--grace", "1"),
        *("--restart-timeout", "8" if ranks == 3 else "3"),
        *("--log-dir", str(tmp_path / "logs"), program(FAILS), away, down),
    )
    assert done.returncode == 0, done.stderr
    assert "me@127.0.0.2 failed: exit code 9" in done.stderr
    assert "starts again (1 of 2 restarts)" in done.stderr
    said = f"goes on with {ranks} ranks, without hosts that did not come back: "
    assert (f"{said}me@127.0.0.2\n" in done.stderr) == (ranks == 2)
    for rank in range(ranks):
        assert f"start 1 rank {rank} of {ranks}\n" in done.stdout
    logs = sorted(path.name for path in tmp_path.glob("logs/restart-1/*"))
    assert logs == [f"rank-{rank}.log" for rank in range(ranks)]


def test_a_host_that_stays_away_is_named(hosts, program, tmp_path) -> None:
    """Nor does it start again where the launcher is told to stop."""
    away = str(tmp_path / "log.down")
    arguments = (*hosts(), "--max-restarts", "1", "--grace", "1")
    failing = (program(FAILS), away, "for good")
    done = launch(*arguments, "--restart-timeout", "2", *failing)
    assert done.returncode == 1
    assert (
        "hosts me@127.0.0.2 did not start within --restart-timeout 2; host "
        "me@127.0.0.2: exit code 255, ssh: connect to host me@127.0.0.2 port"
    ) in done.stderr
    pathlib.Path(away).unlink()
    script = program(SAVES.replace("SECONDS", "0"))
    with started(*arguments, script) as process:
        pids = read_pids(process, 3)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 143
    assert "starts again" not in errors
    check_all_dead(pids)


SAVES = """
def save(*_):
    time.sleep(SECONDS)
    os.write(1, b"saved\\n")  # print may be what was interrupted
    sys.exit(143)

signal.signal(signal.SIGTERM, save)
print("pid", os.getpid(), flush=True)
time.sleep(600)
"""


def test_a_signal_comes_to_all_hosts(hosts, program) -> None:
    slow = program(SAVES.replace("SECONDS", "600 if RANK == 2 else 0.2"))
    with started(*hosts(), slow) as process:
        pids = read_pids(process, 3)
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(2)]
        assert sorted(said) == ["[1] saved\n", "saved\n"]
        assert process.poll() is None  # rank 2 has 30 seconds
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=LIMIT / 2)
    assert process.returncode == 143
    check_all_dead(pids)


def test_a_rank_of_any_host_that_could_not_save_is_told(hosts, program) -> None:
    failing = SAVES.replace("SECONDS", "0").replace(
        "143", "74 if RANK == 2 else 143"
    )
    with started(*hosts(), program(failing)) as process:
        read_pids(process, 3)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 74, errors
    assert "could not save its last state: exit code 74" in errors


def test_no_host_keeps_ranks_without_the_launcher(hosts, program) -> None:
    with started(*hosts(), program(SAVES.replace("SECONDS", "0"))) as process:
        pids = read_pids(process, 3)
        process.kill()
        check_all_dead(pids)


@contextlib.contextmanager
def ssh_server(folder):
    """A server of ssh on this host; the options for its client."""
    for name in ("host", "user"):
        path = str(folder / name)
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path]
        subprocess.run(command, check=True, timeout=LIMIT)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    config = folder / "sshd_config"
    config.write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\n"
        f"AuthorizedKeysFile {folder}/user.pub\nStrictModes no\nUsePAM no\n"
        f"PidFile none\nPermitRootLogin yes\n"
    )
    command = [shutil.which("sshd", path="/usr/sbin"), "-D", "-e", "-f", config]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as server:
        try:
            yield (
                f"-F /dev/null -p {port} -i {folder}/user -o LogLevel=ERROR "
                "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
            )
        finally:
            server.terminate()


def test_the_real_ssh(tmp_path, program, monkeypatch) -> None:
    if not (shutil.which("ssh") and shutil.which("sshd", path="/usr/sbin")):
        pytest.skip("no ssh with a server is installed")
    if os.getuid() == 0:
        pathlib.Path("/run/sshd").mkdir(exist_ok=True)
    root = pathlib.Path(launch_options.__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", str(root))
    script = program(SAVES.replace("SECONDS", "0.2"))
    path = tmp_path / "hosts"
    path.write_text("127.0.0.1 slots=2\n")
    with ssh_server(tmp_path) as options:
        arguments = ["--hostfile", str(path), "--ssh-options", options, script]
        begin = time.monotonic()
        while launch(*arguments[:-1], program("pass")).returncode != 0:
            assert time.monotonic() - begin < LIMIT  # until it listens
        program(SAVES.replace("SECONDS", "0.2"))
        with started(*arguments) as process:
            pids = read_pids(process, 2)
            process.send_signal(signal.SIGTERM)
            output, errors = process.communicate(timeout=LIMIT)
            assert process.returncode == 143, errors
        assert sorted(output.split()) == ["[1]", "saved", "saved"]
        check_all_dead(pids)
        with started(*arguments) as process:
            pids = read_pids(process, 2)
            process.kill()
            check_all_dead(pids)


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "names no host"),
        ("a\n-oProxyCommand=x slots=2", "line 2: '-oProxyCommand=x' is no"),
        ("a:4", "line 1: 'a:4' is not a name"),
        ("[fd00::1]:4", r"'\[fd00::1\]:4' is not a name"),
        ("[10.0.0.1]", r"'\[10.0.0.1\]' is not a name"),
        ("me@-fd00::1", "'me@-fd00::1' is not a name"),
        ("fe80::1%$(x)", r"'fe80::1%\$\(x\)' is not a name"),
        ("a slots=0", "slots must be from 1 to 4096, not '0'"),
        ("a cpu=2", "'cpu=2' is not slots=N"),
        (None, "cannot be read"),
    ],
)
def test_wrong_files_are_explained(tmp_path, text, message) -> None:
    path = tmp_path / "hosts"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message):
        launch_options.read_hostfile(path)


def test_addresses_of_ipv6_are_hosts(tmp_path) -> None:
    path = tmp_path / "hosts"
    path.write_text(
        "[fd00::1] slots=2\nme@[FD00::0:2]\nfd00::1\nfe80::3%eth0\n"
    )
    read = launch_options.read_hostfile(path)
    assert read == [
        launch_options.Host("fd00::1", 3),
        launch_options.Host("me@fd00::2", 1),
        launch_options.Host("fe80::3%eth0", 1),
    ]
    assert read[1].name == "fd00::2"


def test_hosts_of_ipv6_are_one_job(hosts, program, tmp_path) -> None:
    script = program("print('=', json.dumps(CONFIG['cluster']['worker']))")
    done = launch(*hosts("[::1]\nme@[::1] slots=1\n"), script)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        workers = json.loads(line.partition("= ")[2])
        heads = [worker.rpartition(":")[0] for worker in workers]
        assert heads == ["[::1]", "[::1]"], done.stdout
    log = (tmp_path / "log").read_text().splitlines()
    logins = [line.partition(" cd ")[0].rpartition(" ")[2] for line in log]
    assert sorted(logins) == ["::1", "me@::1"]


def test_the_first_slots_are_taken(tmp_path) -> None:
    path = tmp_path / "hosts"
    path.write_text("b slots=2 max_slots=9\n\nme@a # one\nb\n")
    read = launch_options.read_hostfile(path)
    assert read == [launch_options.Host("b", 3), launch_options.Host("me@a", 1)]
    assert [host.name for host in read] == ["b", "a"]
    assert launch_options.first_hosts(read, 2) == [launch_options.Host("b", 2)]
    assert launch_options.first_hosts(read, 4) == read
    with pytest.raises(ValueError, match="5 ranks do not fit into 4 slots"):
        launch_options.first_hosts(read, 5)
