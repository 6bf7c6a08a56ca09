# SPDX-License-Identifier: Apache-2.0
"""Sparse layers in functions, branches and loops within a model's call."""

import numpy as np
import pytest
import tensorflow as tf

import tfdist_ext
from tfdist_ext.layers import FullSparse

keras = tf.keras
ROWS, DIM, BATCH = 100, 4, 8


class Plain(keras.Model):
    """A layer that is first built wherever the call calls it."""

    def __init__(self):
        super().__init__()
        self.sparse = FullSparse(
            DIM,
            ROWS,
            use_bias=False,
            sharding="row",
            kernel_initializer=keras.initializers.RandomNormal(seed=3),
        )
        self.other = FullSparse(DIM, ROWS, use_bias=False, sharding="column")
        self.dense = keras.layers.Dense(1)

    def call(self, ids, training=False):
        return self.dense(self.found(ids))

    def found(self, ids):
        return self.sparse(ids)

    @staticmethod
    def expected(table, ids):
        return table[ids].sum(1)


class Function(Plain):
    def __init__(self):
        super().__init__()
        self.function = tf.function(self.sparse)

    def found(self, ids):
        return self.function(ids)


class Twice(Function):
    """Calls of one function, of which either may come first."""

    def found(self, ids):
        return self.function(ids) + 2 * self.function(ids[:, ::-1] // 2)

    @staticmethod
    def expected(table, ids):
        return table[ids].sum(1) + 2 * table[ids // 2].sum(1)


class FunctionOfFunctions(Function):
    """Two layers, and one more outside; the others start at zero."""

    def __init__(self):
        super().__init__()
        self.beside = FullSparse(DIM, ROWS, use_bias=False, sharding="row")
        for layer in (self.sparse, self.other, self.beside):
            layer.build((None, 3))  # a function makes variables once only
        self.outer = tf.function(
            lambda ids: self.function(ids) + self.other(ids)
        )

    def found(self, ids):
        return self.outer(ids) + self.beside(ids)


class Branch(Plain):
    def found(self, ids):
        return tf.cond(
            tf.reduce_sum(ids) >= 0,
            lambda: self.sparse(ids),
            lambda: tf.zeros([tf.shape(ids)[0], DIM]),
        )


class Loop(Plain):
    def found(self, ids):
        return tf.while_loop(
            lambda i, _: i < 2,
            lambda i, found: (i + 1, found + self.sparse((ids + i) % ROWS)),
            (tf.constant(0, tf.int64), tf.zeros([tf.shape(ids)[0], DIM])),
        )[1]

    @staticmethod
    def expected(table, ids):
        return table[ids].sum(1) + table[(ids + 1) % ROWS].sum(1)


class Map(Plain):
    def found(self, ids):
        columns = tf.transpose(ids)[:, :, tf.newaxis]
        rows = tf.map_fn(self.sparse, columns, fn_output_signature=tf.float32)
        return tf.ensure_shape(tf.reduce_sum(rows, 0), [None, DIM])


def made(strategy, kind):
    with strategy.scope():
        model = kind()
        model.compile(tfdist_ext.optimizers.SGD(0.1), "mse")
    return model


def data():
    """Batches, of which the last is smaller."""
    ids = np.random.default_rng(0).integers(0, ROWS, (2 * BATCH + 5, 3))
    return ids, (ids[:, :1] % 2).astype(np.float32)


def checked(strategy, model, order):
    """Runs Keras's loops, which must find what the tables hold.

    Args:
        strategy: of the model.
        model: one of the above.
        order: "predict", "evaluate" and "call", the model by itself.
    """
    ids, labels = data()
    for name in order:
        if name == "predict":
            found = model.predict(ids, batch_size=BATCH, verbose=0)
        elif name == "call":
            found = model(ids)
        else:
            found = model.evaluate(ids, labels, batch_size=BATCH, verbose=0)
        table = strategy.gather_table(model.sparse)
        kernel, bias = (value.numpy() for value in model.dense.weights)
        expected = model.expected(table, ids) @ kernel + bias
        if name == "evaluate":
            expected = np.square(expected - labels).mean()
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


KINDS = (Function, Twice, FunctionOfFunctions, Branch, Loop, Map)


def inference(strategy, folder):
    """What is traced for one loop does for the others."""
    for kind in KINDS:
        order = ("predict", "evaluate", "call", "predict")
        checked(strategy, made(strategy, kind), order)


def built_by_evaluate(strategy, folder):
    """Keras 3 builds a model then by shapes alone, where no table is made."""
    for kind in (Function, Branch):
        checked(strategy, made(strategy, kind), ("evaluate", "predict"))


def run_eagerly(strategy, folder):
    """Functions, when the model's call is none."""
    for kind in (Twice, FunctionOfFunctions):
        model = made(strategy, kind)
        model.run_eagerly = True
        checked(strategy, model, ("predict", "evaluate"))


def training(strategy, folder):
    """Refused at several ranks, with the remedy; as usual on one."""
    ids, labels = data()
    for kind in (Function, Branch, Map):
        model = made(strategy, kind)
        if strategy.world_size == 1:
            model.fit(ids, labels, batch_size=BATCH, verbose=0)
        else:
            with pytest.raises(ValueError, match="call it outside of that"):
                model.fit(ids, labels, batch_size=BATCH, verbose=0)
        checked(strategy, model, ("predict",))
