# SPDX-License-Identifier: Apache-2.0
"""How launches end: failures, signals, and what must not be left behind."""

import signal
import subprocess
import sys
import time

import pytest

from tests.launch.launcher import LIMIT
from tests.launch.launcher import check_all_dead
from tests.launch.launcher import launch
from tests.launch.launcher import read_pids
from tests.launch.launcher import started
from tfdist_ext.launch import launch_options

SLEEPER = """
print("pid", os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("culprit", [0, 1])
def test_first_failure_stops_the_others(program, culprit: int) -> None:
    script = program(f"""
        print("pid", os.getpid(), flush=True)
        meet()
        if RANK == {culprit}:
            print("the reason", file=sys.stderr)
            sys.exit(7)
        time.sleep(600)
    """)
    begin = time.monotonic()
    with started("-n", "3", script) as process:
        pids = read_pids(process, 3)
        _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 7
    assert time.monotonic() - begin < 25  # Before anyone had to be killed.
    assert f"rank {culprit} (pid " in errors
    assert "failed: exit code 7" in errors
    if culprit:
        assert "[1] the reason" in errors
        assert errors.rstrip().endswith("\n  the reason")
    check_all_dead(pids)


def test_a_signal_is_reported_and_becomes_the_exit_code(program) -> None:
    script = program("""
        if RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    """)
    done = launch("-n", "2", script)
    assert done.returncode == 128 + signal.SIGKILL
    assert "failed: signal 9 (SIGKILL)" in done.stderr


def test_a_rank_that_ignores_sigterm_is_killed(program) -> None:
    script = program("""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("pid", os.getpid(), flush=True)
        meet()
        if RANK == 0:
            sys.exit(3)
        time.sleep(600)
    """)
    with started("-n", "2", "--grace", "0.5", script) as process:
        pids = read_pids(process, 2)
        _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 3
    assert f"rank 1 (pid {pids[0]}" in errors or f"(pid {pids[1]}" in errors
    assert "did not end within 0.5 s after SIGTERM: killed" in errors
    check_all_dead(pids)


def test_a_hung_rank_is_named_at_once(program) -> None:
    """By what the rank said that has failed, before the other is killed."""
    script = program("""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        meet()
        if RANK == 0:
            print("Error: rank 0: all_reduce 'x' (tag 1) failed: rank 1 "
                  "(127.0.0.1:9) sent nothing within 10 s", file=sys.stderr)
            sys.exit(1)
        print("pid", os.getpid(), flush=True)
        while True:
            time.sleep(0.1)
            print("still here", flush=True)
    """)
    with started("-n", "2", "--grace", "60", script) as process:
        (pid,) = read_pids(process, 1)
        lines = [process.stderr.readline() for _ in range(4)]
        told = "".join(line for line in lines if "tfdist-run: " in line)
        assert "rank 0 (pid " in told and "failed: exit code 1" in told
        assert "tfdist-run: rank 0 names rank 1 (127.0.0.1:9) sent " in told
        assert "stops rank 1, which is killed after 60 s" in told
        # What it prints meanwhile is shown as it comes.
        for _ in range(3):
            assert process.stdout.readline() == "[1] still here\n"
        process.send_signal(signal.SIGINT)  # no more patience
        _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 1
    assert f"rank 1 (pid {pid}, " in errors
    assert "got SIGINT again and had not ended yet: killed" in errors
    check_all_dead([pid])


def test_a_rank_that_could_not_save_decides_the_exit_code(program) -> None:
    script = program("""
        def end(*_):
            os._exit(74 if RANK == 1 else 143)

        signal.signal(signal.SIGTERM, end)
        print("pid", os.getpid(), flush=True)
        time.sleep(600)
    """)
    with started("-n", "2", script) as process:
        read_pids(process, 2)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 74
    assert "rank 1 (pid " in errors
    assert "could not save its last state: exit code 74" in errors


STARTED = """
import signal, subprocess
from tfdist_ext.launch import local_ranks

for each in (signal.SIGINT, signal.SIGQUIT):  # a shell's background job ignores
    signal.signal(each, signal.SIG_DFL)
popen, functions = subprocess.Popen, []

def noting(*args, preexec_fn=None, **kwargs):
    functions.append(preexec_fn)
    return popen(*args, preexec_fn=preexec_fn, **kwargs)

