# SPDX-License-Identifier: Apache-2.0
"""The line of `tfdist-run --stats`, of figures that are made up."""

import dataclasses
import json
import os
import pathlib
import re
import signal

import pytest

from tests.launch.launcher import launch
from tests.launch.launcher import started
from tfdist_ext.launch import live_stats
from tfdist_ext.launch.live_stats import Figures


def figures(**changes):
    plain = Figures(100.0, 110.0, 200, 30_000_000, (0.0,) * 4, 900_000_000)
    return dataclasses.replace(plain, **changes)


def test_the_line_says_whom_the_others_wait_for() -> None:
    before = {rank: figures(time=105.0, steps=100) for rank in range(4)}
    # In a ring each waits for the one before it, all because of rank 2.
    waited = [(0, 0, 0, 3.0), (3.0, 0, 0, 0), (0, 0.1, 0, 0), (0, 0, 3.0, 0)]
    after = {
        rank: figures(waited=of, memory=(rank + 1) * 10**9)
        for rank, of in enumerate(waited)
    }
    assert live_stats.line(before, after, 110.5) == (
        "step 200: 20.0 steps/s, 0 MB/s sent, slowest rank 2 (others wait "
        "30.0 of 50.0 ms per step), memory 10.00 GB (4.00 on rank 3)"
    )
    # Of two ranks here, which wait for rank 0 on another host.
    some = {r: figures(waited=(2.5, 0, 0, 0)) for r in (2, 3)}
    assert live_stats.line({}, some, 117.0) == (
        "ranks 2 to 3 of 4, step 200: 20.0 steps/s, 6 MB/s sent, slowest "
        "rank 0 (others wait 12.5 of 50.0 ms per step), memory 1.80 GB (0.90 "
        "on rank 2), rank 2 silent for 7 s, rank 3 silent for 7 s"
    )


def test_the_line_is_as_long_as_what_is_known() -> None:
    assert live_stats.line({}, {}, 0) == "no rank has a strategy yet"
    assert live_stats.line({}, {}, 0, ended=True) == "strategies are closed"
    new = figures(time=100.0, steps=0, bytes_sent=0)
    alone = figures(waited=(0.0,), bytes_sent=0)
    line = "step 0: 0.00 steps/s, 0 MB/s sent, memory 1.80 GB (0.90 on rank "
    assert live_stats.line({}, {0: new, 1: new}, 100).endswith(line + "0)")
    assert "rank late (waits 0.0 of 50.0" in live_stats.line(
        {}, {0: figures()}, 110
    )
    assert "wait" not in live_stats.line({}, {0: alone}, 110)
    assert live_stats.line({}, {1: figures()}, 110).startswith("rank 1 of 4, ")
    # Another strategy in the same process begins at 0.
    later = figures(began=108.0, steps=10)
    assert ", step 10: 5.0 steps/s" in live_stats.line(
        {1: figures()}, {1: later}, 110
    )


def test_the_line_ends_with_unequal_shares() -> None:
    def line(*shares):
        return live_stats.line({}, {0: figures(shares=shares)}, 110.0)

    assert line(0.5, 0.3, 0.2, 0.0).endswith("rank 0), shares 50/30/20/0 %")
    assert "shares" not in line(0.25, 0.25, 0.25, 0.25)
    assert "shares" not in line(0.251, 0.25, 0.25, 0.249)


def test_the_line_ends_with_stale_updates() -> None:
    def line(*counts):
        before = {0: figures(time=100.0, staleness=(10, 10, 0))}
        after = {0: figures(time=110.0, staleness=counts)}
        return live_stats.line(before, after, 110.0)

    end = "rank 0), updates 0/1/... steps old: 75/20/5 %"
    assert line(85, 30, 5).endswith(end), line(85, 30, 5)
    assert "steps old" not in line(85, 10, 0)
    assert "steps old" not in live_stats.line({}, {0: figures()}, 110.0)


def test_waits_of_exchanges_that_overlap_are_no_more_than_a_step() -> None:
    """Four at a time wait for rank 1, all of the time."""
    after = {0: figures(waited=(0.0, 40.0)), 1: figures(waited=(0.0, 0.0))}
    line = live_stats.line({}, after, 110.0)
    assert "slowest rank 1 (others wait 50.0 of 50.0 ms per step)" in line


