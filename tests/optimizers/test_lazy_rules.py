# SPDX-License-Identifier: Apache-2.0
"""Rules that Keras does not have, against NumPy in float64."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import toy_problem

from tfdist_ext import optimizers

LEARNING_RATE = 0.1


class RowWise:
    """a += mean(g^2) per row; ordinary Adagrad for the bias."""

    def __init__(self, epsilon=1e-7):
        self.accumulators = [np.full(s[0], 0.1) for s in toy_problem.SHAPES]
        self.epsilon = epsilon

    def update(self, i, value, rows, grad):
        accumulator = self.accumulators[i]
        mean = (grad**2).mean(axis=1) if grad.ndim == 2 else grad**2
        accumulator[rows] += mean
        scale = LEARNING_RATE / np.sqrt(accumulator[rows] + self.epsilon)
        value[rows] -= (scale[:, None] if grad.ndim == 2 else scale) * grad


class LazyAdam:
    """Moments of untouched rows stay; the bias correction counts all steps."""

    def __init__(self, amsgrad=False):
        self.moments = [np.zeros((3, *s)) for s in toy_problem.SHAPES]
        self.amsgrad = amsgrad
        self.step = 0

    def update(self, i, value, rows, grad):
        self.step += i == 0
        m, v, hat = self.moments[i]
        m[rows] += 0.1 * (grad - m[rows])
        v[rows] += 0.001 * (grad**2 - v[rows])
        hat[rows] = np.maximum(hat[rows], v[rows])
        second = hat[rows] if self.amsgrad else v[rows]
        rate = np.sqrt(1 - 0.999**self.step) / (1 - 0.9**self.step)
        rate *= LEARNING_RATE
        value[rows] -= rate * m[rows] / (np.sqrt(second) + 1e-7)


class LazyMomentum:
    """Momentum of untouched rows neither decays nor moves them."""

    def __init__(self, nesterov=False):
        self.momentums = [np.zeros(s) for s in toy_problem.SHAPES]
        self.nesterov = nesterov

    def update(self, i, value, rows, grad):
        m = self.momentums[i]
        m[rows] = 0.9 * m[rows] - LEARNING_RATE * grad
        ahead = 0.9 * m[rows] - LEARNING_RATE * grad
        value[rows] += ahead if self.nesterov else m[rows]


class LazyFtrl:
    """Weights are recomputed from the slots in the steps that touch them."""

    def __init__(self, l1=0.0):
        self.slots = [np.zeros((2, *s)) for s in toy_problem.SHAPES]
        for n, _ in self.slots:
            n += 0.1
        self.l1 = l1

    def update(self, i, value, rows, grad):
        n, z = self.slots[i]
        before = n[rows]
        n[rows] += grad**2
        root = np.sqrt(n[rows]) / LEARNING_RATE
        sigma = root - np.sqrt(before) / LEARNING_RATE
        z[rows] += grad - sigma * value[rows]
        value[rows] = (np.clip(z[rows], -self.l1, self.l1) - z[rows]) / root


CASES = {
    "row-wise adagrad": ("RowWiseAdagrad", {}, RowWise),
    "row-wise adagrad epsilon": (
        "RowWiseAdagrad",
        {"epsilon": 0.1},
        lambda: RowWise(0.1),
    ),
    "adam": ("Adam", {}, LazyAdam),
    "ftrl": ("Ftrl", {}, LazyFtrl),
    "ftrl l1": (
        "Ftrl",
        {"l1_regularization_strength": 0.4},
        lambda: LazyFtrl(0.4),
    ),
    "amsgrad": ("Adam", {"amsgrad": True}, lambda: LazyAdam(True)),
    "momentum": ("SGD", {"momentum": 0.9}, LazyMomentum),
    "nesterov": (
        "SGD",
        {"momentum": 0.9, "nesterov": True},
        lambda: LazyMomentum(True),
    ),
}


def train_in_numpy(rule, steps):
    values = [
        v.numpy().astype(np.float64) for v in toy_problem.make_variables()
    ]
    for rows, grads in steps:
        unique, inverse = np.unique(rows, return_inverse=True)
        table = np.zeros((len(unique), toy_problem.SHAPES[0][1]))
        np.add.at(table, inverse, grads[0])
        for i, grad in enumerate([table, *grads[1:]]):
            touched = unique if i == 0 else np.arange(len(grad))
            rule.update(i, values[i], touched, grad.astype(np.float64))
    return values


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_against_numpy(case, graph):
    name, arguments, rule = case
    steps = toy_problem.make_steps(30)
    optimizer = getattr(optimizers, name)(
        learning_rate=LEARNING_RATE, **arguments
    )
    actual = toy_problem.train(optimizer, steps, graph=graph)
    expected = train_in_numpy(rule(), steps)
    # Dense gradients go to Keras, whose float32 bias correction is 6e-6 off.
    toy_problem.assert_same(actual, expected, rtol=2e-5, atol=2e-5)


def test_row_wise_accumulators_have_one_value_per_row():
    optimizer = optimizers.RowWiseAdagrad(initial_accumulator_value=0.25)
    variables = toy_problem.make_variables()
    optimizer.build(variables)
    slots = toy_problem.slots_of(optimizer)
    assert [tuple(slot.shape) for slot in slots] == [(12,), (3,), (2,)]
    for slot in slots:
        np.testing.assert_array_equal(slot.numpy(), 0.25)


def test_sgd_without_momentum_has_no_slots():
    optimizer = optimizers.SGD(0.1)
    optimizer.build(toy_problem.make_variables())
    assert not toy_problem.slots_of(optimizer)


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64])
def test_indices_of_either_width(dtype):
    variable = toy_problem.make_variable(np.ones((4, 2), np.float32), "t")
    slices = tf.IndexedSlices(
        tf.ones([2, 2]), tf.constant([3, 1], dtype), tf.constant([4, 2])
    )
    optimizers.SGD(0.5).apply_gradients([(slices, variable)])
    np.testing.assert_array_equal(
        variable.numpy(), [[1, 1], [0.5, 0.5], [1, 1], [0.5, 0.5]]
    )


def test_row_wise_adagrad_of_float64():
    """No fused op for the dtype: the same rule from stock ops."""
    start = np.arange(8.0).reshape(4, 2)
    variable = tf.Variable(start, dtype=tf.float64)
    slices = tf.IndexedSlices(
        tf.constant([[1.0, 2], [3, 4], [5, 6]], tf.float64),
        tf.constant([3, 1, 3]),
        tf.constant([4, 2]),
    )
    optimizers.RowWiseAdagrad(0.5).apply_gradients([(slices, variable)])
    expected = start.copy()
    for row, grad in ((1, np.array([3.0, 4])), (3, np.array([6.0, 8]))):
        mean = np.mean(grad**2)
        expected[row] -= 0.5 * grad / np.sqrt(0.1 + mean + 1e-7)
    np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-6)
