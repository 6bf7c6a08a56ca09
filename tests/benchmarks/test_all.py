# SPDX-License-Identifier: Apache-2.0
"""All workloads: what is chosen, what is run again, what the table marks."""

import dataclasses
import json

import pytest

from benchmarks import all as suite
from benchmarks import launch
from benchmarks import report
from benchmarks import run
from benchmarks import summary
from benchmarks import workloads

_RESULT = {
    "steps": 10,
    "step_ms": {"min": 1.0, "p50": 2.0, "p99": 9.0},
    "per_step": {"egress_bytes": 1.0, "ingress_bytes": 2.0, "cpu_ms": 3.0},
    "errors": {"rows": 1e-7},
    "problem": "",
    "peak_rss_bytes": 5e8,
}


def _arguments(tmp_path, *more):
    output = ("--output", str(tmp_path), "--network", "loopback")
    return suite.make_parser().parse_args([*output, *more])


@pytest.fixture
def started(monkeypatch):
    """Fakes the runs; names them, and fails those named in `fails`."""
    names, fails = [], set()

    def run_variant(name, arguments, net, folder):
        names.append((arguments.workload, name, arguments.ranks))
        folder.mkdir(parents=True)
        if name in fails:
            return launch.Outcome("aborted", "no luck", (), 1.0)
        results = (_RESULT,) * arguments.ranks
        return launch.Outcome("ok", "", results, 1.0)

    monkeypatch.setattr(run, "run_variant", run_variant)
    return names, fails


def test_the_six_workloads_are_measured(tmp_path):
    sizes = suite.choose(_arguments(tmp_path))
    names = {size.workload for size in sizes}
    others = {"smoke", "words", "skewed", "skewed_words", "huge"}
    assert names == set(workloads.WORKLOADS) - others
    assert len(names) == 6
    for name in names:
        ranks = {size.ranks for size in sizes if size.workload == name}
        assert 1 in ranks
        assert max(ranks) > 1


def test_the_planner_is_held_against_every_placement(tmp_path, started):
    arguments = _arguments(tmp_path, "--placements", "--workloads", "a9a")
    (size,) = suite.choose(arguments)
    assert "hybrid-table-dedup" in size.variants
    names, fails = started
    fails.add("hybrid-row")
    group = suite.measure(size, arguments)
    assert {name for _, name, _ in names} == set(size.variants)
    rows = [
        dataclasses.replace(row, egress=1.07)
        if row.variant == "hybrid-auto"
        else row
        for row in group.rows
    ]
    said = summary.planned(dataclasses.replace(group, rows=rows))
    assert "1.070 times hybrid-table" in said
    assert "a9a" in said
    without = [row for row in rows if row.variant != "hybrid-auto"]
    assert "no plan" in summary.planned(
        dataclasses.replace(group, rows=without)
    )


def test_a_choice_narrows_what_runs(tmp_path):
    sizes = suite.choose(
        _arguments(
            tmp_path,
            *("--workloads", "a9a", "--ranks", "3"),
            *("--variants", "hybrid-row", "parameter-server"),
        )
    )
    assert [(s.ranks, s.variants) for s in sizes] == [
        (1, ("hybrid-row",)),
        (3, ("parameter-server", "hybrid-row")),
    ]


def test_what_is_finished_is_not_run_again(tmp_path, started):
    names, fails = started
    fails.add("hybrid-row")
    arguments = _arguments(tmp_path)
    size = suite.Size("a9a", 2, ("stock-sparse", "hybrid-row"), 64)
    group = suite.measure(size, arguments)
    assert [row.status for row in group.rows] == ["ok", "aborted"]
    fails.clear()
    group = suite.measure(size, arguments)
    assert [row.status for row in group.rows] == ["ok", "ok"]
    assert [name for _, name, _ in names] == [
        *size.variants,
        "hybrid-row",
    ]
    content = json.loads((tmp_path / "a9a" / "result.json").read_text())
    assert set(content) == {"stock-sparse@2", "hybrid-row@2"}
    assert content["hybrid-row@2"]["settings"]["batch"] == 64


