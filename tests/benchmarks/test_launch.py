# SPDX-License-Identifier: Apache-2.0
"""Jobs end: well, with the failing rank's reason, or at the limit."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from benchmarks import launch
from benchmarks import measure
from benchmarks import network
from benchmarks import rank


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (
            "Traceback:\n  File x\nValueError: bad ids\n",
            "ValueError: bad ids",
        ),
        (
            "tensorflow.python.errors_impl.UnavailableError: gone\nbye",
            "UnavailableError: gone bye",
        ),
        ("I fine\nF0000 00:1 agent.cc:1] Polled an error\n", "F0000"),
        ("just a line\n", "just a line"),
        ("", "no output"),
    ],
)
def test_failure_reason_picks_the_telling_line(log, expected):
    assert expected in launch.failure_reason(log)


def _fake_python(tmp_path, body):
    """A network whose prefix makes rank 1 run `body` instead."""
    script = tmp_path / "fake"
    script.write_text(f"#!{sys.executable}\n{body}\n")
    script.chmod(0o755)
    return (str(script),)


_WAIT = "import time; time.sleep(60)"


def _run(tmp_path, bodies, limit_seconds):
    prefixes = []
    for index, body in enumerate(bodies):
        folder = tmp_path / str(index)
        folder.mkdir()
        prefixes.append(_fake_python(folder, body))
    net = network.Network(("127.0.0.1",) * len(bodies), tuple(prefixes), "")
    start = time.monotonic()
    outcome = launch.run_job(
        "training", {}, net, tmp_path / "run", limit_seconds
    )
    return outcome, time.monotonic() - start


def test_a_failed_rank_ends_the_job(tmp_path):
    fail = "raise RuntimeError('out of luck')"
    outcome, seconds = _run(tmp_path, [_WAIT, fail], 50)
    assert outcome.status == "aborted"
    assert "rank 1 (exit code 1)" in outcome.reason
    assert "RuntimeError: out of luck" in outcome.reason
    assert seconds < 30


def test_a_killed_rank_is_named_with_its_signal(tmp_path):
    die = "import os, signal; os.kill(os.getpid(), signal.SIGABRT)"
    outcome, _ = _run(tmp_path, [die], 50)
    assert outcome.status == "aborted"
    assert "rank 0 (SIGABRT)" in outcome.reason


def test_the_wall_limit_ends_the_job(tmp_path):
    outcome, seconds = _run(tmp_path, [_WAIT], 1)
    assert outcome.status == "timed out"
    assert "while starting" in outcome.reason
    assert seconds < 20


def test_results_of_all_ranks_are_collected(tmp_path):
    body = (
        "import json, pathlib, sys\n"
        "job, rank = pathlib.Path(sys.argv[-3]), sys.argv[-2]\n"
        "path = job.parent / f'result.{rank}.json'\n"
        "path.write_text(json.dumps({'rank': int(rank)}))"
    )
    outcome, _ = _run(tmp_path, [body, body], 50)
    assert outcome.status == "ok"
    assert outcome.results == ({"rank": 0}, {"rank": 1})


def test_ranks_get_tf_config_only_when_there_are_several(tmp_path):
    body = (
        "import json, os, pathlib, sys\n"
        "job, rank = pathlib.Path(sys.argv[-3]), sys.argv[-2]\n"
        "path = job.parent / f'result.{rank}.json'\n"
        "path.write_text(os.environ.get('TF_CONFIG', '{}'))"
    )
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    alone, _ = _run(tmp_path / "a", [body], 50)
    assert alone.results == ({},)
    pair, _ = _run(tmp_path / "b", [body, body], 50)
    assert [r["task"]["index"] for r in pair.results] == [0, 1]
    assert len(set(pair.results[0]["cluster"]["worker"])) == 2


def _contexts(folder, ranks):
    job = {
        "task": "training",
        "options": {"a": 1},
        "hosts": ["127.0.0.1"] * ranks,
        "interface": "",
    }
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    return [rank.load_context(str(path), r)[1] for r in range(ranks)]


def test_ranks_meet_and_agree_in_the_run_folder(tmp_path):
    contexts = _contexts(tmp_path, 3)
    values, order = [], []

    def work(context):
        time.sleep(0.05 * context.rank)
        order.append("in")
        context.barrier("phase")
        order.append("out")
        values.append(context.agree("steps", 10 + context.rank))

    threads = [
        threading.Thread(target=work, args=(context,), daemon=True)
        for context in contexts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert values == [10, 10, 10]
    assert order == ["in"] * 3 + ["out"] * 3


def test_a_rank_dies_with_its_harness():
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True
    )
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    until = time.monotonic() + 20
    while pathlib.Path("/proc", str(child), "exe").exists():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_rank_that_begins_after_its_harness_has_ended_ends():
    harness = subprocess.Popen([sys.executable, "-c", ""])
    # It stays a zombie until this test waits for it.
    os.waitid(os.P_PID, harness.pid, os.WEXITED | os.WNOWAIT)
    code = f"from benchmarks import rank; rank.die_with_parent({harness.pid})"
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], timeout=60)
        assert done.returncode == -signal.SIGKILL
        harness.wait()


_CHILD = (
    "import os, time; from benchmarks import rank; "
    "rank.die_with_parent(os.getppid()); "
    "print('set', flush=True); time.sleep(60)"
)
_PARENT = f"""
import subprocess, sys, time
child = subprocess.Popen(
    [sys.executable, "-c", {_CHILD!r}], stdout=subprocess.PIPE
)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""


def test_steps_fit_the_budget():
    assert measure.steps_in_budget([0.1, 0.1], 2.0, most=100) == 20
    assert measure.steps_in_budget([0.001], 2.0, most=100) == 100
    assert measure.steps_in_budget([10.0], 2.0, most=100) == 5


def test_quantiles_are_milliseconds():
    quantiles = measure.quantiles_ms([0.001, 0.002, 0.003])
    assert quantiles["min"] == pytest.approx(1.0)
    assert quantiles["p50"] == pytest.approx(2.0)


def test_peak_rss_is_this_process():
    assert 1e6 < measure.peak_rss_bytes() < 1e12
    assert measure.sample("").cpu_seconds > 0
