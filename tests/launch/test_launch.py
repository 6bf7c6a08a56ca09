# SPDX-License-Identifier: Apache-2.0
"""Tests of tfdist-run with tiny programs that do not need TensorFlow.

Every launcher runs in a process of its own with a limit: one that hangs fails
its test instead of the whole run.
"""

import json
import os
import pathlib
import pty
import socket
import subprocess
import sys

import pytest

from tests.launch.launcher import LAUNCHER
from tests.launch.launcher import LIMIT
from tests.launch.launcher import environment
from tests.launch.launcher import launch
from tfdist_ext.comm import listener
from tfdist_ext.launch import launch_options


def test_every_rank_gets_its_tf_config(program) -> None:
    done = launch("-n", "3", program("print(json.dumps(CONFIG), flush=True)"))
    assert done.returncode == 0, done.stderr
    lines = sorted(
        (line.partition("{") for line in done.stdout.splitlines()),
        key=lambda parts: parts[0],
    )
    configs = [json.loads(brace + rest) for _, brace, rest in lines]
    assert [prefix for prefix, _, _ in lines] == ["", "[1] ", "[2] "]
    assert [c["task"] for c in configs] == [
        {"type": "worker", "index": rank} for rank in range(3)
    ]
    workers = configs[0]["cluster"]["worker"]
    assert all(c["cluster"] == {"worker": workers} for c in configs)
    assert len(set(workers)) == 3
    assert all(address.startswith("127.0.0.1:") for address in workers)


def test_rank_0_gets_a_port_of_the_range(program) -> None:
    script = program("print(CONFIG['cluster']['worker'][0])")
    with listener.reserve_ports(1, "127.0.0.1", range(21000, 21100)) as held:
        known = f"{held[0]}-{held[0] + 9}"
        done = launch("-n", "2", script, TFDIST_PORT_RANGE=known)
        assert done.returncode == 0, done.stderr
        _, port = done.stdout.splitlines()[0].split(":")
        assert held[0] < int(port) <= held[0] + 9
        only = f"{held[0]}-{held[0]}"
        done = launch("-n", "2", script, TFDIST_PORT_RANGE=only)
        assert done.returncode == 1
        assert f"ports {held[0]} to {held[0]} are all taken" in done.stderr
    done = launch("-n", "2", script, TFDIST_PORT_RANGE="many")
    assert done.returncode == 1
    assert "Received: TFDIST_PORT_RANGE=many" in done.stderr


