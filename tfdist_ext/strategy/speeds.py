# SPDX-License-Identifier: Apache-2.0
"""Measured speeds of the ranks, and the shares of a batch that follow.

A rank's step takes a + b n seconds for n samples, without the time in which it
waits for other ranks. The samples are divided such that the slowest rank takes
as little time as possible. This module does not use TensorFlow.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import statistics
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# Points with other numbers of samples that a rank's line is fitted to.
_POINTS = 4
# Numbers of samples that differ by less are taken for equal.
_CLOSE = 0.1
# Weight of the newest median in the moving average.
_NEWEST = 0.5
# Least share of a step's time that is taken to be proportional to the samples.
_LEAST_SLOPE = 0.1
# Least share of a rank, of an equal share: with no samples it could not be
# measured again.
_LEAST_SHARE = 0.05
# Least seconds of a step.
_SHORTEST = 1e-9
# The shares change only if the slowest rank gains this share of its time.
_GAIN = 0.05
# Share of an interval's steps that must have been measured. The first step of
# an iterator is not measured.
_ENOUGH = 0.5


@dataclasses.dataclass(frozen=True)
class Line:
    """Seconds of a step as a function of a rank's samples.

    Attributes:
        fixed: seconds of a step without samples.
        slope: seconds per sample, more than 0.
        samples: number of samples that was measured last.
    """

    fixed: float
    slope: float
    samples: float

    def at(self, samples: float) -> float:
        """Seconds of a step with a number of samples."""
        return self.fixed + self.slope * samples


class Watch:
    """What a rank's steps take, as a slow moving average.

    Args:
        interval: steps after which ranks agree on shares.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._last: tuple[int, float, float, float] | None = None
        self._steps = collections.deque[tuple[float, float]](maxlen=interval)
        # Samples and seconds, with the newest number of samples last.
        self._points: list[tuple[float, float]] = []

    def note(
        self, count: int, samples: float, now: float, waited: float
    ) -> None:
        """Records that a step has got its batch.

        Args:
            count: number of the batch in its iterator.
            samples: this rank's samples in the batch.
            now: time in seconds.
            waited: seconds that this rank has waited for other ranks so far.
        """
        if self._last is not None and count == self._last[0] + 1:
            _, before, then, waits = self._last
            busy = now - then - (waited - waits)
            self._steps.append((before, max(busy, 0.0)))
        self._last = count, samples, now, waited

    def line(self) -> Line | None:
        """The line so far; None before enough steps were measured.

        The steps since the last line become one point, their median.
        """
        if len(self._steps) >= _ENOUGH * self._interval:
            self._add_point()
        if not self._points:
            return None
        samples, seconds = self._points[-1]
        slope = seconds / samples
        if len(self._points) > 1:
            all_samples, all_seconds = np.array(self._points).T
            fitted = float(np.polyfit(all_samples, all_seconds, 1)[0])
            slope = min(max(fitted, _LEAST_SLOPE * slope), slope)
        return Line(seconds - slope * samples, slope, samples)

    def _add_point(self) -> None:
        samples = statistics.median(each for each, _ in self._steps)
        near = [t for n, t in self._steps if _is_close(n, samples)]
        self._steps.clear()
        if samples <= 0 or not near:
            return
        # The median leaves out steps that were traced, saved or validated.
        seconds = max(statistics.median(near), _SHORTEST)
        for i, (other, before) in enumerate(self._points):
            if _is_close(other, samples):
                del self._points[i]
                seconds = _NEWEST * seconds + (1 - _NEWEST) * before
                break
        self._points = [*self._points, (samples, seconds)][-_POINTS:]


def _is_close(a: float, b: float) -> bool:
    return abs(a - b) <= _CLOSE * max(a, b)


def divided(lines: Sequence[Line], shares: Sequence[float]) -> list[float]:
    """The shares with which the slowest rank takes least time.

    They stay as they are if that gains less than 5 % of its time.

    Args:
        lines: times of each rank.
        shares: shares of each rank up to now, their sum is 1.
    """
    total = sum(line.samples for line in lines)
    if total <= 0:
        return list(shares)
    least = max(_LEAST_SHARE * total / len(lines), min(1.0, total / len(lines)))
    fixed = np.array([line.fixed for line in lines])
    slope = np.array([line.slope for line in lines])

    def samples_in(seconds: float) -> Floats:
        found: Floats = np.maximum((seconds - fixed) / slope, least)
        return found

    # All ranks that have more than the least take equally long. Bisection.
    low = 0.0
    high = max(line.at(total) for line in lines)
    for _ in range(100):
        middle = (low + high) / 2
        if samples_in(middle).sum() < total:
            low = middle
        else:
            high = middle
    samples = samples_in(high)
    samples = samples / samples.sum() * total

    def slowest(of_ranks: Sequence[float]) -> float:
        return max(line.at(n) for line, n in zip(lines, of_ranks, strict=True))

    now = [share * total for share in shares]
    if slowest(samples.tolist()) > (1 - _GAIN) * slowest(now):
        return list(shares)
    found: list[float] = (samples / total).tolist()
    return found


def ends_of(shares: Sequence[float]) -> Floats:
    """Ends of contiguous shares, `[W + 1]`, from 0 to exactly 1.

    Args:
        shares: shares of the ranks, of any sum greater than 0.
    """
    ends = np.array([0.0, *itertools.accumulate(shares)], np.float64)
    # Equal to 1 also where the last ranks have no share.
    found: Floats = ends / ends[-1]
    return found
