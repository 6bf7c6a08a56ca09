# SPDX-License-Identifier: Apache-2.0
"""Shares of a batch that follow from measured times."""

import numpy as np
import pytest

from tfdist_ext.strategy import speeds
from tfdist_ext.strategy.speeds import Line

TOTAL = 400.0


def lines(fixed, slopes, shares):
    return [
        Line(a, b, share * TOTAL)
        for a, b, share in zip(fixed, slopes, shares, strict=True)
    ]


def slowest(found, shares):
    return max(
        line.at(share * TOTAL)
        for line, share in zip(found, shares, strict=True)
    )


@pytest.mark.parametrize(
    ("fixed", "slopes", "expected"),
    [
        ([0, 0], [1, 3], [3 / 4, 1 / 4]),
        ([0, 0, 0, 0], [1, 1, 3, 1], [0.3, 0.3, 0.1, 0.3]),
        ([100, 0], [1, 1], [150 / 400, 250 / 400]),
        # No samples would make this rank as fast as the others.
        ([2000, 0, 0], [1, 10, 10], [1 / 60, 59 / 120, 59 / 120]),
    ],
)
def test_slowest_rank_takes_least_time(fixed, slopes, expected):
    equal = [1 / len(fixed)] * len(fixed)
    found = speeds.divided(lines(fixed, slopes, equal), equal)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert sum(found) == pytest.approx(1)


@pytest.mark.parametrize(
    ("fixed", "slopes"), [([10, 0], [1, 1]), ([0, 0], [1.04, 1])]
)
def test_small_gains_change_nothing(fixed, slopes):
    equal = [0.5, 0.5]
    assert speeds.divided(lines(fixed, slopes, equal), equal) == equal


def test_no_division_is_better_than_the_found_one():
    rng = np.random.default_rng(0)
    for _ in range(20):
        shares = rng.dirichlet(np.full(5, 10.0)).tolist()
        of_ranks = lines(rng.random(5) * 20, rng.random(5) + 0.2, shares)
        best = slowest(of_ranks, speeds.divided(of_ranks, shares))
        for other in rng.dirichlet(np.full(5, 5.0), size=200):
            least = 0.05 / 5
            if other.min() >= least:
                assert best <= slowest(of_ranks, other) / 0.95 + 1e-9


def test_ends_are_contiguous_and_end_at_one():
    ends = speeds.ends_of([0.7, 0.2, 0.1])
    np.testing.assert_allclose(ends, [0, 0.7, 0.9, 1])
    assert ends[-1] == 1
    assert speeds.ends_of([3, 0, 0]).tolist() == [0, 1, 1, 1]
    assert speeds.ends_of([0.1] * 10)[-1] == 1


def steps(watch, count, samples, seconds, waited=0.0, start=0):
    """Notes steps of equal length; returns the next count and time."""
    now = 100.0 * start
    for i in range(count + 1):
        watch.note(start + i, samples, now, i * waited)
        now += seconds + waited


def test_line_is_known_after_half_of_an_interval():
    watch = speeds.Watch(10)
    steps(watch, 4, 50, 0.2)
    assert watch.line() is None
    steps(watch, 6, 50, 0.2, start=20)
    assert watch.line().at(50) == pytest.approx(0.2)


def test_waits_and_single_long_steps_do_not_count():
    watch = speeds.Watch(10)
    watch.note(0, 50, 0.0, 0.0)
    watch.note(1, 50, 7.0, 0.0)  # traced
    for i in range(2, 10):
        watch.note(i, 50, 7.0 + 0.5 * (i - 1), 0.3 * (i - 1))
    line = watch.line()
    assert line.at(50) == pytest.approx(0.2)
    assert line.fixed == 0  # nothing is known of other numbers of samples


def test_time_between_two_iterators_does_not_count():
    watch = speeds.Watch(4)
    for _ in range(3):
        steps(watch, 1, 50, 0.2)
    assert watch.line().at(50) == pytest.approx(0.2)


def test_fixed_time_is_told_from_time_per_sample():
    watch = speeds.Watch(10)
    for samples in (100, 40):
        steps(watch, 10, samples, 0.1 + 0.002 * samples)
        line = watch.line()
    assert line.samples == 40
    assert line.fixed == pytest.approx(0.1)
    assert line.slope == pytest.approx(0.002)


def test_average_moves_slowly():
    watch = speeds.Watch(10)
    steps(watch, 10, 100, 0.2)
    watch.line()
    steps(watch, 10, 100, 0.4)
    assert watch.line().at(100) == pytest.approx(0.3)