subprocess.Popen = noting
shell = "grep -E 'Sig(Blk|Ign)' /proc/self/status; ps -o sid= -p $$; echo $$"
ranks = [local_ranks.Rank(r, "here", ["sh", "-c", shell], {}) for r in range(2)]
print(local_ranks.run(ranks, grace=5).code, functions)
"""


def test_no_python_runs_between_fork_and_exec() -> None:
    """It may find a lock held for ever, of a thread that is not there.

    Signals and sessions of the ranks are as they should be all the same.
    """
    done = subprocess.run(
        [sys.executable, "-c", STARTED],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert "0 [None, None]" in lines
    for prefix in ("", "[1] "):
        said = [
            line for line in lines if line.startswith("[1]") == bool(prefix)
        ]
        words = [line.removeprefix(prefix).split()[-1] for line in said]
        blocked, ignored, session, pid = words[:4]
        # Signal 32 belongs to the C library, which may ignore it. Under nohup
        # all processes ignore SIGHUP.
        bits = 0x7FFFFFFF
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
            bits -= 1
        assert (int(blocked, 16) | int(ignored, 16)) & bits == 0
        assert session == pid


ASKED_TO_STOP = """
import os, signal
from tfdist_ext.launch import local_ranks

def ranks():
    for rank in range(9):
        if rank > 2:
            print("started", rank - 1)
        yield local_ranks.Rank(rank, "here", ["sleep", "60"], {})
        if rank == 1:  # and started, by the time this goes on
            os.kill(os.getpid(), signal.SIGTERM)

print("ended with", local_ranks.run(ranks(), grace=5).code)
"""


def test_a_signal_ends_the_start_of_more_ranks() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ASKED_TO_STOP],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=True,
    )
    assert done.stdout == f"ended with {128 + signal.SIGTERM}\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_to_the_launcher_ends_all_ranks(program, number) -> None:
    with started("-n", "3", program(SLEEPER)) as process:
        pids = read_pids(process, 3)
        process.send_signal(number)
        _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 128 + number
    assert f"tfdist-run: got {signal.Signals(number).name}" in errors
    check_all_dead(pids)


def test_ranks_have_30_seconds_to_save(program) -> None:
    assert launch_options.parse(["train.py"]).grace == 30
    script = program("""
        def save(*_):
            time.sleep(1)
            os.write(1, b"saved\\n")  # print may be what was interrupted
            sys.exit(RANK)

        signal.signal(signal.SIGHUP, save)
        print("pid", os.getpid(), flush=True)
        time.sleep(600)
    """)
    with started("-n", "2", script) as process:
        read_pids(process, 2)
        process.send_signal(signal.SIGHUP)
        output, errors = process.communicate(timeout=LIMIT)
    assert sorted(output.splitlines()) == ["[1] saved", "saved"], errors
    assert process.returncode == 128 + signal.SIGHUP


@pytest.mark.parametrize("ignored", [None, signal.SIGINT])
def test_ctrl_c_reaches_ranks_as_keyboard_interrupt(program, ignored) -> None:
    """Also where a script has started the launcher in the background."""
    script = program("""
        try:
            print("pid", os.getpid(), flush=True)
            time.sleep(600)
        except KeyboardInterrupt:
            print("saved", flush=True)
    """)
    with started("-n", "2", script, ignored=ignored) as process:
        read_pids(process, 2)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=LIMIT)
    assert sorted(output.splitlines()) == ["[1] saved", "saved"], errors
    assert "Traceback" not in errors


def test_nohup_keeps_ranks_when_the_terminal_goes(program) -> None:
    script = program("""
        print("pid", os.getpid(), flush=True)
        time.sleep(1)
    """)
    with started("-n", "2", script, ignored=signal.SIGHUP) as process:
        read_pids(process, 2)
        process.send_signal(signal.SIGHUP)
        _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, errors


def test_second_ctrl_c_does_not_wait(program) -> None:
    script = program("""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("pid", os.getpid(), flush=True)
        time.sleep(600)
    """)
    with started("-n", "2", "--grace", "600", script) as process:
        pids = read_pids(process, 2)
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LIMIT)
    assert process.returncode == 130
    check_all_dead(pids)


def test_killed_launcher_leaves_no_orphan(program) -> None:
    with started("-n", "3", program(SLEEPER)) as process:
        pids = read_pids(process, 3)
        process.kill()
        check_all_dead(pids)


def test_what_a_rank_has_started_ends_with_it(program) -> None:
    script = program("""
        child = subprocess.Popen(["sleep", "600"])
        print("pid", child.pid, flush=True)
        meet()
        sys.exit(RANK)
    """)
    with started("-n", "2", script) as process:
        pids = read_pids(process, 2)
        process.communicate(timeout=LIMIT)
    assert process.returncode == 1
    check_all_dead(pids)
