# SPDX-License-Identifier: Apache-2.0
"""Restarts: what is made of the events of the ranks, and the bounds."""

import os

import pytest

from benchmarks import restart


def _events(start, restored, steps, pace=1.0):
    """Events of a rank that does one thing after the other."""
    names = ["started", "imported", "met", "loaded", "built"]
    found = [
        {"event": name, "wall": start + pace * index, "cpu": float(index)}
        for index, name in enumerate(names)
    ]
    for index, step in enumerate([restored, *steps]):
        event = "step" if index else "restored"
        wall, cpu = start + pace * (5 + index), 5.0 + index
        found.append({"event": event, "wall": wall, "cpu": cpu, "step": step})
    return found


def _restart(restored=40):
    before = [_events(0.0, 0, range(1, 44)) for _ in range(2)]
    before[0].append({"event": "noticed", "wall": 100.5, "cpu": 99.0})
    steps = range(restored + 1, 46)
    after = [_events(102.0, restored, steps, pace) for pace in (1.0, 2.0)]
    return restart.restart_of(100.0, 100.1, 101.0, before, after)


def test_phases_end_with_the_last_rank_and_add_up():
    found = _restart()
    walls = {phase.name: round(phase.wall, 3) for phase in found.phases}
    assert walls == {
        "launcher noticed": 0.1,
        "others ended": 0.9,
        "processes started": 1.0,
        "imports": 2.0,
        "ranks met": 2.0,
        "own load": 2.0,
        "model built": 2.0,
        "checkpoint restored": 2.0,
        "first step": 2.0,
        "steps repeated": 4.0,
        "new step": 2.0,
    }
    assert found.repeated == 3
    assert found.noticed == pytest.approx(0.5)
    assert found.seconds == pytest.approx(102.0 + 2.0 * 9 - 100.0)


def test_a_start_without_a_checkpoint_is_no_restart():
    with pytest.raises(RuntimeError, match=r"went on from steps \[0\]"):
        _restart(restored=0)


def test_a_step_after_the_checkpoint_may_be_new():
    found = _restart(restored=43)
    walls = {phase.name: phase.wall for phase in found.phases}
    assert found.repeated == 0
    assert walls["steps repeated"] == walls["new step"] == 0.0


def test_bounds_leave_out_what_survivors_need_not_do(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    found = restart.bounds(_restart(), 2)
    # Noticed 1.1, met 2, trained 6, and on one core of two half of 8.
    assert list(found.values()) == pytest.approx([15.1, 14.1, 17.1, 15.1])
