# SPDX-License-Identifier: Apache-2.0
"""Initializers that make a part of a table, and those that cannot."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.embedding import initial_rows
from tfdist_ext.tables.placement import ShardSpec
from tfdist_ext.tables.placement import TablePlacement

initializers = tf.keras.initializers
ROWS, DIM = 400, 30


def part(initializer, placement, rank=0, ranks=2):
    spec = ShardSpec.of("table", ROWS, DIM, placement, rank, ranks)
    initialize = initial_rows.for_shard(initializer, spec, None)
    return spec, np.asarray(initialize(spec.local_shape))


@pytest.mark.parametrize(
    ("initializer", "stddev", "highest"),
    [
        (initializers.Zeros(), 0, 0),
        (initializers.RandomNormal(0.0, 2.0, seed=1), 2, 20),
        (initializers.TruncatedNormal(0.0, 2.0, seed=1), 1.76, 4),
        (initializers.RandomUniform(-3.0, 3.0, seed=1), 3**0.5, 3),
        (
            initializers.VarianceScaling(
                9.0, "fan_in", "untruncated_normal", seed=1
            ),
            0.15,
            1.5,
        ),
        (
            initializers.VarianceScaling(9.0, "fan_out", "uniform", seed=1),
            0.3**0.5,
            0.9**0.5,
        ),
        (
            initializers.VarianceScaling(
                21.5, "fan_avg", "truncated_normal", seed=1
            ),
            0.1**0.5,
            0.72,
        ),
    ],
)
def test_parts_are_those_of_the_whole_table(initializer, stddev, highest):
    _, whole = part(initializer, TablePlacement.data_parallel())
    assert whole.shape == (ROWS, DIM) and abs(whole).max() <= highest
    np.testing.assert_allclose(whole.std(), stddev, rtol=0.05)
    for rank in range(2):
        spec, columns = part(initializer, TablePlacement.column_wise(2), rank)
        np.testing.assert_array_equal(columns, whole[:, slice(*spec.columns)])


def test_tables_of_one_name_start_differently():
    """Those of two models; a program that seeds again gets the first again."""
    made = []
    for _ in range(2):
        tf.random.set_seed(3)
        for model in [initializers.RandomNormal() for _ in range(3)]:
            spec, half = part(model, TablePlacement.column_wise(2))
            _, whole = part(model, TablePlacement.data_parallel())
            np.testing.assert_array_equal(half, whole[:, slice(*spec.columns)])
            made.append(whole)
    for again in range(3):
        np.testing.assert_array_equal(made[again], made[3 + again])
        assert not (made[again] == made[again - 1]).any()


def test_the_secret_of_a_hash_follows_from_a_seed_or_is_new(monkeypatch):
    def secret(seed=None, table="t"):
        initializer = initializers.RandomNormal(seed=seed)
        return initial_rows.hash_key_of(initializer, table)

    assert secret(1) == secret(1)
    others = [secret(1), secret(2), secret(1, "u")]
    tf.random.set_seed(3)
    others.append(secret())
    tf.random.set_seed(3)
    assert secret() == others[-1]
    monkeypatch.setattr(internals, "global_seed", lambda: None)
    others += [secret(), secret()]
    numbers = {word for each in others for word in each}
    seed = initial_rows.seed_of(initializers.RandomNormal(seed=1), "t")
    assert len(numbers) == 12 and seed not in numbers


def test_what_cannot_make_single_rows():
    def drawn(shape, dtype=None):
        return tf.ones(shape, dtype or tf.float32)

    _, whole = part(drawn, TablePlacement.data_parallel())
    np.testing.assert_array_equal(whole, np.ones([ROWS, DIM]))
    for refused in (drawn, initializers.Orthogonal()):
        with pytest.raises(ValueError, match=r"'table' is partit.*data_par"):
            part(refused, TablePlacement.row_wise(2))


def test_a_constant_of_another_shape():
    for value in (np.ones([ROWS, DIM + 1]), np.ones([ROWS])):
        with pytest.raises(ValueError, match=r"shape \(400, 30\).*Received"):
            part(initializers.Constant(value), TablePlacement.row_wise(2))
    row = initializers.Constant(np.arange(DIM))
    _, found = part(row, TablePlacement.row_wise(2))
    np.testing.assert_array_equal(found, np.tile(np.arange(DIM), [200, 1]))
