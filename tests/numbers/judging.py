# SPDX-License-Identifier: Apache-2.0
"""Gives the verdict that a program has, from what became of it."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

import numpy as np

from tests.numbers.registry import EQUAL
from tests.numbers.registry import REFUSED
from tests.numbers.registry import WARNED
from tests.numbers.registry import Program

if TYPE_CHECKING:
    from tests.numbers.scenario import Outcome

DIFFERENT = "DIFFERENT"
FAILED = "FAILED"
LEAST = 1e-3  # Numbers below this are compared as if they were so large.


@dataclasses.dataclass(frozen=True)
class Seen:
    """The verdict that a program has.

    Attributes:
        verdict: one of those of `registry`, `DIFFERENT` or `FAILED`.
        error: the largest relative error.
        where: the name of the array that has it, or the text of an error.
        said: the texts of warnings of rank 0 that stock does not give.
    """

    verdict: str
    error: float = 0.0
    where: str = ""
    said: tuple[str, ...] = ()


def judge(each: Program, stock: Outcome, ranks: list[Outcome]) -> Seen:
    """Compares a program on some ranks with one process of stock Keras.

    Args:
        each: the program.
        stock: what one process finds.
        ranks: what each rank finds.
    """
    said = _said(stock, ranks)
    failed = [rank for rank in ranks if rank.error]
    if stock.error and each.verdict != REFUSED:
        return Seen(FAILED, where=f"one process: {stock.error}", said=said)
    if failed:
        refused = len(failed) == len(ranks) and all(
            each.says and re.search(each.says, rank.error) for rank in failed
        )
        return Seen(
            REFUSED if refused else FAILED,
            where=f"{len(failed)} of {len(ranks)} ranks: {failed[0].error}",
            said=said,
        )
    error, where = _largest_error(stock, ranks)
    named = each.says and any(re.search(each.says, text) for text in said)
    if error <= each.tolerance and not (each.drawn and named):
        return Seen(EQUAL, error, where, said)
    return Seen(WARNED if named else DIFFERENT, error, where, said)


def _said(stock: Outcome, ranks: list[Outcome]) -> tuple[str, ...]:
    known = {text[:60] for text in stock.warnings}
    return tuple(text for text in ranks[0].warnings if text[:60] not in known)


def _largest_error(stock: Outcome, ranks: list[Outcome]) -> tuple[float, str]:
    """The largest error of any array and where it is.

    Ranks that do not agree with rank 0 to the last bit have an error of one.
    """
    worst = (0.0, "")
    for name, value in ranks[0].values.items():
        for number, rank in enumerate(ranks):
            if not _same(value, rank.values.get(name)):
                return np.inf, f"{name} differs between rank 0 and {number}"
        if name not in stock.values:
            return np.inf, f"{name} is not in one process"
        error = error_of(value, stock.values[name])
        worst = max(worst, (error, name))
    missing = set(stock.values) - set(ranks[0].values)
    return (np.inf, f"{min(missing)} is missing") if missing else worst


def _same(a: np.ndarray, b: np.ndarray | None) -> bool:
    if b is None or a.shape != b.shape:
        return False
    numbers = a.dtype.kind in "fc"
    return bool(np.array_equal(a, b, equal_nan=numbers))


def error_of(actual: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, relative to the largest value."""
    if actual.shape != expected.shape:
        return np.inf
    if not expected.size or _same(actual, expected):
        return 0.0
    if expected.dtype.kind not in "fiub":
        return np.inf
    actual, expected = (
        actual.astype(float).ravel(),
        expected.astype(float).ravel(),
    )
    with np.errstate(invalid="ignore"):
        error = np.abs(actual - expected)
    error[np.isnan(actual) & np.isnan(expected)] = 0
    error[np.isinf(actual) & (actual == expected)] = 0
    scale = max(np.abs(np.nan_to_num(expected)).max(), LEAST)
    worst = error.max() / scale
    return np.inf if np.isnan(worst) else float(worst)