def test_a_rank_can_bind_its_port(program) -> None:
    done = launch(
        "-n",
        "2",
        program("""
            import socket
            host, port = CONFIG["cluster"]["worker"][RANK].split(":")
            assert os.environ["TFDIST_PORT_IS_HELD"] == "1"
            assert len(os.environ["TFDIST_SECRET"]) == 64
            with socket.socket() as server:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                server.bind(("", int(port)))
                server.listen()
                for _ in range(20):  # None of them may reach the launcher.
                    socket.create_connection((host, int(port)), 1).close()
                    server.accept()[0].close()
            with socket.socket() as peer:
                try:
                    peer.bind((host, int(port)))
                except OSError:
                    print("refused")
        """),
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[1] refused", "refused"]


def test_arguments_module_and_variables_are_passed_on(
    tmp_path: pathlib.Path,
) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(
        "import os, sys; print(sys.argv[1:], os.environ['COLOUR'])"
    )
    done = launch(
        *("-n", "1", "--env", "COLOUR=a=b", "-m"),
        *("package.train", "-n", "5", "--help"),
        PYTHONPATH=f"{tmp_path}:{os.getcwd()}",
    )
    assert done.stdout == "['-n', '5', '--help'] a=b\n", done.stderr


@pytest.mark.parametrize("given", [None, "17"])
def test_ranks_share_the_cores(program, given: str | None) -> None:
    names = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")
    script = program(f"print(*[os.environ[name] for name in {names}])")
    cores = len(os.sched_getaffinity(0))
    changes = dict.fromkeys(names, given) if given else {}
    done = launch("-n", "2", script, **changes)
    expected = given or str(max(1, cores // 2))
    assert f"\n{done.stdout}".count(f"{expected} {expected}\n") == 2


@pytest.mark.parametrize(
    "visible, expected",
    [("4,5,6", ["4", "[1] 5"]), ("4", ["4", "[1] 4"]), ("", ["", "[1] "])],
)
def test_each_rank_gets_a_gpu_if_there_are_enough(
    program, visible: str, expected: list[str]
) -> None:
    script = program("print(os.environ['CUDA_VISIBLE_DEVICES'])")
    done = launch("-n", "2", script, CUDA_VISIBLE_DEVICES=visible)
    assert sorted(done.stdout.splitlines()) == expected


def test_other_ranks_show_whole_lines_without_bars(program) -> None:
    bar = "3/10 \u2501\u2501\u2501 1s 5ms/step - loss: 1.0"
    script = program(f"""
        write = sys.stdout.write
        if RANK == 0:
            write("\\b\\b\\b\\r{bar}\\n")
            sys.exit(0)
        write("Epoch 1/2\\n")
        write("\\x1b[1m{bar}\\x1b[0m\\n")
        write("5/Unknown {bar[5:]}\\n")
        write("\\b\\b\\b\\r{bar}" * 3 + "\\n")
        write("3/10 [=====>......] - 1s\\n")
        write("step 1\\rstep 2\\rstep 3\\n")
        sys.stdout.flush()
        write("10/10 rows [ok]\\n")
        write("no newline at the end")
    """)
    done = launch("-n", "2", script)
    shown = [x for x in done.stdout.split("\n") if x.startswith("[1] ")]
    assert shown == [
        "[1] Epoch 1/2",
        "[1] step 3",
        "[1] 10/10 rows [ok]",
        "[1] no newline at the end",
    ]
    assert "\b\b\b\r" + bar in done.stdout  # Rank 0's bar is as it was.


def test_lines_of_ranks_are_not_mixed(program) -> None:
    """Also where every part of a line is a write of its own."""
    script = program("""
        for number in range(300):
            print("line", number, "of rank", RANK)
    """)
    done = launch("-n", "3", script, PYTHONUNBUFFERED="1")
    assert sorted(done.stdout.splitlines()) == sorted(
        f"{prefix}line {number} of rank {rank}"
        for rank, prefix in enumerate(("", "[1] ", "[2] "))
        for number in range(300)
    )


def started(*arguments: str) -> subprocess.Popen[str]:
    """A launcher whose output can be read while it runs."""
    return subprocess.Popen(
        [*LAUNCHER, *arguments],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_prompt_of_rank_0_is_shown(program) -> None:
    """A line without an end is held back for a second only."""
    script = program("""
        if RANK == 0:
            sys.stdout.write("begun\\nname: ")
            sys.stdout.flush()
            print(sys.stdin.readline().strip())
    """)
    with started("-n", "2", script) as job:
        shown = ""
        while not shown.endswith("name: "):
            character = job.stdout.read(1)
            assert character, f"ended after {shown!r}"
            shown += character
        shown += job.communicate("it\n", timeout=LIMIT)[0]
    assert (shown, job.returncode) == ("begun\nname: it\n", 0)


def test_rank_0_ends_with_the_reader_of_its_output(program) -> None:
    script = program("""
        while True:
            print("again", flush=True)
            time.sleep(0.01)
    """)
    with started("-n", "2", script) as job:
        assert "again" in job.stdout.readline()
        job.stdout.close()
        job.stdout = None
        errors = job.communicate(timeout=LIMIT)[1]
    assert "BrokenPipeError" in errors
    assert job.returncode != 0


def test_rank_0_keeps_the_terminal(program, tmp_path: pathlib.Path) -> None:
    script = program("""
        width = os.get_terminal_size(1).columns if RANK == 0 else "unknown"
        print(sys.stdout.isatty(), width)
    """)
    for extra in ([], ["--log-dir", str(tmp_path)]):
        ours, theirs = pty.openpty()
        try:
            subprocess.run(
                ["stty", "cols", "123"], stdin=theirs, check=True, timeout=LIMIT
            )
            code = subprocess.run(
                [*LAUNCHER, "-n", "2", *extra, script],
                env=environment(),
                stdin=theirs,
                stdout=theirs,
                timeout=LIMIT,
                check=False,
            ).returncode
            output = os.read(ours, 4096).decode().replace("\r\n", "\n")
        finally:
            os.close(ours)
            os.close(theirs)
        assert code == 0
        assert sorted(output.splitlines()) == ["True 123", "[1] False unknown"]
    assert (tmp_path / "rank-0.log").read_text() == "True 123\n"


def test_logs_hold_everything(program, tmp_path: pathlib.Path) -> None:
    script = program("""
        print("1/2 [=>..] - 1s", flush=True)
        print("trouble", file=sys.stderr, flush=True)
    """)
    done = launch("-n", "2", "--log-dir", str(tmp_path / "new"), script)
    for rank in range(2):
        log = (tmp_path / "new" / f"rank-{rank}.log").read_text()
        assert sorted(log.splitlines()) == ["1/2 [=>..] - 1s", "trouble"]
    assert done.stdout == "1/2 [=>..] - 1s\n"
    assert sorted(done.stderr.splitlines()) == ["[1] trouble", "trouble"]


def test_tf_config_of_a_cluster_manager_is_taken_as_it_is(program) -> None:
    config = json.dumps(
        {
            "cluster": {"worker": ["a:1", "b:2"]},
            "task": {"type": "worker", "index": 0},
        }
    )
    script = program("print(os.environ['TF_CONFIG'])")
    for count in ([], ["-n", "1"]):
        done = launch(*count, script, TF_CONFIG=config)
        assert done.stdout == config + "\n"
    refused = launch("-n", "2", script, TF_CONFIG=config)
    assert refused.returncode == 2
    assert "TF_CONFIG is set" in refused.stderr


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["-n", "0"], "at least 1"),
        (["-n", "1e9"], "at most 4096, not 1e9"),
        (["--nnodes", "1000000000"], "at most 4096"),
        (["--grace", "soon"], "must be seconds, not soon"),
        (["--env", "X"], "must be NAME=VALUE"),
        (["--env", "TF_CONFIG={}"], "cannot set TF_CONFIG"),
        (["--host", "a:1"], "without a port, not a:1"),
        (["--master", "a:99999"], "for IPv6, not a:99999"),
        (["--nnodes", "2"], "needs --node-rank and --master"),
        (["--hostfile", "/none"], "cannot be read: [Errno 2]"),
        (["--hostfile", "/none", "--nnodes", "2"], "leave --nnodes"),
        (["--ssh-options", "'"], "No closing quotation"),
        (["--node-rank", "1"], "need --nnodes of at least 2"),
        (["--nnodes", "2", "--master", "a"], "must be HOST:PORT"),
        (["--nnodes", "2", "--master", "fd00::1:7000"], "[HOST]:PORT for IPv6"),
        (["--host", "fd00::zz"], "must be a name or an address"),
        (
            ["--nnodes", "2", "--node-rank", "2", "--master", "a:1"],
            "must be in [0, 2)",
        ),
    ],
)
def test_wrong_options_are_explained(arguments, message: str) -> None:
    done = launch(*arguments, "train.py")
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_is_held_for_ranks_of_ipv4_and_ipv6(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with listener.reserve_ports(1, "") as reserved:
        address = (host, reserved[0])
        with pytest.raises(OSError, match="in use"):
            socket.create_server(address, family=family)
        with (
            socket.create_server(address, family=family, reuse_port=True),
            socket.create_connection(address, timeout=LIMIT),
        ):
            pass


def test_addresses_of_ipv6_are_understood() -> None:
    arguments = ["--nnodes", "2", "--node-rank", "0", "--master", "[fd00::1]:7"]
    options = launch_options.parse([*arguments, "--host", "fd00::2", "x.py"])
    assert options.master == ("fd00::1", 7)
    assert options.host == "fd00::2"


def test_what_cannot_be_started_is_said_without_a_traceback(program) -> None:
    done = launch("-n", "2", "--log-dir", os.devnull, program("print(1)"))
    assert done.returncode == 1
    assert done.stderr.startswith("tfdist-run: cannot start 2 ranks: ")


def test_a_missing_ssh_is_said_without_a_traceback(program, tmp_path) -> None:
    path = tmp_path / "hosts"
    path.write_text("127.0.0.1\n")
    done = launch("--hostfile", str(path), program("print(1)"), PATH=os.devnull)
    assert done.returncode == 1
    assert done.stderr == (
        "tfdist-run: cannot start 1 ranks: [Errno 2] No such file or "
        "directory: 'ssh'\n"
    )


def test_one_rank_runs_under_another_launcher(program, tmp_path) -> None:
    path = tmp_path / "rank.py"
    path.write_text(
        "import os; print('TF_CONFIG' in os.environ, os.environ['RANK'])"
    )
    placed = {"WORLD_SIZE": "4", "RANK": "2", "MASTER_ADDR": "127.0.0.1"}
    done = launch(str(path), **placed)
    assert (done.returncode, done.stdout) == (0, "[2] False 2\n"), done.stderr
    refused = launch("-n", "2", str(path), **placed)
    assert refused.returncode == 2
    assert "has started tfdist-run 4 times" in refused.stderr
    assert "unset WORLD_SIZE" in refused.stderr
    lost = launch(str(path), OMPI_COMM_WORLD_SIZE="2")
    assert lost.returncode == 2
    assert "OMPI_COMM_WORLD_RANK is missing" in lost.stderr
    script = program("print(len(CONFIG['cluster']['worker']))")
    alone = {"OMPI_COMM_WORLD_SIZE": "1", "SLURM_NTASKS": "2"}
    assert launch(script, **alone).stdout == "1\n"


def test_the_launcher_does_not_load_tensorflow() -> None:
    code = (
        "import sys, tfdist_ext.launch;"
        "print([m for m in sys.modules if m in ('tensorflow', 'keras')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=True,
    )
    assert done.stdout == "[]\n"


def test_check_tells_the_ranks(program) -> None:
    script = program("print(os.environ['TFDIST_CHECK'])")
    assert launch("-n", "1", "--check", "error", script).stdout == "error\n"
    done = launch("-n", "1", "--check", "some", script)
    assert done.returncode == 2
    assert "--check: must be one of auto, always, error, off" in done.stderr