def test_figures_are_json_as_well(tmp_path: pathlib.Path, monkeypatch) -> None:
    now = [100.0]
    monkeypatch.setattr(live_stats.time, "monotonic", lambda: now[0])
    path, shown = tmp_path / "stats.json", []
    live = live_stats.LiveStats(
        str(tmp_path), [0, 1], 5.0, shown.append, str(path)
    )
    files = [
        live_stats.RankFile(live.environment(rank)[live_stats.VARIABLE])
        for rank in (0, 1)
    ]

    def look():
        now[0] += 5.0
        live.look([0, 1])
        return json.loads(path.read_text().splitlines()[-1])

    assert look() | {"time": 0} == {"time": 0, "state": "starting"}
    for rank, file in enumerate(files):
        file.write(
            figures(
                began=105.0,
                time=110.0,
                waited=(0.0, 2.5 * (1 - rank)),
                shares=(0.75, 0.25),
            )
        )
    found = look()
    assert found.pop("time") > 1.7e9
    assert found == {
        "state": "running",
        "ranks": [0, 1],
        "world_size": 2,
        "step": 200,
        "steps_per_second": 40.0,
        "bytes_sent_per_second": 12e6,
        "slowest_rank": 1,
        "wait_ms_per_step": 12.5,
        "step_ms": 25.0,
        "memory_bytes": {"0": 900_000_000, "1": 900_000_000},
        "shares": [0.75, 0.25],
        "staleness": [],
        "silent_seconds": {},
    }
    for file in files:
        file.close()
    assert look()["state"] == "ended"
    assert shown[0] == "no rank has a strategy yet"
    assert shown[1].startswith("step 200: 40.0 steps/s, 12 MB/s sent, slowest")
    assert shown[2:] == ["strategies are closed"]
    look()  # said once
    assert shown[2:] == ["strategies are closed"]


def test_the_launcher_writes_them(program, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "stats.json"
    script = program("print(os.environ['TFDIST_STATS_FILE'], flush=True)")
    done = launch("--stats-json", str(path), script)
    assert done.returncode == 0, done.stderr
    assert "rank-0" in done.stdout
    assert path.read_text() == ""  # 10 seconds have not passed


def test_one_process_of_a_rank_reports(tmp_path: pathlib.Path) -> None:
    file = live_stats.RankFile(str(tmp_path / "rank-1"))
    file.write(figures())
    with pytest.raises(OSError):
        live_stats.RankFile(str(tmp_path / "rank-1"))
    path = tmp_path / "rank-1"
    assert live_stats.read(path, None) == figures()
    file.write(figures(waited=()))
    assert live_stats.read(path, None) == figures(waited=())
    file.close()
    assert live_stats.read(path, figures()) is None
    live_stats.RankFile(str(path)).close()
    path.write_text("[1, 2")  # a moment of writing
    assert live_stats.read(path, figures()) == figures()
    path.unlink()
    assert live_stats.read(path, figures()) is None


REPORTS = """
from tfdist_ext.launch import live_stats

file = live_stats.RankFile(os.environ["TFDIST_STATS_FILE"])
for step in range(1000):
    now = time.monotonic() - (9 if RANK == 0 else 0)
    file.write(live_stats.Figures(now - step, now, 7 * step, 0, (0.0, 0.0), 0))
    print(os.environ["TFDIST_STATS_FILE"], flush=True)
    time.sleep(0.2 if RANK else 600)
"""


def test_lines_come_while_ranks_run(program) -> None:
    with started("-n", "2", "--stats-every", "1", program(REPORTS)) as process:
        assert process.stderr is not None and process.stdout is not None
        path = process.stdout.readline().split()[-1]
        lines = [process.stderr.readline()]
        while "rank 0 silent" not in lines[-1] and len(lines) < 20:
            lines.append(process.stderr.readline())
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert re.match(r"tfdist-run: step \d+: ", lines[-1]), lines
    assert re.search("rank 0 silent for (9|1.) s", lines[-1]), lines
    assert "rank 1 silent for " not in lines[-1], lines
    assert not os.path.exists(path), path
    assert "Traceback" not in errors


def test_a_rank_that_dies_is_named_as_ever(program) -> None:
    script = program("""
        print(os.environ.get("TFDIST_STATS_FILE"))
        sys.exit(3 * RANK)
    """)
    done = launch("-n", "2", "--stats", script)
    assert done.returncode == 3
    assert "rank 1 (pid " in done.stderr and "exit code 3" in done.stderr
    assert "None" not in done.stdout
    done = launch("-n", "2", script)  # nobody asks
    assert "None" in done.stdout


@pytest.mark.parametrize("wrong", ["0.5", "often", "-3"])
def test_an_interval_must_be_seconds(program, wrong: str) -> None:
    done = launch("--stats-every", wrong, program("print(json.dumps(1))"))
    assert done.returncode == 2
    assert "argument --stats-every: must be " in done.stderr
    assert wrong in done.stderr
    assert json.dumps(1) not in done.stdout
