# SPDX-License-Identifier: Apache-2.0
"""A model whose tables, slots and metric are set rather than trained."""

import numpy as np
import tensorflow as tf

import tfdist_ext
from tfdist_ext import marks
from tfdist_ext.keras_internals import value_of
from tfdist_ext.layers import FullSparse

keras = tf.keras
ROWS, UNITS = 41, 4


class Model(keras.Model):
    """A partitioned table, a dense layer, a metric as attribute."""

    def __init__(self):
        super().__init__()
        self.sparse = FullSparse(UNITS, ROWS, sharding="row")
        self.dense = keras.layers.Dense(1)
        self.tracker = keras.metrics.Mean()
        self.sparse.build([None, 4])
        self.dense.build([None, UNITS])
        self.compile(tfdist_ext.optimizers.Adagrad(0.1), "mse")

    def call(self, ids):
        return self.dense(self.sparse(ids))

    @classmethod
    def of(cls, strategy):
        with strategy.scope():
            model = cls()
            model.optimizer.build(model.trainable_variables)
        return model


def filled(strategy, model, seed=0):
    """Gives tables, slots and dense weights values that tell them apart."""
    rng = np.random.default_rng(seed)
    for variable in _variables(model):
        inner = value_of(variable)
        spec = marks.shard_spec(inner)
        if spec is None:
            inner.assign(rng.normal(size=inner.shape))
            continue
        whole = rng.normal(size=[spec.rows, spec.dim])
        part = np.zeros(inner.shape, np.float32)
        ids = np.arange(spec.cell[0], spec.rows, spec.row_parts)
        part[: len(ids)] = whole[ids]
        inner.assign(part)
    return model


def unlike(strategy, model, expected):
    """Overwrites everything, so that a restore must bring it back."""
    filled(strategy, model, seed=99)
    assert not np.array_equal(
        state(strategy, model)["kernel"], expected["kernel"]
    )


def state(strategy, model):
    """Tables and slots as whole arrays, dense weights."""
    values = {"kernel": strategy.gather_table(model.sparse)}
    for i, variable in enumerate(_variables(model)):
        values[str(i)] = strategy.gather_table(variable)
    return values


def _variables(model):
    slots = [v for v in model.optimizer.variables if v.shape.rank]
    return [*model.sparse.weights, *model.dense.weights, *slots]


def tables_in(path, expected):
    """Plain TensorFlow finds the table and its slot, whole."""
    reader = tf.train.load_checkpoint(path)
    shapes = reader.get_variable_to_shape_map()
    found = [reader.get_tensor(n) for n, s in shapes.items() if len(s) == 2]
    tables = [v for v in expected.values() if v.shape == (ROWS, UNITS)]
    assert len(tables) == 3  # the kernel, again, and its slot
    for table in tables:
        assert any(np.array_equal(table, value) for value in found)
