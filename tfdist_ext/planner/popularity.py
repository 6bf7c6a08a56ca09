# SPDX-License-Identifier: Apache-2.0
"""How popular rows are: measured, or modelled to count distinct ones.

In the model, raw ids have popularity ranks 1, 2, 3, ... 2^63; rank k is drawn
in proportion to k^-s (Zipf's law, exponent s) and hashed into the table's rows.
Of a table of N rows, row k (numbered by popularity) is thus drawn with

    p_k = k^-s / Z + T / N    Z = sum of k^-s over all ranks
                              T = share of the ranks above N

and n draws ask for sum over k of 1 - (1 - p_k)^n distinct rows. s = 0 is
uniform; the larger s, the more the popular rows dominate. The sum is taken
over the first ranks one by one, then over ranges of ranks that grow by a
factor, each with its mean p.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

DEFAULT_EXPONENT = 1.1
LARGEST_EXPONENT = 8.0

_RAW_IDS = 2.0**63
_SINGLE_RANKS = 8
_GROWTH = 1.3


def most_frequent_ids(ids: Iterable[Any], k: int) -> npt.NDArray[np.int64]:
    """The ids that occur most often in a sample: hot rows, as measured.

    >>> most_frequent_ids([[7, 3, 7], [5, 3, 9]], k=2).tolist()
    [3, 7]

    Args:
        ids: an array of non-negative integers, or an iterable of such arrays,
            for example `dataset.take(100).as_numpy_iterator()`; of ragged and
            sparse values the flat values count. Negative ids are left out.
        k: how many.

    Returns:
        int64 `[k]`, the most frequent first and equals ascending; fewer if
        there are no more.
    """
    found: npt.NDArray[np.int64] = np.zeros(0, np.int64)
    counts: npt.NDArray[np.int64] = np.zeros(0, np.int64)
    for part in [ids] if isinstance(ids, np.ndarray) else ids:
        flat = getattr(part, "flat_values", getattr(part, "values", part))
        more = np.asarray(flat, np.int64).ravel()
        more = more[more >= 0]
        # One time each, besides the times that were counted before.
        times = np.concatenate([counts, np.ones(len(more), np.int64)])
        both = np.concatenate([found, more])
        found = np.unique(both)
        places = np.searchsorted(found, both)
        counts = np.bincount(places, times, len(found)).astype(np.int64)
    return found[np.argsort(-counts, kind="stable")[:k]]


class Popularity:
    """Row popularity of several features.

    Rows that are hot (the most popular ones) are left out of all counts.

    Args:
        rows: of each feature's table, `[F]`.
        exponents: s of each feature, `[F]`.
        hot_rows: of each feature's table, `[F]`; None for none.
    """

    def __init__(
        self, rows: Floats, exponents: Floats, hot_rows: Floats | None = None
    ) -> None:
        last = rows[:, None] + 1.0
        edges = _edges(float(rows.max(initial=1.0)))
        first = np.minimum(edges[:-1], last)
        end = np.minimum(edges[1:], last)
        s = exponents[:, None]
        norm = _sum_of_powers(_edges(_RAW_IDS), s).sum(1, keepdims=True)
        mass = _sum_of_powers(np.hstack([first, end[:, -1:]]), s) / norm
        tail = np.maximum(1.0 - mass.sum(1, keepdims=True), 0.0)
        count = end - first
        mean = mass / np.maximum(count, 1.0) + tail / rows[:, None]
        hot = np.zeros_like(last) if hot_rows is None else hot_rows[:, None]
        self._log_miss = np.log1p(-np.minimum(mean, 1.0 - 1e-12))
        self._chance = mean
        self._count = count - np.clip(hot + 1.0 - first, 0.0, count)
        self._hot = count - self._count

    def cold_share(self) -> Floats:
        """Share of the draws that fall on rows that are not hot, `[F]`."""
        share = (self._count * self._chance).sum(1)
        return np.asarray(np.clip(share, 0.0, 1.0))

    def distinct(self, draws: Floats) -> Floats:
        """Expected number of distinct rows among `draws` ids, `[F]`."""
        return self._expected(self._count, draws)

    def distinct_hot(self, draws: Floats) -> Floats:
        """Expected number of distinct hot rows among `draws` ids, `[F]`."""
        return self._expected(self._hot, draws)

    def repeated(self, draws: Floats) -> Floats:
        """Expected number of rows that occur more than once, `[F]`."""
        n = draws[:, None]
        once = n * self._chance * np.exp((n - 1.0) * self._log_miss)
        several = -np.expm1(n * self._log_miss) - once
        return np.asarray((self._count * np.maximum(several, 0.0)).sum(1))

    def _expected(self, count: Floats, draws: Floats) -> Floats:
        met = -np.expm1(draws[:, None] * self._log_miss)
        expected = (count * met).sum(1)
        return np.asarray(np.minimum(expected, draws))


def exponents_for(rows: Floats, draws: Floats, unique: Floats) -> Floats:
    """The exponents under which `draws` ids have `unique` distinct rows.

    Args:
        rows: of each table, `[F]`.
        draws: number of ids, `[F]`.
        unique: distinct rows among them, `[F]`; what no exponent can explain
            gives the nearest one.

    Returns:
        `[F]`.
    """
    low = np.zeros_like(rows)
    high = np.full_like(rows, LARGEST_EXPONENT)
    for _ in range(30):
        middle = 0.5 * (low + high)
        # The more skewed, the fewer distinct rows.
        more = Popularity(rows, middle).distinct(draws) > unique
        low = np.where(more, middle, low)
        high = np.where(more, high, middle)
    return 0.5 * (low + high)


def _edges(last: float) -> Floats:
    """First ranks of the ranges that cover ranks 1 to `last`, and the end."""
    single = np.arange(1.0, _SINGLE_RANKS + 1.0)
    steps = max(math.ceil(math.log(last / _SINGLE_RANKS, _GROWTH)), 0) + 1
    grown = _SINGLE_RANKS * _GROWTH ** np.arange(1.0, steps + 1.0)
    return np.concatenate([single, np.ceil(grown), [last + 1.0]]).clip(
        max=last + 1.0
    )


def _sum_of_powers(edges: Floats, s: Floats) -> Floats:
    """Sums of k^-s over the ranges between `edges`, `[F, ranges]`."""
    edges = np.broadcast_to(edges, (len(s), edges.shape[-1]))
    first, end = edges[:, :-1], edges[:, 1:]
    # The integral from half a rank below; exact where a range is one rank.
    power = np.where(np.abs(1.0 - s) < 1e-9, 1e-9, 1.0 - s)
    start = first - 0.5
    ratio = np.log((end - 0.5) / start)
    area = start**power * np.expm1(power * ratio) / power
    return np.asarray(np.where(end - first == 1.0, first**-s, area))
