# SPDX-License-Identifier: Apache-2.0
"""The command: help, settings, a whole small run, signals."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from benchmarks import network
from benchmarks import run

_REASON = network.reason_unavailable()
needs_namespaces = pytest.mark.skipif(bool(_REASON), reason=_REASON)

# The interpreter of an environment with torch and fbgemm_gpu.
_FBGEMM = os.environ.get("FBGEMM_PYTHON", "")


_SMALL = ("--network", "loopback", "--steps", "10", "--limit", "100")


def _command(tmp_path, *arguments):
    command = [sys.executable, "-m", "benchmarks.run", "--workload", "smoke"]
    return [*command, "--output", str(tmp_path), *arguments]


@pytest.mark.parametrize(
    "module", ["run", "all", "scaling", "collectives", "overhead"]
)
def test_help_explains_every_option(module):
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0
    assert "--ranks" in done.stdout
    assert len(done.stdout) > 300


def test_defaults_are_those_of_the_targets():
    arguments = run.make_parser().parse_args([])
    assert (arguments.workload, arguments.ranks) == ("timelines", 4)
    assert (arguments.egress, arguments.batch) == ("150mbps", 256)


@pytest.mark.parametrize(
    ("given", "ranks", "dilation"),
    [
        (["--dilation", "3"], 2, 3.0),
        ([], 64, 1.0),
        (["--dilation=auto"], 1, 1.0),
    ],
)
def test_dilation_is_a_factor_or_ranks_by_core(given, ranks, dilation):
    arguments = run.make_parser().parse_args(given)
    assert run.dilation_of(arguments, ranks) == dilation
    cores = len(os.sched_getaffinity(0))
    arguments = run.make_parser().parse_args(["--dilation", "auto"])
    assert run.dilation_of(arguments, 4 * cores) == 4.0


@pytest.mark.parametrize("dilation", ["0.5", "-1", "nan", "much"])
def test_a_dilation_that_is_none_is_refused(dilation):
    with pytest.raises(SystemExit):
        run.make_parser().parse_args(["--dilation", dilation])


def test_unknown_variant_is_refused():
    with pytest.raises(SystemExit):
        run.make_parser().parse_args(["--variants", "magic"])


def test_a_bad_rate_is_refused_before_anything_starts(tmp_path):
    arguments = run.make_parser().parse_args(["--egress", "fast"])
    with pytest.raises((ValueError, SystemExit)):
        run.open_network(arguments, 2)


def test_ranks_meet_on_loopback_when_asked():
    arguments = run.make_parser().parse_args(["--network", "loopback"])
    with run.open_network(arguments, 2) as net:
        assert net == network.loopback(2)


@pytest.mark.process
def test_a_small_run_writes_all_it_promises(tmp_path):
    """With the variants that one rank has, which starts by itself."""
    variants = ("stock-sparse", "hybrid-row")
    arguments = (*_SMALL, "--ranks", "1", "--variants", *variants)
    done = subprocess.run(
        _command(tmp_path, *arguments),
        capture_output=True,
        text=True,
        timeout=600,
    )
    _check(done, tmp_path, 1, variants)


@pytest.mark.process
@pytest.mark.parametrize(
    "variants",
    [
        ("stock-sparse", "stock-dense"),
        ("hybrid-row", "hybrid-column"),
        ("parameter-server",),
    ],
    ids=["stock", "hybrid", "parameter-server"],
)
def test_so_does_one_of_two_ranks(tmp_path, run_forking, variants):
    arguments = (*_SMALL, "--ranks", "2", "--variants", *variants)
    done = run_forking(*_command(tmp_path, *arguments)[2:], ranks=2)
    _check(done, tmp_path, 2, variants)


def _check(done, tmp_path, ranks, variants):
    results = _results(done, tmp_path)
    assert set(results) == set(variants)
    for variant in results.values():
        assert variant["status"] == "ok", variant["reason"]
        assert len(variant["results"]) == ranks
        assert variant["results"][0]["errors"]["rows"] < 1e-4
        assert not variant["results"][0]["problem"]
    assert f"\n{variants[-1]} " in done.stdout
    (folder,) = tmp_path.iterdir()
    assert (folder / "chart.png").exists() or "no chart" in done.stdout


def _results(done, tmp_path):
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = tmp_path.iterdir()
    return json.loads((folder / "result.json").read_text())["variants"]


def test_fbgemm_is_left_out_without_an_interpreter(tmp_path):
    arguments = run.make_parser().parse_args([])
    net = network.loopback(2)
    outcome = run.run_variant("fbgemm", arguments, net, tmp_path / "x")
    assert outcome.status == "left out"
    assert "--fbgemm-python" in outcome.reason


@pytest.mark.process
def test_parameter_servers_share_large_tables(tmp_path, run_forking):
    """Tables of `smoke` are too small to be cut into parts, these are not.

    Nor is their slot; `smoke` trains with SGD.
    """
    done = run_forking(
        *("benchmarks.run", "--output", tmp_path, "--network", "loopback"),
        *("--workload", "timelines", "--optimizer", "adagrad"),
        *("--ranks", 2, "--variants", "parameter-server"),
        *("--batch", "8", "--steps", "5", "--limit", "100"),
        ranks=2,
    )
    variant = _results(done, tmp_path)["parameter-server"]
    assert variant["status"] == "ok", variant["reason"]
    assert not variant["results"][0]["problem"]


@pytest.mark.process
@pytest.mark.skipif(not _FBGEMM, reason="FBGEMM_PYTHON names no interpreter")
@pytest.mark.parametrize("workload", ["smoke", "movielens", "a9a"])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_fbgemm_agrees_with_plain_torch(tmp_path, workload, optimizer):
    arguments = run.make_parser().parse_args(
        [
            *("--workload", workload, "--optimizer", optimizer),
            *("--steps", "5", "--limit", "100", "--fbgemm-python", _FBGEMM),
        ]
    )
    net = network.loopback(2)
    outcome = run.run_variant("fbgemm", arguments, net, tmp_path / "x")
    assert outcome.status == "ok", outcome.reason
    assert len(outcome.results) == 1
    assert not outcome.results[0]["problem"]


@pytest.mark.process
@needs_namespaces
@pytest.mark.parametrize(
    ("number", "variant"),
    [(signal.SIGINT, "stock-sparse"), (signal.SIGTERM, "parameter-server")],
)
def test_a_signal_removes_ranks_and_network(tmp_path, number, variant):
    process = subprocess.Popen(
        _command(tmp_path, "--ranks", "2", "--variants", variant),
        stdout=subprocess.DEVNULL,
    )
    try:
        _wait_until(lambda: list(tmp_path.rglob("rank1.log")))
        assert _leftovers(process.pid)
        process.send_signal(number)
        assert process.wait(timeout=60) == 128 + number
    finally:
        process.kill()
    assert _leftovers(process.pid) == []
    # A rank that had just been forked ends once its Python has started.
    job = str(next(tmp_path.rglob("job.json")))
    _wait_until(lambda: not any(job in command for command in _commands()))


def _leftovers(pid):
    listed = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    names = listed + os.listdir("/sys/class/net")
    return [name for name in names if name.startswith(f"tfd{pid}x")]


def _commands():
    commands = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            commands.append(path.read_text())
        except OSError:
            continue  # It has ended meanwhile.
    return commands


def _wait_until(condition):
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)
