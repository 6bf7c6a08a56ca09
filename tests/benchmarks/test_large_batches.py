# SPDX-License-Identifier: Apache-2.0
"""The benchmark of large batches: its data, its measure, a short run."""

import numpy as np
import pytest

from benchmarks import large_batches


def test_auc_is_the_share_of_pairs_in_order():
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 10, 200).astype(np.float64)
    labels = rng.integers(0, 2, 200)
    ones, zeros = scores[labels == 1], scores[labels == 0]
    above = (ones[:, None] > zeros).mean() + (ones[:, None] == zeros).mean() / 2
    assert large_batches.auc(scores, labels) == pytest.approx(above)


def test_all_seeds_have_the_same_truth():
    first, second = (large_batches.make_data(50, 4000, s) for s in (0, 1))
    assert (first.ids != second.ids).any()
    best = large_batches.auc(first.odds, first.labels[:, 0])
    assert 0.7 < best < 0.95
    # With one row per table all samples are alike, whatever the seed.
    alike = [large_batches.make_data(1, 5, seed).odds for seed in (0, 1)]
    np.testing.assert_allclose(alike, alike[0][0], rtol=1e-12)


def test_a_short_run_prints_a_row_for_each_rule_and_batch(monkeypatch, capsys):
    options = "--samples 2048 --test-samples 512 --epochs 1 --rows 20"
    options += " --batches 256 1024 --reference 256"
    monkeypatch.setattr("sys.argv", ["large_batches", *options.split()])
    large_batches.main()
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split("|")[1:-1] for line in lines if line[:3] != "|--"]
    rows = [[cell.strip() for cell in row] for row in rows if row][1:]
    assert [row[:3] for row in rows] == [
        [rule, batch, steps]
        for rule in large_batches.RULES
        for batch, steps in (("256", "8"), ("1024", "2"))
    ]
    assert all(0 < float(row[4]) < 1 for row in rows)
