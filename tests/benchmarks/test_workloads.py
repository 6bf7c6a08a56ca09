# SPDX-License-Identifier: Apache-2.0
"""The workloads have the published sizes, the ids are skewed but even."""

import numpy as np
import pytest

from benchmarks import workloads


@pytest.mark.parametrize(
    ("name", "millions"),
    [("timelines", 22.8), ("ads", 478.2), ("criteo", 540.2)],
)
def test_sizes_are_the_published_ones(name, millions):
    weights = workloads.WORKLOADS[name].weights
    assert weights / 1e6 == pytest.approx(millions, abs=0.1)


@pytest.mark.parametrize("rows", [3, 1000, 2**17])
def test_ids_are_in_range(rows):
    ids = workloads.scattered_zipf(np.random.default_rng(0), (64, 10), rows)
    assert ids.dtype == np.int64
    assert ids.shape == (64, 10)
    assert ids.min() >= 0
    assert ids.max() < rows


@pytest.mark.parametrize(
    ("table", "distinct"), [(0, (190, 215)), (1, (200, 222))]
)
def test_movielens_is_as_skewed_as_the_ratings(table, distinct):
    """256 ratings of ml-100k are of 203 users and 211 items on average."""
    movielens = workloads.WORKLOADS["movielens"]
    ids = workloads.make_batch(movielens, 256, 0, 0).ids[table]
    assert ids.min() >= 0
    assert ids.max() < movielens.tables[table].rows
    assert distinct[0] < len(np.unique(ids)) < distinct[1]


def test_heads_name_the_layers_of_their_towers():
    layers = {name: w.layers for name, w in workloads.WORKLOADS.items()}
    assert layers["smoke"] == (((9, 8), (8, 1)),)
    assert layers["movielens"] == (((32, 64), (64, 32)),) * 2
    assert layers["a9a"] == ()


def test_ids_are_skewed():
    ids = workloads.scattered_zipf(np.random.default_rng(0), (100_000,), 2**17)
    counts = np.sort(np.unique(ids, return_counts=True)[1])[::-1]
    # Zipf(1.1): the first rank alone has 1 / zeta(1.1), about 9.4 %.
    assert counts[0] / ids.size == pytest.approx(0.0945, abs=0.01)
    assert counts.size < ids.size / 2


def test_batches_depend_on_all_arguments_and_nothing_else():
    smoke = workloads.WORKLOADS["smoke"]

    def ids(step, rank, seed=0):
        return workloads.make_batch(smoke, 8, step, rank, seed).ids[0]

    np.testing.assert_array_equal(ids(1, 2), ids(1, 2))
    for other in (ids(2, 2), ids(1, 3), ids(1, 2, seed=1)):
        assert (ids(1, 2) != other).any()


def test_batch_has_one_array_per_table():
    smoke = workloads.WORKLOADS["smoke"]
    batch = workloads.make_batch(smoke, 8, 0, 0)
    assert [ids.shape for ids in batch.ids] == [
        (8, table.hotness) for table in smoke.tables
    ]
    assert batch.labels.shape == (8, 1)
    assert set(np.unique(batch.labels)) <= {0.0, 1.0}
