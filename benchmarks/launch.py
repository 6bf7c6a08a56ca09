# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of a job, watches them, and collects their results."""

import dataclasses
import json
import os
import pathlib
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks import cluster
from benchmarks import network

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_POLL_SECONDS = 0.1

# When a rank fails, the others usually fail too; their logs are worth having.
_GRACE_SECONDS = 5.0
_REASON_LENGTH = 300
_COLOUR = re.compile(r"\x1b\[\d*m")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
        status: "ok", "aborted" (a rank failed) or "timed out".
        reason: why, with rank and phase; "" when ok.
        results: what each rank returned; empty unless ok.
        seconds: wall time of the whole job.
    """

    status: str
    reason: str
    results: tuple[dict[str, Any], ...]
    seconds: float


def run_job(
    task: str,
    options: dict[str, Any],
    net: network.Network,
    folder: pathlib.Path,
    limit_seconds: float,
    environment: dict[str, str] | None = None,
    python: str = sys.executable,
) -> Outcome:
    """Runs `task` on every rank of `net`; never leaves a process behind.

    Args:
        task: a key of `benchmarks.rank.TASKS`.
        options: JSON values that the task reads.
        net: where the ranks run.
        folder: new folder for the job file, logs and results.
        limit_seconds: wall limit of the job.
        environment: variables set for the ranks on top of this process's.
        python: interpreter of the ranks.
    """
    _write_job(folder, task, options, net)
    start = time.monotonic()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for process in _start(net, folder, environment or {}, python):
            processes.append(process)
        status, reason = _watch(processes, folder, start + limit_seconds)
    finally:
        _kill(processes)
        shutil.rmtree(folder / "scratch", ignore_errors=True)
    seconds = time.monotonic() - start
    results = _results(folder, len(net.hosts)) if status == "ok" else ()
    return Outcome(status, reason, results, seconds)


def failure_reason(log: str) -> str:
    """Picks the line of a rank's log that says best why it failed."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    # What Python raised last, else what TensorFlow's C++ said before abort().
    for pattern in (
        r"(\w+\.)*\w*(Error|Exception|Interrupt)\b.*",
        r".*(Check failed|\bF0000\b|: F ).*",
        r".*([Tt]erminat|[Aa]bort|Polled an error).*",
    ):
        for index in range(len(lines) - 1, -1, -1):
            if re.fullmatch(pattern, lines[index]):
                # A message may go on; Keras puts the point on a later line.
                reason = " ".join(lines[index : index + 4])
                return _COLOUR.sub("", reason)[:_REASON_LENGTH]
    return lines[-1][:_REASON_LENGTH] if lines else "no output"


def _write_job(
    folder: pathlib.Path,
    task: str,
    options: dict[str, Any],
    net: network.Network,
) -> None:
    folder.mkdir(parents=True)
    job = {
        "task": task,
        "options": options,
        "hosts": net.hosts,
        "interface": net.interface,
    }
    (folder / "job.json").write_text(json.dumps(job))


def _results(folder: pathlib.Path, ranks: int) -> tuple[dict[str, Any], ...]:
    return tuple(
        json.loads((folder / f"result.{rank}.json").read_text())
        for rank in range(ranks)
    )


def _start(
    net: network.Network,
    folder: pathlib.Path,
    environment: dict[str, str],
    python: str,
) -> Iterator[subprocess.Popen[bytes]]:
    configs = cluster.tf_configs(net)
    environment = {"TFDIST_SECRET": secrets.token_hex(32), **environment}
    scratch = folder / "scratch"
    scratch.mkdir()
    for rank, config in enumerate(configs):
        command = [*net.prefixes[rank], python, "-m", "benchmarks.rank"]
        command += [str(folder / "job.json"), str(rank), str(os.getpid())]
        with (folder / f"rank{rank}.log").open("wb") as log:
            yield subprocess.Popen(
                command,
                cwd=_ROOT,
                env=_environment(config, scratch, environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def _environment(
    tf_config: str, scratch: pathlib.Path, extra: dict[str, str]
) -> dict[str, str]:
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "1"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    environment.pop("TF_CONFIG", None)
    if tf_config:
        environment["TF_CONFIG"] = tf_config
    # Ranks end without cleaning up; what they leave must not fill /tmp.
    environment["TMPDIR"] = str(scratch)
    return {**environment, **extra}


def _watch(
    processes: list[subprocess.Popen[bytes]],
    folder: pathlib.Path,
    deadline: float,
) -> tuple[str, str]:
    """Waits for all ranks, the first failure or the deadline."""
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            return "aborted", _explain(processes, folder, failed[0])
        if all(code == 0 for code in codes):
            return "ok", ""
        time.sleep(_POLL_SECONDS)
    return "timed out", f"wall limit reached {_last_phase(folder)}"


def _explain(
    processes: list[subprocess.Popen[bytes]],
    folder: pathlib.Path,
    rank: int,
) -> str:
    until = time.monotonic() + _GRACE_SECONDS
    while time.monotonic() < until and None in [p.poll() for p in processes]:
        time.sleep(_POLL_SECONDS)
    code = processes[rank].returncode
    how = f"exit code {code}"
    if code is not None and code < 0:
        how = signal.Signals(-code).name
    log = (folder / f"rank{rank}.log").read_text(errors="replace")
    phase = _last_phase(folder)
    return f"rank {rank} ({how}) {phase}: {failure_reason(log)}"


def _last_phase(folder: pathlib.Path) -> str:
    phases = sorted(folder.glob("*.0.phase"), key=lambda p: p.stat().st_mtime)
    if not phases:
        return "while starting"
    return f"after phase {phases[-1].name.removesuffix('.0.phase')!r}"


def _kill(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
