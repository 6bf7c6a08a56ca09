# SPDX-License-Identifier: Apache-2.0
"""Starts and ends of jobs: what is made of the events, and a real one."""

import argparse

import pytest

from benchmarks import start


def _events(imported, cpu, stock=False):
    """Events of a rank with its imports done at a time, after `cpu` seconds."""
    names = ["imported", "met", "first step", "trained"]
    wall = {"imported": imported, "met": 12.0, "first step": 13.0}
    wall["trained"] = imported + 10.0
    return [
        {"event": name, "wall": wall[name], "cpu": cpu + index}
        for index, name in enumerate(names)
        if not (stock and name == "met")
    ]


def test_processor_time_is_that_of_a_rank_and_waits_are_of_the_last():
    found = start.start_of([_events(10.0, 2.0), _events(11.0, 4.0)], 22.5, 13.0)
    assert found.imports == pytest.approx(3.0)
    assert found.met == pytest.approx(1.0)
    assert found.first_step == pytest.approx(1.0)
    assert found.until_step == pytest.approx(5.0)
    assert found.exit == pytest.approx(13.0 / 2 - 6.0)
    assert found.meeting == pytest.approx(1.0)  # since the second one
    assert found.end == pytest.approx(1.5)


def test_stock_has_no_strategy_to_create():
    found = start.start_of([_events(10.0, 2.0, stock=True)], 20.0, 6.0, True)
    assert (found.met, found.meeting) == (0.0, 0.0)
    assert found.first_step == pytest.approx(2.0)


def test_medians_are_of_each_column():
    columns = [(1.0, 5.0), (2.0, 4.0), (9.0, 3.0)]
    starts = [start.Start(a, b, 0.0, 0.0, 0.0, 0.0) for a, b in columns]
    assert start.median_of(starts) == start.Start(2.0, 4.0, 0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("quick", [False, True])
def test_a_process_is_measured(quick, tmp_path):
    limits = argparse.Namespace(quick=quick, limit=300.0)
    found = start.measure(tmp_path / "job", 1, limits)
    assert found.imports > 0.5
    assert found.met > 0
    assert found.first_step > 0
    assert found.end > 0


def test_a_job_that_fails_is_no_measurement(tmp_path, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "{")
    limits = argparse.Namespace(quick=False, limit=300.0)
    with pytest.raises(RuntimeError, match="the job failed"):
        start.measure(tmp_path / "job", 1, limits)
