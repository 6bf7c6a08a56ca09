# SPDX-License-Identifier: Apache-2.0
"""Row updates, and their twins of stock ops, against float64 NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfdist_ext.ops import optimizer_ops
from tfdist_ext.ops import reference_optimizer

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


def values(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


def summed(rows, grads):
    """Unique rows and the float64 sums of their gradients."""
    unique, inverse = np.unique(np.asarray(rows, np.int64), return_inverse=True)
    sums = np.zeros((len(unique), grads.shape[1]))
    np.add.at(sums, inverse, grads.astype(np.float64))
    return unique, sums


def sgd(state, rows, g):
    state["table"][rows] -= 0.3 * g


def momentum(state, rows, g, nesterov=False):
    state["m"][rows] = 0.9 * state["m"][rows] - 0.3 * g
    ahead = 0.9 * state["m"][rows] - 0.3 * g
    state["table"][rows] += ahead if nesterov else state["m"][rows]


def nesterov_momentum(state, rows, g):
    momentum(state, rows, g, nesterov=True)


def adagrad(state, rows, g):
    state["a"][rows] += g * g
    state["table"][rows] -= 0.3 * g / np.sqrt(state["a"][rows] + 1e-7)


def row_wise_adagrad(state, rows, g):
    state["a"][rows] += (g * g).mean(axis=1)
    scale = 0.3 / np.sqrt(state["a"][rows] + 1e-7)
    state["table"][rows] -= scale[:, None] * g


def adam(state, rows, g, hat=False):
    step = state["step"]
    state["m"][rows] += (g - state["m"][rows]) * 0.1
    state["v"][rows] += (g * g - state["v"][rows]) * 0.001
    second = state["v"][rows]
    if hat:
        second = np.maximum(state["hat"][rows], second)
        state["hat"][rows] = second
    alpha = 0.3 * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
    state["table"][rows] -= alpha * state["m"][rows] / (np.sqrt(second) + 1e-7)


def amsgrad(state, rows, g):
    adam(state, rows, g, hat=True)


def run_sgd(ops, v, rows, grads, step):
    ops.apply_row_sgd(v["table"], rows, grads, learning_rate=0.3)


def run_momentum(ops, v, rows, grads, step, nesterov=False):
    ops.apply_row_momentum(
        v["table"],
        v["m"],
        rows,
        grads,
        learning_rate=0.3,
        momentum=0.9,
        nesterov=nesterov,
    )


def run_nesterov(ops, v, rows, grads, step):
    run_momentum(ops, v, rows, grads, step, nesterov=True)


def run_adagrad(ops, v, rows, grads, step):
    ops.apply_row_adagrad(
        v["table"], v["a"], rows, grads, learning_rate=0.3, epsilon=1e-7
    )


def run_row_wise(ops, v, rows, grads, step):
    ops.apply_row_wise_adagrad(
        v["table"], v["a"], rows, grads, learning_rate=0.3, epsilon=1e-7
    )


def run_adam(ops, v, rows, grads, step, hats=()):
    ops.apply_row_adam(
        v["table"],
        v["m"],
        v["v"],
        rows,
        grads,
        learning_rate=0.3,
        beta_1=0.9,
        beta_2=0.999,
        epsilon=1e-7,
        step=tf.constant(step, tf.int64),
        velocity_hats=hats,
    )


def run_amsgrad(ops, v, rows, grads, step):
    run_adam(ops, v, rows, grads, step, hats=[v["hat"]])


# name: (op, NumPy twin, slots)
RULES = {
    "sgd": (run_sgd, sgd, []),
    "momentum": (run_momentum, momentum, ["m"]),
    "nesterov": (run_nesterov, nesterov_momentum, ["m"]),
    "adagrad": (run_adagrad, adagrad, ["a"]),
    "row_wise": (run_row_wise, row_wise_adagrad, ["a"]),
    "adam": (run_adam, adam, ["m", "v"]),
    "amsgrad": (run_amsgrad, amsgrad, ["m", "v", "hat"]),
}


def make_state(rng, rule, num_rows, dim):
    state = {"table": values(rng, num_rows, dim)}
    for slot in RULES[rule][2]:
        shape = (num_rows,) if rule == "row_wise" else (num_rows, dim)
        state[slot] = np.abs(values(rng, *shape)) + np.float32(0.1)
    return state


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
    for name, variable in variables.items():
        np.testing.assert_allclose(
            variable.numpy(), expected[name], rtol=2e-5, atol=2e-6, err_msg=name
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


@pytest.mark.parametrize("rule", RULES)
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
        optimizer_ops.apply_row_sgd(table, rows, grads, learning_rate=1.0)
    np.testing.assert_array_equal(before, np.zeros((5, 3)))
    np.testing.assert_array_equal(table[1], -2 * np.ones(3))


def test_updates_in_order_inside_a_function():
    table = tf.Variable(tf.ones([5, 3]))

    @tf.function
    def step(rows, grads, rate):
        optimizer_ops.apply_row_sgd(table, rows, grads, learning_rate=rate)
        between = table[1]
        optimizer_ops.scale_table(table, 0.5)
        optimizer_ops.apply_row_sgd(table, rows, grads, learning_rate=rate)
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
        optimizer_ops.apply_row_wise_adagrad(
            half,
            tf.Variable(whole["a"]),
            rows,
            grads[:, columns],
            learning_rate=0.3,
            epsilon=1e-7,
            mean_squares=(grads**2).mean(axis=1),
        )
        halves.append(half.numpy())
    np.testing.assert_allclose(np.hstack(halves), table, rtol=1e-6)


@pytest.mark.parametrize("means, rows", [([1.0], [1, 2]), ([1, 1], [2, 1])])
def test_mean_squares_that_do_not_fit(means, rows):
    state = make_state(np.random.default_rng(1), "row_wise", 5, 3)
    with pytest.raises(tf.errors.InvalidArgumentError, match="mean_squares"):
        optimizer_ops.apply_row_wise_adagrad(
            tf.Variable(state["table"]),
            tf.Variable(state["a"]),
            np.array(rows, np.int64),
            np.ones((2, 3), np.float32),
            learning_rate=0.3,
            epsilon=1e-7,
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
