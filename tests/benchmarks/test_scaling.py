# SPDX-License-Identifier: Apache-2.0
"""Figures against ranks: order, limits of memory, the chart."""

import pytest

from benchmarks import report
from benchmarks import run
from benchmarks import scaling
from benchmarks import workloads


def _row(variant, milliseconds, peak_rss):
    return report.Row(
        variant, "ok", "", milliseconds, egress=1e6, peak_rss=peak_rss
    )


_ROWS = {
    ("hybrid-row", 1): _row("hybrid-row", 10.0, 1.1e9),
    ("stock-sparse", 1): _row("stock-sparse", 30.0, 1e9),
    ("hybrid-row", 4): _row("hybrid-row", 20.0, 3e9),
    ("stock-sparse", 4): report.Row("stock-sparse", "aborted", "memory"),
}


def test_lines_of_a_variant_stand_together():
    lines = scaling.table(_ROWS).splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [
        ["hybrid-row", "1"],
        ["hybrid-row", "4"],
        ["stock-sparse", "1"],
        ["stock-sparse", "4"],
    ]
    assert "aborted: memory" in lines[-1]


def test_speedups_are_those_over_the_fastest_synchronous_one():
    rows = {
        **_ROWS,
        ("stock-dense", 1): _row("stock-dense", 25.0, 1e9),
        ("parameter-server", 1): report.Row(
            "parameter-server", "ok", milliseconds=2.0, asynchronous=True
        ),
    }
    assert scaling.speedups(rows) == {"hybrid-row": {1: 2.5}}
    lines = scaling.table(rows).splitlines()
    assert [line.split()[-1] for line in lines[:3]] == ["stock", "2.5", "-"]


def test_a_share_is_tables_and_slots_over_ranks():
    ads = workloads.WORKLOADS["ads"]
    share = scaling.share_bytes(ads, "adagrad", 4)
    assert share == pytest.approx(8 * 2 * 2**21 * 114 / 4)
    assert scaling.share_bytes(ads, "sgd", 4) == share / 2
    assert scaling.limit_bytes(2e9) == pytest.approx(3.3e9)


def test_memory_is_judged_of_ours_only():
    text = scaling.memory_table(_ROWS, workloads.WORKLOADS["smoke"], "sgd")
    assert [line.split("  ")[-1] for line in text.splitlines()[1:]] == [
        "NOT REACHED",
        "NOT REACHED",
    ]
    ads = scaling.memory_table(_ROWS, workloads.WORKLOADS["ads"], "adagrad")
    assert ads.count("NOT REACHED") == 1


@pytest.mark.parametrize(
    "variant", [v for v in run.VARIANTS if v.startswith("hybrid-")]
)
def test_every_placement_of_ours_can_be_asked_for(variant):
    name = variant.removeprefix("hybrid-")
    arguments = scaling.make_parser().parse_args(["--placements", name])
    assert arguments.placements == [name]


def test_defaults():
    arguments = scaling.make_parser().parse_args([])
    assert arguments.ranks == [1, 2, 4, 8]
    assert arguments.placements == ["row", "column", "auto"]


def test_chart_is_a_png(tmp_path):
    chart = pytest.importorskip("benchmarks.chart")
    path = tmp_path / "scaling.png"
    chart.draw_scaling(path, "title", _ROWS, {1: 1e9, 4: 2e9})
    assert path.read_bytes().startswith(b"\x89PNG")


def test_chart_of_speedups_is_an_svg(tmp_path):
    chart = pytest.importorskip("benchmarks.chart")
    path = tmp_path / "speedup.svg"
    chart.draw_speedups(path, "title", scaling.speedups(_ROWS))
    assert "hybrid-row" in path.read_text()


@pytest.mark.process
def test_a_small_run_writes_all_it_promises(tmp_path, run_forking):
    done = run_forking(
        "benchmarks.scaling",
        *("--workload", "smoke", "--network", "loopback"),
        *("--ranks", "1", "2", "--placements", "row"),
        *("--steps", "5", "--limit", "100", "--memory"),
        *("--output", tmp_path),
        ranks=2,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = tmp_path.iterdir()
    assert len((folder / "results.jsonl").read_text().splitlines()) == 2
    assert (folder / "scaling.png").exists() or "no chart" in done.stdout
    assert "  reached" in done.stdout
    table = done.stdout.partition("variant")[2].partition("\n\n")[0]
    again = run_forking(
        "benchmarks.scaling",
        *("--workload", "smoke", "--recorded", folder / "results.jsonl"),
        *("--output", tmp_path / "again"),
        ranks=2,
    )
    assert table in again.stdout
