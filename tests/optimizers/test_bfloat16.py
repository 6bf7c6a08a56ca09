# SPDX-License-Identifier: Apache-2.0
"""Tables of bfloat16: slots and arithmetic of float32, rounding."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import toy_problem

from tfdist_ext import optimizers

keras = tf.keras
CASES = {
    "sgd": ("SGD", {}, []),
    "momentum": ("SGD", {"momentum": 0.9}, [0.0]),
    "adagrad": ("Adagrad", {}, [0.1]),
    "row-wise adagrad": ("RowWiseAdagrad", {}, [0.1]),
    "adam": ("Adam", {}, [0.0, 0.0]),
    "amsgrad": ("Adam", {"amsgrad": True}, [0.0, 0.0, 0.0]),
    "exact adam": ("Adam", {"lazy": False}, [0.0, 0.0]),
    "ftrl": ("Ftrl", {}, [0.1, 0.0]),
}
ROWS, DIM = 30, 20


def make_table(dtype, value=None):
    if value is None:
        value = np.random.default_rng(0).normal(0, 0.1, (ROWS, DIM))
        # What both dtypes can hold.
        value = tf.cast(tf.cast(value, tf.bfloat16), tf.float32).numpy()
    if toy_problem.KERAS_3:
        return keras.Variable(value, dtype=dtype, name="table")
    return tf.Variable(value, dtype=dtype, name="table")


def as_float(variable):
    return np.asarray(tf.cast(tf.convert_to_tensor(variable), tf.float32))


def train(optimizer, table, steps=10, graph=True, dense=False):
    """Steps on random rows; every step gets another seed of the rounding."""

    def apply(rows, grads):
        gradient = tf.IndexedSlices(grads, rows, tf.constant([ROWS, DIM]))
        if dense:
            gradient = tf.convert_to_tensor(gradient)
        optimizer.apply_gradients([(gradient, table)])

    if toy_problem.KERAS_3:
        optimizer.build([table])
    if graph:
        apply = tf.function(apply)
    rng = np.random.default_rng(1)
    for _ in range(steps):
        rows = rng.integers(0, ROWS, 12)
        grads = rng.normal(size=(12, DIM)).astype(np.float32)
        apply(tf.constant(rows), tf.constant(grads))
    return as_float(table)


def change_of_rows(before, after):
    """Root of the mean square, per row."""
    return np.sqrt(((before - after) ** 2).mean(1))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("stochastic", [True, False])
def test_close_to_float32(case, graph, stochastic):
    name, arguments, _ = case

    def trained(dtype, steps=10):
        optimizer = getattr(optimizers, name)(
            learning_rate=0.05, stochastic_rounding=stochastic, **arguments
        )
        return train(optimizer, make_table(dtype), steps, graph)

    exact = trained("float32")
    error = change_of_rows(trained("bfloat16"), exact).max()
    # A row that had lost its last update would be four times as far away.
    last = change_of_rows(trained("float32", steps=9), exact)
    assert 0 < error < 0.25 * last[last > 0].min()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_slots_are_float32(case):
    name, arguments, initial = case
    optimizer = getattr(optimizers, name)(learning_rate=0.05, **arguments)
    optimizer.build([make_table("bfloat16")])
    slots = toy_problem.slots_of(optimizer)
    assert len(slots) == len(initial)
    for slot, value in zip(slots, initial, strict=True):
        assert tf.as_dtype(slot.dtype) == tf.float32
        np.testing.assert_array_equal(as_float(slot), np.float32(value))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_dense_gradients_take_the_fused_way(case):
    """Keras's own would mix bfloat16 with the float32 of the slots."""
    name, arguments, _ = case
    if name != "RowWiseAdagrad":
        arguments = {**arguments, "weight_decay": 0.01}
    results = []
    for dtype in ("bfloat16", "float32"):
        optimizer = getattr(optimizers, name)(learning_rate=0.05, **arguments)
        results.append(train(optimizer, make_table(dtype), dense=True))
    np.testing.assert_allclose(*results, rtol=0.05, atol=0.05)


def drift(optimizer, steps=400):
    """How far a weight of 1 moves by steps of 1e-3."""
    table = make_table("bfloat16", np.ones((ROWS, DIM), np.float32))
    if toy_problem.KERAS_3:
        optimizer.build([table])
    rows = tf.range(ROWS)

    @tf.function
    def apply():
        slices = tf.IndexedSlices(
            tf.ones([ROWS, DIM]), rows, tf.constant([ROWS, DIM])
        )
        optimizer.apply_gradients([(slices, table)])

    for _ in range(steps):
        apply()
    return 1 - as_float(table).mean()


def test_stochastic_rounding_keeps_small_updates():
    assert abs(drift(optimizers.SGD(1e-3)) - 0.4) < 0.01


def test_nearest_rounding_loses_small_updates():
    assert drift(optimizers.SGD(1e-3, stochastic_rounding=False)) == 0.0


def test_weight_decay_is_rounded_at_random_too():
    optimizer = optimizers.SGD(1e-3, weight_decay=1.0)
    # w' = -1e-3 (1 + w): from 1 to 2 exp(-0.4) - 1.
    assert abs(drift(optimizer) - 2 * (1 - np.exp(-0.4))) < 0.01


def test_averages_of_bfloat16_are_refused():
    optimizer = optimizers.Adagrad(0.05, use_ema=True)
    with pytest.raises(ValueError, match=r"use_ema.*bfloat16"):
        train(optimizer, make_table("bfloat16"))


def test_two_tables_are_rounded_differently():
    tables = [make_table("bfloat16", np.ones((9, 9))) for _ in range(2)]
    optimizer = optimizers.SGD(1e-3)
    if toy_problem.KERAS_3:
        optimizer.build(tables)
    slices = tf.IndexedSlices(tf.ones([9, 9]), tf.range(9), tf.constant([9, 9]))
    optimizer.apply_gradients([(slices, table) for table in tables])
    assert (as_float(tables[0]) != as_float(tables[1])).any()


def test_every_step_and_use_has_a_seed_of_its_own():
    """That of a limit to the norm was that of the next step's update."""
    table = make_table("bfloat16")
    optimizer = optimizers.SGD(1e-3)
    optimizer.build([table])
    seeds = set()
    for _ in range(4):
        seeds |= {int(optimizer.rounding_seed(table, use)) for use in range(3)}
        optimizer.iterations.assign_add(1)
    assert len(seeds) == 4 * 3
