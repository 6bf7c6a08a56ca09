# SPDX-License-Identifier: Apache-2.0
"""Updates of bfloat16 tables, rounded to nearest or at random."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.ops.row_rules import RULES
from tests.ops.row_rules import make_state
from tests.ops.row_rules import values
from tests.reference import optimizer as reference_optimizer
from tfdist_ext.ops import optimizer_ops

SEEDS = pytest.mark.parametrize(
    "seed", [None, 7, -1, 2**62 + 3], ids=["nearest", "7", "-1", "big"]
)
NUM_ROWS = 40
WIDTHS = [1, 3, 16, 58, 114]


def make_variables(state):
    return {
        name: tf.Variable(
            value, dtype=tf.bfloat16 if name == "table" else tf.float32
        )
        for name, value in state.items()
    }


def as_float(variable):
    return tf.cast(variable, tf.float32).numpy()


@SEEDS
@pytest.mark.parametrize("dim", WIDTHS)
@pytest.mark.parametrize("rule", RULES)
def test_compiled_equals_reference(rule, dim, seed):
    rng = np.random.default_rng(dim)
    state = make_state(rng, rule, NUM_ROWS, dim)
    results = []
    rows = np.array([5, 0, 39, 5, 17], np.int64)
    grads = values(rng, 5, dim)
    for ops in (optimizer_ops, reference_optimizer):
        variables = make_variables(state)
        RULES[rule][0](ops, variables, rows, grads, 1, rounding_seed=seed)
        results.append({n: as_float(v) for n, v in variables.items()})
    ours, reference = results
    for name, value in ours.items():
        if name != "table":
            np.testing.assert_allclose(
                value, reference[name], rtol=2e-5, atol=1e-5, err_msg=name
            )
    # A last bit of float32 may decide over one of bfloat16, but rarely.
    np.testing.assert_allclose(
        ours["table"], reference["table"], rtol=2**-7, atol=1e-5
    )
    assert (ours["table"] != reference["table"]).mean() <= 0.01


@SEEDS
@pytest.mark.parametrize("dim", WIDTHS)
def test_rounding_is_that_of_the_reference_bitwise(dim, seed):
    """Through a table of zeros, an update stores -grads, rounded."""
    rng = np.random.default_rng(dim)
    grads = values(rng, NUM_ROWS, dim) * 10.0 ** rng.integers(
        -42, 38, (NUM_ROWS, 1)
    ).astype(np.float32)
    grads[0], grads[1], grads[2] = np.inf, -np.inf, np.nan
    grads[3], grads[4] = 0.0, np.finfo(np.float32).max
    stored = []
    for ops in (optimizer_ops, reference_optimizer):
        table = tf.Variable(tf.zeros([NUM_ROWS, dim], tf.bfloat16))
        rows = np.arange(NUM_ROWS)
        ops.update_rows(
            optimizer_ops.sgd(learning_rate=1.0),
            table,
            [],
            rows,
            grads,
            rounding_seed=seed,
        )
        stored.append(as_float(table))
    np.testing.assert_array_equal(*stored)
    assert np.isnan(stored[0][2]).all() and np.isinf(stored[0][:2]).all()


def train(seeds, step=1e-3, rows=8, dim=58):
    table = tf.Variable(tf.ones([rows, dim], tf.bfloat16))
    grads = tf.fill([rows, dim], step)
    for seed in seeds:
        optimizer_ops.update_rows(
            optimizer_ops.sgd(learning_rate=1.0),
            table,
            [],
            tf.range(rows, dtype=tf.int64),
            grads,
            rounding_seed=seed,
        )
    return as_float(table)


def test_nearest_loses_small_updates():
    np.testing.assert_array_equal(train([None] * 500), 1.0)


def test_stochastic_rounding_is_unbiased():
    weights = train(range(500))
    assert abs(weights.mean() - 0.5) < 5e-3
    # Columns and rows are rounded independently of each other.
    assert 5e-3 < weights.std() < 0.1
    assert abs(weights.mean(axis=0) - 0.5).max() < 0.08
    assert abs(weights.mean(axis=1) - 0.5).max() < 0.03


def test_the_same_seed_rounds_alike():
    np.testing.assert_array_equal(train(range(9)), train(range(9)))
    assert (train(range(9)) != train(range(1, 10))).any()


def test_the_order_of_the_rows_does_not_matter():
    results = []
    grads = values(np.random.default_rng(0), 3, 58)
    for order in ([0, 1, 2], [2, 0, 1]):
        table = tf.Variable(tf.ones([9, 58], tf.bfloat16))
        rows = np.array([1, 4, 8])[order]
        optimizer_ops.update_rows(
            optimizer_ops.sgd(learning_rate=0.1),
            table,
            [],
            rows,
            grads[order],
            rounding_seed=3,
        )
        results.append(as_float(table))
    np.testing.assert_array_equal(*results)


@SEEDS
@pytest.mark.parametrize("shape", [(7,), (3, 5), (100, 30), (4, 3, 20), ()])
def test_scale_table(shape, seed):
    start = values(np.random.default_rng(2), *shape)
    results = []
    for ops in (optimizer_ops, reference_optimizer):
        table = tf.Variable(start, dtype=tf.bfloat16)
        ops.scale_table(table, 0.9, rounding_seed=seed)
        results.append(as_float(table))
    np.testing.assert_allclose(*results, rtol=2**-7)
    assert (results[0] != results[1]).mean() <= 0.01


def test_slots_must_be_float32():
    table = tf.Variable(tf.zeros([5, 3], tf.bfloat16))
    slot = tf.Variable(tf.zeros([5, 3], tf.bfloat16))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"slot .*float32"):
        optimizer_ops.update_rows(
            optimizer_ops.adagrad(learning_rate=0.1, epsilon=1e-7),
            table,
            [slot],
            np.array([1]),
            np.ones((1, 3), np.float32),
        )


def test_tables_of_another_dtype():
    table = tf.Variable(tf.zeros([5, 3], tf.float16))
    with pytest.raises(tf.errors.InvalidArgumentError, match="or bfloat16"):
        optimizer_ops.scale_table(table, 0.5)
