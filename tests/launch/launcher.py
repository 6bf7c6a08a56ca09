# SPDX-License-Identifier: Apache-2.0
"""Starts tfdist-run, in a process of its own and with a limit."""

import contextlib
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator

LIMIT = 30.0
# Becomes the program that follows. SIGHUP also for tests that run under nohup.
SETUP = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if ignored := int(sys.argv[1]):
    signal.signal(ignored, signal.SIG_IGN)
os.execv(sys.argv[2], sys.argv[2:])
"""
LAUNCHER = [sys.executable, "-m", "tfdist_ext.launch"]


def environment(**changes: str) -> dict[str, str]:
    # Unbuffered, two ranks would write into each other's lines.
    dropped = ("TF_CONFIG", "PYTHONUNBUFFERED", "CUDA_VISIBLE_DEVICES")
    plain = {k: v for k, v in os.environ.items() if k not in dropped}
    return {**plain, **changes}


def launch(
    *arguments: str, **changes: str
) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(
        [*LAUNCHER, *arguments],
        env=environment(**changes),
        capture_output=True,
        timeout=LIMIT,
        check=False,
    )
    # Decoded here, because text=True would turn carriage returns to newlines.
    return subprocess.CompletedProcess(
        done.args, done.returncode, done.stdout.decode(), done.stderr.decode()
    )


@contextlib.contextmanager
def started(
    *arguments: str, ignored: int | None = None, **changes: str
) -> Iterator["subprocess.Popen[str]"]:
    """A launcher in the background, gone at the end of the block.

    Args:
        arguments: of the command line.
        ignored: number of a signal that it is started to ignore.
        changes: of the environment.
    """

    process = subprocess.Popen(
        [
            *(sys.executable, "-S", "-c", SETUP, str(int(ignored or 0))),
            *(*LAUNCHER, *arguments),
        ],
        env=environment(**changes),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=LIMIT)


def read_pids(process: "subprocess.Popen[str]", count: int) -> list[int]:
    """Reads lines like "[1] pid 123" until that many ranks have started."""
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(count)]
    return [int(line.rsplit(maxsplit=1)[1]) for line in lines]


def alive(pid: int) -> bool:
    """True for a process that runs, not for one that waits to be reaped."""
    try:
        status = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def check_all_dead(pids: list[int]) -> None:
    deadline = time.monotonic() + LIMIT
    while (left := [p for p in pids if alive(p)]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.02)
    assert not left
