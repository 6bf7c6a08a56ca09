# SPDX-License-Identifier: Apache-2.0
"""A small training problem: one table, one matrix, one bias."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

KERAS_3 = hasattr(tf.keras, "ops")
SHAPES = ((12, 3), (3, 2), (2,))


def make_variable(value, name):
    if KERAS_3:
        return tf.keras.Variable(value, name=name)
    return tf.Variable(value, name=name)


def make_variables(seed=0):
    """Table, matrix and bias, as trainable variables of the Keras in use."""
    rng = np.random.default_rng(seed)
    names = ("table", "matrix", "bias")
    return [
        make_variable(rng.normal(size=shape).astype(np.float32), name)
        for shape, name in zip(SHAPES, names, strict=True)
    ]


def slots_of(optimizer):
    """What an optimizer keeps for each variable, not its counts of steps."""
    variables = optimizer.variables
    variables = variables() if callable(variables) else variables
    return [v for v in variables if len(v.shape)]


def make_steps(count, every_row=False, seed=1, scale=1.0):
    """Gradients of `count` steps: rows, values, and dense gradients."""
    rng = np.random.default_rng(seed)
    steps = []
    for _ in range(count):
        rows = rng.integers(0, SHAPES[0][0], 7)
        if every_row:
            rows = np.concatenate([rng.permutation(SHAPES[0][0]), rows])
        shapes = [(len(rows), SHAPES[0][1]), *SHAPES[1:]]
        grads = [scale * rng.normal(size=s).astype(np.float32) for s in shapes]
        steps.append((rows.astype(np.int64), grads))
    return steps


def sparse_gradients(rows, grads):
    """The gradients as a tape gives them: IndexedSlices for the table."""
    slices = tf.IndexedSlices(
        tf.constant(grads[0]),
        tf.constant(rows),
        tf.constant(SHAPES[0], tf.int64),
    )
    return [slices, *map(tf.constant, grads[1:])]


def dense_gradients(rows, grads):
    """The same gradients, the table's as a matrix."""
    table = np.zeros(SHAPES[0], np.float32)
    np.add.at(table, rows, grads[0])
    return [tf.constant(table), *map(tf.constant, grads[1:])]


def train(optimizer, steps, gradients=sparse_gradients, graph=True, seed=0):
    """Applies the steps; returns the trained values."""
    variables = make_variables(seed)
    if KERAS_3:
        optimizer.build(variables)

    def apply(grads):
        optimizer.apply_gradients(list(zip(grads, variables, strict=True)))

    if graph:
        apply = tf.function(apply, reduce_retracing=True)
    for rows, grads in steps:
        apply(gradients(rows, grads))
    return [variable.numpy() for variable in variables]


def assert_same(actual, expected, rtol=1e-5, atol=1e-6):
    for name, a, e in zip(
        ("table", "matrix", "bias"), actual, expected, strict=True
    ):
        np.testing.assert_allclose(a, e, rtol=rtol, atol=atol, err_msg=name)
