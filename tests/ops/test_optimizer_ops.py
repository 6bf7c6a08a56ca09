# SPDX-License-Identifier: Apache-2.0
"""Row updates, and their twins of stock ops, against float64 NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.ops.row_rules import RULES
from tests.ops.row_rules import make_state
from tests.ops.row_rules import run_adagrad
from tests.ops.row_rules import run_adam
from tests.ops.row_rules import run_row_wise
from tests.ops.row_rules import summed
from tests.ops.row_rules import values
from tests.reference import optimizer as reference_optimizer
from tfdist_ext.ops import optimizer_ops

IMPLEMENTATIONS = pytest.mark.parametrize(
    "ops", [optimizer_ops, reference_optimizer], ids=["compiled", "reference"]
)
WIDTHS = [1, 3, 16, 58, 114, 128]
# Rows of one update, per name: what the fast path and the grouping path see.
ROWS = {
    "ascending": [0, 2, 3, 17, 39],
    "empty": [],
    "one": [39],
    "unsorted": [17, 3, 0, 39],
    "repeated": [5, 5, 5, 1, 0, 39, 1],
    "two lookups": [1, 4, 9, 30, 0, 4, 9, 39],
}
NUM_ROWS = 40


def check(ops, rule, rows_of_steps, num_rows, dim):
    rng = np.random.default_rng(dim)
    state = make_state(rng, rule, num_rows, dim)
    variables = {name: tf.Variable(value) for name, value in state.items()}
    expected = {name: value.astype(np.float64) for name, value in state.items()}
    run, twin, _ = RULES[rule]
    for step, rows in enumerate(rows_of_steps, start=1):
        grads = values(rng, len(rows), dim)
        run(ops, variables, np.asarray(rows, np.int64), grads, step)
        expected["step"] = step
        twin(expected, *summed(rows, grads))
    # The sums in FTRL are much larger than their difference, the weight.
    atol = 1e-5 if "ftrl" in rule else 2e-6
    for name, variable in variables.items():
        np.testing.assert_allclose(
            variable.numpy(), expected[name], rtol=2e-5, atol=atol, err_msg=name
        )


@pytest.mark.parametrize("dim", WIDTHS)
@pytest.mark.parametrize("rule", RULES)
@IMPLEMENTATIONS
def test_small_updates(ops, rule, dim):
    check(ops, rule, list(ROWS.values()), NUM_ROWS, dim)


@pytest.mark.parametrize("rule", RULES)
@IMPLEMENTATIONS
def test_many_rows(ops, rule):
    rng = np.random.default_rng(0)
    steps = [
        np.unique(rng.integers(0, 60_000, 30_000)),
        rng.integers(0, 60_000, 30_000),
    ]
    check(ops, rule, steps, 60_000, 17)


@pytest.mark.parametrize("rule", sorted(set(RULES) - {"adam, all rows"}))
def test_untouched_rows_stay_bitwise(rule):
    state = make_state(np.random.default_rng(1), rule, NUM_ROWS, 58)
    variables = {name: tf.Variable(value) for name, value in state.items()}
    rows = np.array([3, 20], np.int64)
    RULES[rule][0](
        optimizer_ops, variables, rows, np.ones((2, 58), np.float32), 1
    )
    others = np.setdiff1d(np.arange(NUM_ROWS), rows)
    for name, variable in variables.items():
        after = variable.numpy()
        np.testing.assert_array_equal(after[others], state[name][others])
        assert (after[rows] != state[name][rows]).any(), name


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("rows", [[0, 40], [-1, 3], [2, 40, 2]])
def test_row_outside_writes_nothing(rule, rows):
    state = make_state(np.random.default_rng(1), rule, NUM_ROWS, 3)
    variables = {name: tf.Variable(value) for name, value in state.items()}
    grads = np.ones((len(rows), 3), np.float32)
    with pytest.raises(tf.errors.InvalidArgumentError, match="outside the 40"):
        RULES[rule][0](
            optimizer_ops, variables, np.array(rows, np.int64), grads, 1
        )
    for name, variable in variables.items():
        np.testing.assert_array_equal(variable.numpy(), state[name])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", [(2, 4), (3, 3), (2,), (2, 3, 1)])
def test_gradients_that_do_not_fit(rule, shape):
    state = make_state(np.random.default_rng(1), rule, NUM_ROWS, 3)
    variables = {name: tf.Variable(value) for name, value in state.items()}
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError)):
        RULES[rule][0](
            optimizer_ops,
            variables,
            np.array([1, 2]),
            np.ones(shape, np.float32),
            1,
        )


def test_slot_that_does_not_fit():
    table = tf.Variable(tf.zeros([5, 3]))
    slot = tf.Variable(tf.zeros([4, 3], name="accumulator"))
    with pytest.raises(tf.errors.InvalidArgumentError, match="must have shape"):
        run_adagrad(
            optimizer_ops,
            {"table": table, "a": slot},
            np.array([1], np.int64),
            np.ones((1, 3), np.float32),
            1,
        )


def test_table_as_its_own_slot():
    table = tf.Variable(tf.zeros([5, 3]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="different"):
        run_adagrad(
            optimizer_ops,
            {"table": table, "a": table},
            np.array([1], np.int64),
            np.ones((1, 3), np.float32),
            1,
        )


def test_step_counts_from_one():
    state = make_state(np.random.default_rng(1), "adam", 5, 3)
    variables = {name: tf.Variable(value) for name, value in state.items()}
    with pytest.raises(tf.errors.InvalidArgumentError, match="from 1"):
        run_adam(
            optimizer_ops,
            variables,
            np.array([1]),
            np.ones((1, 3), np.float32),
            0,
        )


def test_values_read_before_an_update_stay():
    """A read shares the buffer until an update, which must then copy it."""
    table = tf.Variable(tf.zeros([5, 3]))
    before = table.read_value()
    rows = np.array([1], np.int64)
    grads = np.ones((1, 3), np.float32)
    for _ in range(2):
        optimizer_ops.update_rows(
            optimizer_ops.sgd(learning_rate=1.0), table, [], rows, grads
        )
    np.testing.assert_array_equal(before, np.zeros((5, 3)))
    np.testing.assert_array_equal(table[1], -2 * np.ones(3))


def test_updates_in_order_inside_a_function():
    table = tf.Variable(tf.ones([5, 3]))

    @tf.function
    def step(rows, grads, rate):
        optimizer_ops.update_rows(
            optimizer_ops.sgd(learning_rate=rate), table, [], rows, grads
        )
        between = table[1]
        optimizer_ops.scale_table(table, 0.5)
        optimizer_ops.update_rows(
            optimizer_ops.sgd(learning_rate=rate), table, [], rows, grads
        )
        return between

    between = step(
        tf.constant([1], tf.int64), tf.ones([1, 3]), tf.constant(0.25)
    )
    np.testing.assert_array_equal(between, np.full(3, 0.75))
    np.testing.assert_array_equal(table[1], np.full(3, 0.125))
    np.testing.assert_array_equal(table[0], np.full(3, 0.5))


def test_mean_squares_given():
    """Two halves of the columns, with shared means, equal the whole."""
    rng = np.random.default_rng(3)
    whole = make_state(rng, "row_wise", NUM_ROWS, 6)
    rows = np.array([1, 5, 30], np.int64)
    grads = values(rng, 3, 6)
    table = tf.Variable(whole["table"])
    run_row_wise(
        optimizer_ops,
        {"table": table, "a": tf.Variable(whole["a"])},
        rows,
        grads,
        1,
    )
    halves = []
    for columns in (slice(0, 2), slice(2, 6)):
        half = tf.Variable(whole["table"][:, columns])
        optimizer_ops.update_rows(
            optimizer_ops.row_wise_adagrad(learning_rate=0.3, epsilon=1e-7),
            half,
            [tf.Variable(whole["a"])],
            rows,
            grads[:, columns],
            mean_squares=(grads**2).mean(axis=1),
        )
        halves.append(half.numpy())
    np.testing.assert_allclose(np.hstack(halves), table, rtol=1e-6)


@pytest.mark.parametrize("means, rows", [([1.0], [1, 2]), ([1, 1], [2, 1])])
def test_mean_squares_that_do_not_fit(means, rows):
    state = make_state(np.random.default_rng(1), "row_wise", 5, 3)
    with pytest.raises(tf.errors.InvalidArgumentError, match="mean_squares"):
        optimizer_ops.update_rows(
            optimizer_ops.row_wise_adagrad(learning_rate=0.3, epsilon=1e-7),
            tf.Variable(state["table"]),
            [tf.Variable(state["a"])],
            np.array(rows, np.int64),
            np.ones((2, 3), np.float32),
            mean_squares=np.array(means, np.float32),
        )


@pytest.mark.parametrize("dim", WIDTHS)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
@IMPLEMENTATIONS
def test_sum_duplicate_rows(ops, rows, dim):
    grads = values(np.random.default_rng(dim), len(rows), dim)
    unique, sums = ops.sum_duplicate_rows(np.array(rows, np.int64), grads)
    expected_rows, expected_sums = summed(rows, grads)
    np.testing.assert_array_equal(unique, expected_rows)
    np.testing.assert_allclose(sums, expected_sums, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "rows", [[2**63 - 1, -(2**63), 2**63 - 1], [-1, -7, -1], [2**40, 0, 2**40]]
)
@IMPLEMENTATIONS
def test_sum_duplicate_rows_of_any_numbers(ops, rows):
    unique, sums = ops.sum_duplicate_rows(
        np.array(rows, np.int64), np.array([[1.0], [2.0], [4.0]], np.float32)
    )
    np.testing.assert_array_equal(unique, sorted(set(rows)))
    np.testing.assert_array_equal(sums, [[2.0], [5.0]])


def test_sum_duplicate_rows_many():
    rng = np.random.default_rng(5)
    rows = rng.zipf(1.3, 50_000) % 10_000
    grads = values(rng, 50_000, 4)
    unique, sums = optimizer_ops.sum_duplicate_rows(rows, grads)
    expected_rows, expected_sums = summed(rows, grads)
    np.testing.assert_array_equal(unique, expected_rows)
    np.testing.assert_allclose(sums, expected_sums, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("shape", [(7,), (3, 5), (1000, 300)])
@IMPLEMENTATIONS
def test_scale_table(ops, shape):
    start = values(np.random.default_rng(2), *shape)
    table = tf.Variable(start)
    ops.scale_table(table, 0.9)
    np.testing.assert_allclose(table, start * 0.9, rtol=1e-6)


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
@pytest.mark.parametrize("dim", [1, 16, 58])
def test_long_rows_are_scaled_down(ops, dtype, dim):
    """Of norm 2, whatever their columns elsewhere; NaN stays."""
    rng = np.random.default_rng(dim)
    value = values(rng, 9, dim) * 3
    value[4] = np.nan
    table = tf.Variable(value, dtype=dtype)
    value = tf.cast(table, tf.float32).numpy()
    rows = np.array([8, 1, 4, 5, 0])
    elsewhere = np.array([9, 0, 0, 0, 9], np.float32)
    for squares in (None, (value[rows] ** 2).sum(axis=1) + elsewhere):
        norms = np.linalg.norm(value[rows], axis=1)
        norms = norms if squares is None else np.sqrt(squares)
        value[rows] *= np.where(norms > 2, 2 / norms, 1)[:, np.newaxis]
        ops.clip_rows(table, rows, max_norm=2.0, squares=squares)
        rtol = 1e-5 if dtype == tf.float32 else 2**-8
        np.testing.assert_allclose(tf.cast(table, tf.float32), value, rtol=rtol)
        value = tf.cast(table, tf.float32).numpy()


@pytest.mark.parametrize(
    "rows, squares, found",
    [
        ([1, 3], None, "row 3 at position 1 is outside the 3 rows"),
        ([2, 0, 2], None, "3 rows must each be given once; received 2"),
        ([0, 1], [1.0], r"squares \[n\] or \[0\]"),
    ],
)
def test_rows_that_cannot_be_scaled_down(rows, squares, found):
    table = tf.Variable(tf.ones([3, 4]))
    with pytest.raises(tf.errors.InvalidArgumentError, match=found):
        optimizer_ops.clip_rows(table, rows, max_norm=1.0, squares=squares)
    np.testing.assert_array_equal(table, tf.ones([3, 4]))


def test_what_is_no_scalar_is_refused():
    table = tf.Variable(tf.zeros([5, 3], tf.bfloat16))
    rows, grads = np.array([1], np.int64), np.ones([1, 3], np.float32)
    refused = {
        "learning_rate": ([0.1, 0.2], None),
        "rounding_seeds": (0.1, [1, 2]),
    }
    for name, (rate, seed) in refused.items():
        with pytest.raises(
            tf.errors.InvalidArgumentError, match=f"{name} must be .*scalar"
        ):
            optimizer_ops.update_rows(
                optimizer_ops.sgd(learning_rate=rate),
                table,
                [],
                rows,
                grads,
                rounding_seed=seed,
            )
    assert not np.any(tf.cast(table, tf.float32))
