# SPDX-License-Identifier: Apache-2.0
"""Tables show the worst rank, targets are judged by it."""

import json

import pytest

from benchmarks import launch
from benchmarks import report

_SETTINGS = {
    "workload": "timelines",
    "ranks": 4,
    "egress": "150mbps",
    "batch": 256,
    "wire_dtype": "float32",
}


def _result(milliseconds, egress, problem=""):
    return {
        "steps": 10,
        "step_ms": {"min": 1.0, "p50": milliseconds, "p99": 9.0},
        "per_step": {
            "egress_bytes": egress,
            "ingress_bytes": 2.0,
            "cpu_ms": 3.0,
        },
        "errors": {"rows": 1e-7, "dense": 1e-8},
        "problem": problem,
        "peak_rss_bytes": 5e8,
    }


def _outcome(*results):
    return launch.Outcome("ok", "", results, 1.0)


_STOCK = report.make_row(
    "stock-sparse", _outcome(_result(400.0, 26e6), _result(400.0, 26e6))
)
_OURS = report.make_row(
    "hybrid-row", _outcome(_result(20.0, 1.0e6), _result(25.0, 1.2e6))
)
_ABORTED = report.make_row(
    "stock-dense", launch.Outcome("aborted", "rank 2 (SIGABRT)", (), 1.0)
)


def test_row_is_the_worst_rank():
    assert _OURS.milliseconds == 25.0
    assert _OURS.egress == 1.2e6
    assert _OURS.error == 1e-7
    assert _OURS.steps_per_second == pytest.approx(40.0)


def test_dilation_divides_times_but_not_processor_time():
    row = report.make_row("hybrid-row", _outcome(_result(20.0, 1.0)), 4)
    assert (row.milliseconds, row.p99) == (5.0, 9.0 / 4)
    assert row.cpu_milliseconds == 3.0


def test_table_compares_with_stock():
    lines = report.table([_STOCK, _OURS], counted=True).splitlines()
    assert "16.00" in lines[-1]  # times faster
    assert "21.7" in lines[-1]  # times fewer bytes
    assert "1.200" in lines[-1]  # MB


def test_one_process_is_not_compared_with_several():
    alone = report.make_row("fbgemm", _outcome(_result(5.0, 0.0)))
    lines = report.table([_STOCK, alone], counted=True).splitlines()
    assert lines[-1].split()[4] == "-"


def test_table_hides_bytes_that_were_not_counted():
    line = report.table([_OURS], counted=False).splitlines()[-1]
    assert "1.200" not in line
    assert line.split()[4:7] == ["-", "-", "-"]


def test_table_goes_on_after_an_aborted_variant():
    text = report.table([_ABORTED, _OURS], counted=True)
    assert "stock-dense       aborted: rank 2 (SIGABRT)" in text
    assert "hybrid-row" in text


def test_table_says_that_stock_differs():
    row = report.make_row(
        "stock-sparse", _outcome(_result(1.0, 1.0, "differs by 1"))
    )
    assert "differs by 1" in report.table([row], counted=True)


def test_an_asynchronous_variant_has_no_error():
    result = {**_result(1.0, 1.0), "asynchronous": True}
    row = report.make_row("parameter-server", _outcome(result))
    line = report.table([row], counted=True).splitlines()[-1]
    assert line.split()[-1] == "asynchronous"


def test_verdicts_judge_speed_and_bytes():
    lines = report.verdicts([_STOCK, _OURS], _SETTINGS)
    assert len(lines) == 2
    assert all(line.startswith("reached") for line in lines)
    slow = report.make_row("hybrid-row", _outcome(_result(60.0, 1.4e6)))
    lines = report.verdicts([slow], _SETTINGS)
    assert all(line.startswith("NOT REACHED") for line in lines)


def test_an_aborted_variant_reaches_nothing():
    row = report.Row("hybrid-row", "aborted", "why")
    for line in report.verdicts([row], _SETTINGS):
        assert line.startswith("NOT REACHED")
        assert "measured: aborted" in line


@pytest.mark.parametrize(
    "other",
    [{"egress": "1gbit"}, {"batch": 64}, {"ranks": 2}, {"workload": "smoke"}],
)
def test_targets_hold_only_for_their_settings(other):
    assert report.verdicts([_OURS], _SETTINGS | other) == []


def test_json_keeps_every_rank(tmp_path):
    path = tmp_path / "result.json"
    outcome = _outcome(_result(20.0, 1.0e6), _result(25.0, 1.2e6))
    report.write_json(path, _SETTINGS, {"cpus": 2}, {"hybrid-row": outcome})
    content = json.loads(path.read_text())
    results = content["variants"]["hybrid-row"]["results"]
    assert [r["step_ms"]["p50"] for r in results] == [20.0, 25.0]


def test_chart_is_a_png(tmp_path):
    chart = pytest.importorskip("benchmarks.chart")
    path = tmp_path / "chart.png"
    group = report.Group("title", [_STOCK, _ABORTED, _OURS])
    chart.draw(path, [group, group])
    assert path.read_bytes().startswith(b"\x89PNG")