def test_other_settings_are_other_results(tmp_path, started):
    names, _ = started
    size = suite.Size("a9a", 2, ("hybrid-row",))
    for more in ((), ("--limit", "7"), ("--egress", "1gbit")):
        suite.measure(size, _arguments(tmp_path, *more))
    assert len(names) == 2


def test_other_ranks_are_kept_side_by_side(tmp_path, started):
    names, _ = started
    for _ in range(2):
        for ranks in (1, 2):
            size = suite.Size("a9a", ranks, ("hybrid-row",))
            suite.measure(size, _arguments(tmp_path))
    assert names == [("a9a", "hybrid-row", 1), ("a9a", "hybrid-row", 2)]


_STOCK = report.Row(
    "stock-sparse", "ok", "", 10.0, egress=2e6, peak_rss=1e9, ranks=2
)
_DENSE = dataclasses.replace(_STOCK, variant="stock-dense", milliseconds=8.0)
_OURS = report.Row(
    "hybrid-row", "ok", "", 4.0, egress=1e6, peak_rss=5e8, ranks=2
)
_ABORTED = report.Row("parameter-server", "aborted", "no luck")


def test_ours_is_behind_where_another_is_ahead():
    assert summary.behind(_OURS, [_STOCK, _DENSE, _OURS]) == {}
    slow = dataclasses.replace(_OURS, milliseconds=9.0)
    assert summary.behind(slow, [_STOCK, _DENSE, slow]) == {
        "milliseconds": "stock-dense"
    }
    large = dataclasses.replace(_OURS, egress=3e6, peak_rss=2e9)
    assert set(summary.behind(large, [_STOCK, large])) == {"egress", "peak_rss"}


def test_only_ours_is_marked_and_only_against_what_ran():
    assert summary.behind(_STOCK, [_STOCK, _DENSE]) == {}
    assert summary.behind(_OURS, [_ABORTED, _OURS]) == {}


def test_one_table_of_all_groups():
    slow = dataclasses.replace(_OURS, milliseconds=9.0)
    groups = [
        report.Group("one", [_STOCK, _DENSE, slow]),
        report.Group("other", [_ABORTED, _OURS]),
    ]
    text = summary.table(groups)
    assert "one\n" in text
    assert "<- behind: time (stock-dense)" in text
    assert "0.89" in text  # Stock's best over ours.
    assert "aborted: no luck" in text
    assert text.count("<-") == 1


def test_a_table_is_read_again():
    groups = [
        report.Group("ads, 2 ranks, 9 samples per rank", [_STOCK, _OURS]),
        report.Group("a9a, 1 process", [_ABORTED, _OURS]),
    ]
    text = summary.table(groups)
    found = summary.read(text)
    assert summary.table(found) == text
    assert found[1].rows[0] == _ABORTED
    assert [(g.workload, g.ranks) for g in found] == [("ads", 2), ("a9a", 1)]


def test_one_chart_of_every_workload_and_a_headline(tmp_path):
    chart = pytest.importorskip("benchmarks.chart")
    alone = dataclasses.replace(_OURS, egress=0.0)
    groups = [
        report.Group("ads, 1 process", [alone]),
        report.Group("ads, 2 ranks", [_STOCK, _ABORTED, _OURS]),
        report.Group("a9a, 2 ranks", [_STOCK, _OURS]),
    ]
    chart.draw_workloads(tmp_path, groups)
    paths = sorted(tmp_path.iterdir())
    assert [path.stem for path in paths] == ["a9a", "ads", "headline"]
    first = [path.read_bytes() for path in paths]
    chart.draw_workloads(tmp_path, groups)
    assert first == [path.read_bytes() for path in paths]


def test_panels_without_data_are_left_out(tmp_path):
    chart = pytest.importorskip("benchmarks.chart")
    alone = dataclasses.replace(_OURS, egress=0.0)
    group = report.Group("a, 1 process", [alone])
    drawn = [panel[1] for _, panel in chart.measured([group])]
    assert drawn == ["steps_per_second", "peak_rss"]
    path = tmp_path / "chart.png"
    chart.draw(path, [report.Group("b, 1 process", [_ABORTED])])
    assert not path.exists()
