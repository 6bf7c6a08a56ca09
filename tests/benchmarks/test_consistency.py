# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the modes of `consistency`: figures, charts, a short run."""

import json
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import consistency
from benchmarks import consistency_chart


def _record(setting, mode, curves, *, seed=0, sent=0.0, steps=10):
    """A run that has ended well; a curve for each rank."""
    ranks = [
        {
            "curve": curve,
            "bytes_per_step": sent,
            "row_bytes_per_step": 0.0,
            "shares": [],
            "staleness": {"0": 3, "2": 1},
        }
        for curve in curves
    ]
    return {
        "setting": setting,
        "mode": mode,
        "seed": seed,
        "batch": 64,
        "steps": steps,
        "status": "ok",
        "reason": "",
        "ranks": ranks,
    }


def test_the_time_to_an_auc_lies_between_two_tests():
    curve = [[10.0, 0.6], [20.0, 0.7], [30.0, 0.65]]
    found = [consistency.seconds_to(curve, auc) for auc in (0.55, 0.6, 0.675)]
    assert found == pytest.approx([5.0, 10.0, 17.5])
    assert consistency.seconds_to(curve, 0.8) == float("inf")
    # The first test may be below 0.5.
    assert consistency.seconds_to([[10.0, 0.4]], 0.4) == 10.0


def test_figures_are_those_of_the_slowest_rank_in_the_last_part():
    fast, slow = [[1.0, 0.6], [3.0, 0.7]], [[1.0, 0.6], [6.0, 0.7]]
    records = [
        _record("link5", "BSP()", [fast, slow], sent=2000.0),
        _record("link5", "BAP()", [fast, fast], sent=3000.0),
        _record("link5", "SSP(4)", [[[1.0, 0.6], [3.0, 0.65]]] * 2, sent=1.0)
        | {"status": "aborted"},
    ]
    assert consistency_chart.figures_of(records) == {
        "samples per second": {"BSP()": 128.0, "BAP()": 320.0},
        "seconds to AUC 0.700": {"BSP()": 3.0, "BAP()": 3.0},
        "kB sent per rank and step": {"BSP()": 2.0, "BAP()": 3.0},
    }


def test_dilated_jobs_sleep_longer_and_are_timed_as_if_they_did_not():
    given = ["--microseconds", "400", "--pauses", "0.2", "--ml-100k", "x"]
    arguments = consistency.make_parser().parse_args(given)

    def options(setting, dilation):
        return consistency.options_of(arguments, setting, "BAP()", dilation)

    plain, dilated = options("slow", 1.0), options("slow", 2.0)
    assert plain | {"microseconds": 800.0, "pause_seconds": 4.0} == dilated
    assert plain["pause_seconds"] == 2.0
    assert plain["pauses"] == 0.0
    assert options("link15", 4.0)["egress"] == "3.75mbps"
    paused = options("pauses", 2.0)
    assert (paused["pauses"], paused["microseconds"]) == (0.2, 16000.0)
    found = consistency.undilated({"curve": [[3.0, 0.5], [8.0, 0.6]]}, 2.0)
    assert found == {"curve": [[1.5, 0.5], [4.0, 0.6]]}


def test_differences_are_of_runs_with_the_same_seed():
    def run(mode, seed, auc):
        return _record("quality", mode, [[[1.0, auc]]], seed=seed)

    records = [run("BSP()", 0, 0.7), run("BSP()", 1, 0.8)]
    records += [run("BAP()", 1, 0.75), run("BAP()", 0, 0.71)]
    found = consistency.differences(records)
    assert found["BSP()"] == [0.0, 0.0]
    assert found["BAP()"] == pytest.approx([-0.05, 0.01])


def test_a_chart_per_question(tmp_path):
    curve = [[1.0, 0.6], [3.0, 0.7]]
    records = [
        _record(setting, mode, [curve] * ranks, sent=sent)
        for setting, ranks, sent in (
            *(("slow", 4, 0.0), ("link5", 4, 9e3), ("link150", 4, 9e3)),
            *(("quality", 2, 0.0), ("quality", 4, 0.0), ("clicks", 2, 0.0)),
        )
        for mode in ("BSP()", "SSP(4)")
    ]
    consistency_chart.draw(tmp_path, records)
    charts = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert set(charts) == {
        "consistency_slow.svg",
        "consistency_links.svg",
        "consistency_quality.svg",
    }
    assert all("SSP(4)" in chart for chart in charts.values())
    assert "kB sent" in charts["consistency_links.svg"]
    assert "kB sent" not in charts["consistency_slow.svg"]
    for text in ("links of 5 MB/s", "links of 150 MB/s"):
        assert text in charts["consistency_links.svg"]
    for text in ("planted data", "ml-100k", "2 ranks", "4 ranks"):
        assert text in charts["consistency_quality.svg"]
    # The same results are the same files.
    consistency_chart.draw(tmp_path, records)
    assert charts == {p.name: p.read_text() for p in tmp_path.iterdir()}


def _write_ratings(folder, users=20, items=30):
    """Files as `recbole` ships them, with ratings at random."""
    rng = np.random.default_rng(0)
    ratings = [
        f"{user + 1}\t{item + 1}\t{rng.integers(1, 6)}\t{user}"
        for user in range(users)
        for item in range(items)
    ]
    header = "user_id:token\titem_id:token\trating:float\ttimestamp:float"
    (folder / "ml-100k.inter").write_text("\n".join([header, *ratings]))
    header = "user_id:token\tage:token\tgender:token\toccupation:token"
    lines = [f"{n + 1}\t{n}\tF\tother" for n in range(users)]
    (folder / "ml-100k.user").write_text("\n".join([header, *lines]))
    header = "item_id:token\tmovie_title:token_seq\trelease_year:token"
    lines = [f"{n + 1}\tname\t{1990 + n % 9}\tDrama" for n in range(items)]
    header += "\tclass:token_seq"
    (folder / "ml-100k.item").write_text("\n".join([header, *lines]))


@pytest.mark.extended
@pytest.mark.process
def test_a_short_run_has_a_record_for_each_mode_and_seed(tmp_path):
    _write_ratings(tmp_path)
    arguments = ["--settings", "pauses", "clicks", "--ranks", "2"]
    arguments += ["--modes", "BSP()", "SSP(4)", "--seeds", "2"]
    arguments += ["--steps", "3", "--parts", "2", "--batch", "16"]
    arguments += ["--rows", "20", "--samples", "512", "--warm-up", "2"]
    arguments += ["--ml-100k", str(tmp_path), "--output", str(tmp_path)]
    subprocess.run(
        [sys.executable, "-m", "benchmarks.consistency", *arguments],
        check=True,
        timeout=500,
    )
    (path,) = tmp_path.glob("*/result.json")
    records = json.loads(path.read_text())["runs"]
    assert [(r["setting"], r["mode"], r["seed"]) for r in records] == [
        *(("pauses", "BSP()", 0), ("pauses", "SSP(4)", 0)),
        *(("clicks", "BSP()", 0), ("clicks", "BSP()", 1)),
        *(("clicks", "SSP(4)", 0), ("clicks", "SSP(4)", 1)),
    ]
    for record in records:
        for rank in record["ranks"]:
            assert len(rank["curve"]) == 2
            updates = sum(rank["staleness"].values())
            assert (updates > 0) == (record["mode"] == "SSP(4)")
    consistency_chart.draw(tmp_path, records)
    assert (tmp_path / "consistency_quality.svg").exists()
