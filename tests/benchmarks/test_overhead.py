# SPDX-License-Identifier: Apache-2.0
"""Ours loses when it fails or is slower, not when stock fails."""

from benchmarks import overhead


def _records(stock, hybrid):
    case = {"loop": "fit", "keras": "3", "ranks": 2}
    return [
        case | {"strategy": "stock"} | stock,
        case | {"strategy": "hybrid"} | hybrid,
    ]


_FAST = {"status": "ok", "p50": 1.0}
_SLOW = {"status": "ok", "p50": 2.0}
_FAILED = {"status": "aborted", "p50": 0.0}


def test_faster_than_stock():
    assert overhead.slower_cases(_records(_SLOW, _FAST)) == []


def test_slower_than_stock():
    names = overhead.slower_cases(_records(_FAST, _SLOW))
    assert names == ["fit loop, Keras 3, 2 ranks"]


def test_a_failure_is_no_victory():
    assert overhead.slower_cases(_records(_SLOW, _FAILED))
    assert overhead.slower_cases(_records(_FAILED, _FAILED))


def test_stock_may_fail():
    assert overhead.slower_cases(_records(_FAILED, _SLOW)) == []
