# SPDX-License-Identifier: Apache-2.0
"""Blocks of a table's initial values: one table, and a random one."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist_ext.ops import embedding_ops
from tfdist_ext.ops import reference
from tfdist_ext.sharding import placement as placement_lib

DISTRIBUTIONS = {
    "zeros": (0.0, 0.0),
    "constant": (2.5, 0.0),
    "uniform": (-1.0, 3.0),
    "normal": (0.5, 2.0),
    "truncated_normal": (0.5, 2.0),
}


def whole_table(world_size, placement, rows, dim, module=embedding_ops, **kw):
    """The table put together from all blocks; padding must be zero."""
    table = np.full([rows, dim], np.nan, np.float32)
    for rank in range(world_size):
        block = module.init_rows(
            rank=rank,
            world_size=world_size,
            rows=rows,
            dim=dim,
            placement=placement,
            **kw,
        ).numpy()
        if placement == "row":
            ids = placement_lib.ids_of_shard(rank, world_size, rows)
            assert block.shape == (-(-rows // world_size), dim)
            table[ids] = block[: len(ids)]
            assert (block[len(ids) :] == 0).all()
        else:
            first, end = (r * dim // world_size for r in (rank, rank + 1))
            table[:, first:end] = block
    return table


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("rows,dim", [(1, 1), (7, 5), (64, 58)])
def test_same_table_for_any_world(rows, dim, distribution):
    a, b = DISTRIBUTIONS[distribution]
    options = {"seed": 12, "distribution": distribution, "a": a, "b": b}
    one = whole_table(1, "row", rows, dim, **options)
    assert np.isfinite(one).all()
    for world_size in (2, 3, 4, 64):
        other = whole_table(world_size, "row", rows, dim, **options)
        np.testing.assert_array_equal(one, other)
        if dim >= world_size:
            other = whole_table(world_size, "column", rows, dim, **options)
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("placement", ["row", "column"])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("seed", [0, -1, 2**62 + 3])
def test_same_as_twin(distribution, placement, seed):
    a, b = DISTRIBUTIONS[distribution]
    options = {"seed": seed, "distribution": distribution, "a": a, "b": b}
    ours = whole_table(3, placement, 40, 11, **options)
    twin = whole_table(3, placement, 40, 11, reference, **options)
    np.testing.assert_allclose(ours, twin, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "distribution,mean,stddev,low,high",
    [
        ("uniform", 1.0, 4 / 12**0.5, -1.0, 3.0),
        ("normal", 0.5, 2.0, -12.0, 13.0),
        ("truncated_normal", 0.5, 2.0 * 0.87962566, -3.5, 4.5),
    ],
)
def test_moments(distribution, mean, stddev, low, high):
    a, b = DISTRIBUTIONS[distribution]
    table = whole_table(
        1, "row", 4000, 64, seed=7, distribution=distribution, a=a, b=b
    ).astype(np.float64)
    count = table.size
    z = (table - mean) / stddev
    # Five standard errors, of the mean and of the second moment.
    assert abs(z.mean()) < 5 / count**0.5
    fourth = (z**4).mean()
    assert abs((z**2).mean() - 1) < 5 * ((fourth - 1) / count) ** 0.5
    assert low <= table.min() and table.max() <= high
    skew_error = 5 * ((z**6).mean() / count) ** 0.5
    assert abs((z**3).mean()) < skew_error
    assert len(np.unique(table)) > 0.9 * count


def test_rows_and_columns_are_uncorrelated():
    options = {"distribution": "normal", "a": 0.0, "b": 1.0}
    table = whole_table(1, "row", 512, 256, seed=3, **options)
    for matrix in (table, table.T):
        correlation = np.corrcoef(matrix) - np.eye(len(matrix))
        # The largest of about 130 000 coefficients of that many samples.
        assert np.abs(correlation).max() < 6 / matrix.shape[1] ** 0.5
    other = whole_table(1, "row", 512, 256, seed=4, **options)
    assert abs(np.corrcoef(table.ravel(), other.ravel())[0, 1]) < 0.02


def test_uniform_is_uniform():
    table = whole_table(
        1, "row", 1000, 64, seed=1, distribution="uniform", a=0.0, b=1.0
    )
    counts, _ = np.histogram(table, bins=64, range=(0, 1))
    chi_square = ((counts - 1000) ** 2 / 1000).sum()
    assert 20 < chi_square < 130  # 63 degrees of freedom


def test_seed_may_be_a_tensor_in_a_graph():
    @tf.function
    def make(seed):
        return embedding_ops.init_rows(
            rank=1,
            world_size=2,
            rows=5,
            dim=3,
            placement="row",
            seed=seed,
            distribution="normal",
            a=0.0,
            b=1.0,
        )

    assert make(tf.constant(3, tf.int64)).shape == (3, 3)
    assert (make(tf.constant(3, tf.int64)) != make(tf.constant(4, tf.int64)))[
        0, 0
    ]


def test_rank_outside_of_the_world_is_refused():
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="rank=2, world_size=2"
    ):
        embedding_ops.init_rows(
            rank=2,
            world_size=2,
            rows=5,
            dim=3,
            placement="row",
            seed=1,
            distribution="zeros",
        )
