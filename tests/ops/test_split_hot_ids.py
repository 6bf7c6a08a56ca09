# SPDX-License-Identifier: Apache-2.0
"""Ids of hot rows told from those that travel."""

import numpy as np
import pytest
import tensorflow as tf

from tests.reference import ids as reference_ids
from tfdist_ext.ops import id_ops

NONE = np.zeros(0, np.float32)
HOT = [0, 7, 8, 31, 2**40 - 1]


def batch_of(rng, dtype, weighted, limit=40):
    counts = rng.integers(0, 6, 30)
    counts[::4] = 0
    row_splits = np.concatenate([[0], np.cumsum(counts)])
    # Some are out of range: these are cold.
    ids = rng.integers(-3, limit, row_splits[-1]).astype(dtype)
    weights = rng.normal(size=len(ids) * weighted).astype(np.float32)
    return ids, row_splits, weights


def split_by_numpy(lists, hot_ids, first_row):
    """Sample by sample: the cold part, then the hot one, as two CSRs."""
    weighted = any(len(weights) for *_, weights in lists)
    cold, hot = [], []
    for s in range(len(lists[0][1]) - 1):
        entries = [
            (int(ids[i]), float(weights[i]) if len(weights) else 1.0)
            for ids, splits, weights in lists
            for i in range(splits[s], splits[s + 1])
        ]
        cold.append([e for e in entries if e[0] not in hot_ids])
        hot.append(
            [
                (first_row + hot_ids.index(id_), weight)
                for id_, weight in entries
                if id_ in hot_ids
            ]
        )
    samples = [s for s, entries in enumerate(hot) if entries]
    hot = [hot[s] for s in samples]
    return [*_csr(cold, weighted), samples, *_splits_first(hot, weighted)]


def _csr(samples, weighted):
    flat = [entry for entries in samples for entry in entries]
    splits = np.cumsum([0, *(len(entries) for entries in samples)])
    weights = [weight for _, weight in flat] if weighted else []
    return [id_ for id_, _ in flat], splits, weights


def _splits_first(samples, weighted):
    rows, splits, weights = _csr(samples, weighted)
    return splits, rows, weights


@pytest.mark.parametrize("module", [id_ops, reference_ids])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_split_same_as_numpy(dtype, count, weighted, module):
    rng = np.random.default_rng(count)
    lists = [batch_of(rng, dtype, weighted and i == 0) for i in range(count)]
    found = module.split_hot_ids(
        *zip(*lists, strict=True), hot_ids=HOT, first_row=100
    )
    expected = split_by_numpy(lists, HOT, 100)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, np.array(theirs))
    dtypes = [part.dtype for part in found]
    whole = [tf.int64, tf.float32]
    assert dtypes == [dtype, *whole, tf.int32, tf.int64, *whole]


@pytest.mark.parametrize("ids", [[], [1, 2, 3], [7, 0, 7]])
def test_nothing_only_cold_and_only_hot(ids):
    lists = [(np.array(ids, np.int64), np.array([0, 0, len(ids)]), NONE)]
    found = id_ops.split_hot_ids(
        *zip(*lists, strict=True), hot_ids=HOT, first_row=0
    )
    for ours, theirs in zip(found, split_by_numpy(lists, HOT, 0), strict=True):
        np.testing.assert_array_equal(ours, np.array(theirs))


def test_a_hot_id_may_not_repeat():
    with pytest.raises(tf.errors.InvalidArgumentError, match="has 3 twice"):
        id_ops.split_hot_ids(
            [np.array([1])],
            [np.array([0, 1])],
            [NONE],
            hot_ids=[3, 5, 3],
            first_row=0,
        )


def test_malformed_row_splits_are_refused():
    with pytest.raises(tf.errors.InvalidArgumentError):
        id_ops.split_hot_ids(
            [np.array([1])],
            [np.array([0, 2])],
            [NONE],
            hot_ids=[3],
            first_row=0,
        )
