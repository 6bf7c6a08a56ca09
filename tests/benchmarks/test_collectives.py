# SPDX-License-Identifier: Apache-2.0
"""Bandwidth formulas, the slowest rank, targets, expected results."""

import numpy as np
import pytest

from benchmarks import collectives
from benchmarks import exchange_rates
from benchmarks import launch
from benchmarks import network


def _record(collective, numbers, stock, hybrid):
    return {
        "collective": collective,
        "numbers": numbers,
        "error": 0.0,
        "stock": {"min": 1.0, "p50": stock, "p99": stock},
        "hybrid": {"min": 1.0, "p50": hybrid, "p99": hybrid},
    }


def test_bandwidth_of_all_reduce():
    # 4 MB in 1 ms; a ring sends 2 (n - 1) / n of it.
    algbw, busbw = collectives.bandwidths("all_reduce", 10**6, 4, 1.0)
    assert algbw == pytest.approx(4.0)
    assert busbw == pytest.approx(6.0)


def test_bandwidth_of_all_to_all():
    # 4 MB to each of 4 ranks in 1 ms; a rank's own slice stays.
    algbw, busbw = collectives.bandwidths("all_to_all", 10**6, 4, 1.0)
    assert algbw == pytest.approx(16.0)
    assert busbw == pytest.approx(12.0)


def test_the_slowest_rank_counts():
    merged = collectives.worst_ranks(
        [
            [_record("all_reduce", 4, stock=1.0, hybrid=5.0)],
            [_record("all_reduce", 4, stock=2.0, hybrid=3.0)],
        ]
    )
    assert merged[0]["stock"]["p50"] == 2.0
    assert merged[0]["hybrid"]["p50"] == 5.0


def test_verdict_is_that_of_the_worst_size():
    records = [
        _record("all_reduce", 4, stock=1.0, hybrid=1.25),
        _record("all_reduce", 2**24, stock=10.0, hybrid=4.0),
    ]
    any_size, large = collectives.verdicts(records)
    assert any_size.startswith("NOT REACHED")
    assert "0.80 at 4" in any_size
    assert large.startswith("reached")


def test_no_verdict_without_both_sides():
    record = _record("all_reduce", 4, stock=1.0, hybrid=1.0)
    del record["hybrid"]
    assert collectives.verdicts([record]) == []


def test_table_has_a_line_per_size_and_side():
    records = [_record("all_to_all", 4, stock=2.0, hybrid=1.0)]
    lines = collectives.table(records, ranks=2)
    assert len(lines) == 3
    assert lines[2].split()[-1] == "2.00"


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_expected_all_reduce_is_the_sum(ranks):
    case = exchange_rates.COLLECTIVES["all_reduce"]
    inputs = [case.make_input(rank, ranks, 5) for rank in range(ranks)]
    np.testing.assert_array_equal(
        case.expected(0, ranks, 5), np.sum(inputs, axis=0)
    )


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_expected_all_to_all_is_the_transposition(ranks):
    case = exchange_rates.COLLECTIVES["all_to_all"]
    sent = [case.make_input(rank, ranks, 5) for rank in range(ranks)]
    for receiver in range(ranks):
        received = case.expected(receiver, ranks, 5)
        for sender in range(ranks):
            np.testing.assert_array_equal(
                received[sender], sent[sender][receiver]
            )
    # Every slice differs, so a mix-up shows.
    assert len(np.unique(np.concatenate(sent)[:, 0])) == ranks * ranks


@pytest.mark.process
def test_stock_and_ours_take_turns_in_the_same_processes(tmp_path):
    """Both have exact results, or the job fails."""
    options = {
        "sides": ["stock", "hybrid"],
        "seconds": 0.01,
        "turns": 2,
        "sweep": [("all_reduce", 4), ("all_to_all", 4)],
    }
    outcome = launch.run_job(
        "collectives", options, network.loopback(2), tmp_path / "job", 120
    )
    assert outcome.status == "ok", outcome.reason
    for record in collectives.worst_ranks(
        [result["records"] for result in outcome.results]
    ):
        assert record["error"] == 0
        assert 0 < record["hybrid"]["min"] <= record["hybrid"]["p50"]
        assert 0 < record["stock"]["min"] <= record["stock"]["p50"]
