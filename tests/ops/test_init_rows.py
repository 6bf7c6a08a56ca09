# SPDX-License-Identifier: Apache-2.0
"""Blocks of a table's initial values: one table, and a random one."""

import numpy as np
import pytest
import tensorflow as tf

from tests.reference import init as reference
from tfdist_ext.ops import lookup_ops
from tfdist_ext.tables import placement as placement_lib

DISTRIBUTIONS = {
    "zeros": (0.0, 0.0),
    "constant": (2.5, 0.0),
    "uniform": (-1.0, 3.0),
    "normal": (0.5, 2.0),
    "truncated_normal": (0.5, 2.0),
}


def whole_table(parts, rows, dim, module=lookup_ops, **kw):
    """The table put together from all cells; padding must be zero."""
    row_parts, column_parts = parts
    local_rows = -(-rows // row_parts)
    table = np.full([rows, dim], np.nan, np.float32)
    for i, j in np.ndindex(row_parts, column_parts):
        first, end = (k * dim // column_parts for k in (j, j + 1))
        block = module.init_rows(
            rows=rows,
            row_part=i,
            row_parts=row_parts,
            local_rows=local_rows,
            first_column=first,
            local_dim=end - first,
            **kw,
        ).numpy()
        ids = placement_lib.ids_of_part(i, row_parts, rows)
        assert block.shape == (local_rows, end - first)
        table[ids, first:end] = block[: len(ids)]
        assert (block[len(ids) :] == 0).all()
    return table


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("rows,dim", [(1, 1), (7, 5), (64, 58)])
def test_same_table_for_any_world(rows, dim, distribution):
    a, b = DISTRIBUTIONS[distribution]
    options = {"seed": 12, "distribution": distribution, "a": a, "b": b}
    one = whole_table((1, 1), rows, dim, **options)
    assert np.isfinite(one).all()
    for parts in ((2, 1), (3, 1), (64, 1), (1, 2), (1, 4), (2, 3), (3, 5)):
        if dim >= parts[1]:
            other = whole_table(parts, rows, dim, **options)
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("parts", [(3, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("seed", [0, -1, 2**62 + 3])
def test_same_as_twin(distribution, parts, seed):
    a, b = DISTRIBUTIONS[distribution]
    options = {"seed": seed, "distribution": distribution, "a": a, "b": b}
    ours = whole_table(parts, 40, 11, **options)
    twin = whole_table(parts, 40, 11, reference, **options)
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
        (1, 1), 4000, 64, seed=7, distribution=distribution, a=a, b=b
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
    table = whole_table((1, 1), 512, 256, seed=3, **options)
    for matrix in (table, table.T):
        correlation = np.corrcoef(matrix) - np.eye(len(matrix))
        # The largest of about 130 000 coefficients of that many samples.
        assert np.abs(correlation).max() < 6 / matrix.shape[1] ** 0.5
    other = whole_table((1, 1), 512, 256, seed=4, **options)
    assert abs(np.corrcoef(table.ravel(), other.ravel())[0, 1]) < 0.02


def test_uniform_is_uniform():
    table = whole_table(
        (1, 1), 1000, 64, seed=1, distribution="uniform", a=0.0, b=1.0
    )
    counts, _ = np.histogram(table, bins=64, range=(0, 1))
    chi_square = ((counts - 1000) ** 2 / 1000).sum()
    assert 20 < chi_square < 130  # 63 degrees of freedom


CELL = {
    "rows": 5,
    "row_part": 1,
    "row_parts": 2,
    "local_rows": 3,
    "first_column": 0,
    "local_dim": 3,
}


def test_seed_may_be_a_tensor_in_a_graph():
    @tf.function
    def make(seed):
        return lookup_ops.init_rows(
            seed=seed, distribution="normal", a=0.0, b=1.0, **CELL
        )

    assert make(tf.constant(3, tf.int64)).shape == (3, 3)
    assert (make(tf.constant(3, tf.int64)) != make(tf.constant(4, tf.int64)))[
        0, 0
    ]


def test_a_rank_that_holds_nothing_makes_nothing():
    block = lookup_ops.init_rows(
        seed=1, distribution="zeros", **{**CELL, "local_rows": 0}
    )
    assert block.shape == (0, 3)


def test_cell_outside_of_the_table_is_refused():
    for wrong, message in (
        ({"row_part": 2}, "row_part=2"),
        ({"local_rows": 4}, "local_rows=4"),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            lookup_ops.init_rows(
                seed=1, distribution="zeros", **{**CELL, **wrong}
            )


def test_more_elements_than_can_be_counted_are_refused():
    """2^70: the shape alone would end the process."""
    with pytest.raises(tf.errors.InvalidArgumentError):
        lookup_ops.init_rows(
            seed=1,
            rows=1 << 40,
            row_part=0,
            row_parts=1,
            local_rows=1 << 40,
            first_column=0,
            local_dim=1 << 30,
            distribution="zeros",
            a=0.0,
            b=0.0,
        )
