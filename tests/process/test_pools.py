# SPDX-License-Identifier: Apache-2.0
"""Ranks that wait for scenarios: they sleep, and none outlives a failure."""

import os
import time

import pytest

pytestmark = pytest.mark.process


@pytest.fixture
def run(pools):
    """Runs a function of `pool_scenarios` on two ranks."""

    def run(name, **how):
        return pools.run(f"pool_scenarios.{name}", ranks=2, keras=3, **how)

    return run


def test_ranks_stay_and_sleep(run):
    for (pid, one), (again, other) in zip(
        run("used"), run("used"), strict=True
    ):
        assert pid == again
        assert max(one, other) < 0.25


def test_scenarios_know_nothing_of_each_other(run):
    first, second = run("starts_afresh"), run("starts_afresh")
    assert first == second
    assert first[0] == first[1]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fails", "rank 1:.*ValueError: as it was told to"),
        ("dies", "rank 1:\nit has ended"),
        ("hangs", r"\[1\] did not answer.*about to hang.*wait_for_ever"),
    ],
)
def test_what_fails_ends_its_ranks(run, name, said):
    before = [pid for pid, _ in run("used")]
    with pytest.raises(pytest.fail.Exception, match=f"(?s){said}"):
        run(name, limit=5.0)
    deadline = time.monotonic() + 20
    while any(map(alive, before)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, before))
    after = [pid for pid, _ in run("used")]
    assert not set(before) & set(after)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
