# SPDX-License-Identifier: Apache-2.0
"""How popular rows are, modelled to count unique ones.

Raw ids have popularity ranks 1, 2, 3, ... 2^63; rank k is drawn
in proportion to k^-s (Zipf's law, exponent s) and hashed into the table's rows.
Of a table of N rows, row k (numbered by popularity) is thus drawn with

    p_k = k^-s / Z + T / N    Z = sum of k^-s over all ranks
                              T = share of the ranks above N

and n draws ask for sum over k of 1 - (1 - p_k)^n unique rows. s = 0 is
uniform; the larger s, the more the popular rows dominate. The sum is taken
over the first ranks one by one, then over ranges of ranks that grow by a
factor, each with its mean p.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

DEFAULT_EXPONENT = 1.1
LARGEST_EXPONENT = 8.0

_RAW_IDS = 2.0**63
_SINGLE_RANKS = 8
_GROWTH = 1.3


class Popularity:
    """Row popularity of several features.

    Args:
        rows: of each feature's table, `[F]`.
        exponents: s of each feature, `[F]`.
    """

    def __init__(self, rows: Floats, exponents: Floats) -> None:
        last = rows[:, None] + 1.0
        edges = _edges(float(rows.max(initial=1.0)))
        first = np.minimum(edges[:-1], last)
        end = np.minimum(edges[1:], last)
        s = exponents[:, None]
        norm = _sum_of_powers(_edges(_RAW_IDS), s).sum(1, keepdims=True)
        mass = _sum_of_powers(np.hstack([first, end[:, -1:]]), s) / norm
        tail = np.maximum(1.0 - mass.sum(1, keepdims=True), 0.0)
        self._count = end - first
        self._chance = (
            mass / np.maximum(self._count, 1.0) + tail / rows[:, None]
        )
        self._log_miss = np.log1p(-np.minimum(self._chance, 1.0 - 1e-12))

    def unique(self, draws: Floats) -> Floats:
        """Expected number of unique rows among `draws` ids, `[F]`."""
        met = -np.expm1(draws[:, None] * self._log_miss)
        return np.asarray(np.minimum((self._count * met).sum(1), draws))

    def repeated(self, draws: Floats) -> Floats:
        """Expected number of rows that occur more than once, `[F]`."""
        n = draws[:, None]
        once = n * self._chance * np.exp((n - 1.0) * self._log_miss)
        several = -np.expm1(n * self._log_miss) - once
        return np.asarray((self._count * np.maximum(several, 0.0)).sum(1))


def exponents_for(rows: Floats, draws: Floats, unique: Floats) -> Floats:
    """The exponents under which `draws` ids have so many unique rows.

    Args:
        rows: of each table, `[F]`.
        draws: number of ids, `[F]`.
        unique: unique rows among them, `[F]`; what no exponent can explain
            gives the nearest one.

    Returns:
        `[F]`.
    """
    low = np.zeros_like(rows)
    high = np.full_like(rows, LARGEST_EXPONENT)
    for _ in range(30):
        middle = 0.5 * (low + high)
        # The more skewed, the fewer unique rows.
        more = Popularity(rows, middle).unique(draws) > unique
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
