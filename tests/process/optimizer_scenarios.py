# SPDX-License-Identifier: Apache-2.0
"""Optimizers' options, against one process."""

import contextlib
import functools

import numpy as np
import pytest
import tensorflow as tf

import tfdist_ext
from tfdist_ext.layers import DistributedEmbedding
from tfdist_ext.layers import FeatureConfig
from tfdist_ext.layers import FullSparse
from tfdist_ext.layers import TableConfig

keras = tf.keras
KERAS_3 = hasattr(keras, "ops")
SMALL, LARGE, UNITS = 20, 20_000, 4  # of 256 kB, which `gradients` tells apart


def slanted(shape, dtype=None, **_):
    numbers = tf.range(float(np.prod(shape)), dtype=tf.float32)
    return tf.reshape(tf.sin(numbers), shape)


class Partitioned(keras.layers.Layer):
    """Two tables in parts; one of them may have an optimizer for itself."""

    def __init__(self, own_optimizer):
        super().__init__()
        features = {}
        for name, optimizer in (("first", own_optimizer), ("second", None)):
            table = TableConfig(
                name,
                SMALL,
                UNITS,
                keras.initializers.RandomUniform(seed=1),
                placement="sparsecore",
                optimizer=optimizer,
            )
            features[name] = FeatureConfig(
                name, table, (None, 3), (None, UNITS)
            )
        self.embedding = DistributedEmbedding(features)

    def call(self, ids):
        inputs = {"first": ids, "second": (ids + 1) % SMALL}
        return tf.concat(list(self.embedding(inputs).values()), 1)

    def tables(self):
        return list(self.embedding.get_embedding_tables().values())


class Replicated(keras.layers.Layer):
    """Tables that all ranks hold, of both kinds and sizes."""

    def __init__(self):
        super().__init__()
        self.plain = [
            keras.layers.Embedding(rows, UNITS, slanted)
            for rows in (SMALL, LARGE)
        ]
        self.sparse = [
            FullSparse(
                UNITS, rows, sharding="replicated", kernel_initializer=slanted
            )
            for rows in (SMALL, LARGE)
        ]

    def call(self, ids):
        rows = [tf.reduce_sum(layer(ids), 1) for layer in self.plain]
        return tf.concat([*rows, *[layer(ids) for layer in self.sparse]], 1)

    def tables(self):
        layers = [*self.plain, *self.sparse]
        return [layer.get_weights()[0][:SMALL] for layer in layers]


class Model(keras.Model):
    def __init__(self, parts):
        super().__init__()
        self.parts = parts
        self.dense = keras.layers.Dense(1, kernel_initializer=slanted)

    def call(self, ids):
        return self.dense(tf.concat([part(ids) for part in self.parts], 1))


def fitted(strategy, make, optimizer, infinite=False, trains=True):
    """The weights of a model that is trained on ids which occur again."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, SMALL // 2, [33, 3])
    labels = rng.normal(size=[33, 1]).astype(np.float32)
    if infinite:  # in the first rank's part alone
        labels[8] = np.inf
    dataset = tf.data.Dataset.from_tensor_slices((ids, labels)).batch(8)
    with strategy.scope() if strategy else tf.init_scope():
        model = Model(make())
        arguments = {"jit_compile": False} if KERAS_3 else {}
        model.compile(optimizer(), "mse", **arguments)
    if not trains:
        return []
    model.fit(dataset, epochs=2, verbose=0)
    tables = [table for part in model.parts for table in part.tables()]
    return [np.array(w) for w in (*tables, *model.dense.get_weights())]


def as_one_process(strategy, make, optimizer, **options):
    """Compares with what rank 0 trains alone; others make the same model.

    For Keras numbers the names of layers, which ranks have in common.
    """
    alone = strategy.rank == 0
    expected = fitted(None, make, optimizer, trains=alone, **options)
    found = fitted(strategy, make, optimizer, **options)
    for i, value in enumerate(found):
        everyone = strategy.gather(tf.constant(value[np.newaxis]), axis=0)
        np.testing.assert_array_equal(everyone.numpy()[0], value, f"{i}")
    for i, (a, b) in enumerate(zip(found, expected, strict=alone)):
        np.testing.assert_allclose(
            a, b, rtol=1e-4, atol=1e-5, err_msg=f"weight {i}"
        )


def moving_average(strategy, folder):
    """Weights become their averages in every fourth step."""
    options = {
        "use_ema": True,
        "ema_momentum": 0.8,
        "ema_overwrite_frequency": 4,
    }
    for kinds in (tfdist_ext.optimizers, keras.optimizers):
        of_table = kinds is tfdist_ext.optimizers and KERAS_3
        own_optimizer = "sgd" if of_table else None
        as_one_process(
            strategy,
            lambda own=own_optimizer: [Partitioned(own), Replicated()],
            lambda kinds=kinds: kinds.Adagrad(0.1, **options),
        )


def rows_that_occur_again(strategy, folder):
    """Squared and decayed as by one process, for tables of any size."""
    for make_optimizer in (
        lambda: keras.optimizers.Adam(0.05),
        lambda: keras.optimizers.Adagrad(0.1),
        lambda: tfdist_ext.optimizers.Adam(0.05),  # leaves other rows alone
    ):
        as_one_process(strategy, lambda: [Replicated()], make_optimizer)


def loss_scale(strategy, folder):
    """All ranks skip a step in which one rank's gradient is infinite."""
    module = keras.optimizers if KERAS_3 else keras.mixed_precision
    as_one_process(
        strategy,
        lambda: [Replicated()],
        lambda: module.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
        infinite=True,
    )


class _Callable:
    """Updates a variable; has no closure to be looked into."""

    def __call__(self, variable, rows):
        return variable.scatter_sub(rows)


def update_functions(strategy, folder):
    """Whatever can be called may update a part; foreign rows are refused."""
    with strategy.scope():
        layer = FullSparse(UNITS, SMALL, sharding="row")
        layer.build([None, 3])
    table = layer.kernel.value if KERAS_3 else layer.kernel
    before = strategy.gather_table(layer)

    def add(variable, value):
        return variable.assign_add(tf.fill(variable.shape, value))

    update = strategy.extended.update
    update(table, functools.partial(add, value=1.0))
    update(table, lambda variable, value: add(variable, value), args=(2.0,))
    np.testing.assert_allclose(strategy.gather_table(layer), before + 3.0)
    foreign = tf.IndexedSlices(tf.ones([1, UNITS]), [0], [SMALL, UNITS])
    for function in (
        _Callable(),
        functools.partial(_Callable.__call__, _Callable()),
    ):
        with pytest.raises(ValueError, match="not come from its layer's"):
            update(table, function, args=(foreign,))
    np.testing.assert_allclose(strategy.gather_table(layer), before + 3.0)


def foreign_gradients(strategy, folder):
    """A gradient by the kernel itself, whatever the optimizer is made of."""
    with strategy.scope():
        layer = FullSparse(UNITS, SMALL, sharding="row")
        layer.build([None, 3])
        chosen = keras.optimizers.SGD(0.1)

        class Wrapped(keras.optimizers.SGD):
            """Updates by an object that hides the optimizer."""

            def update_step(self, *arguments):
                functools.partial(super().update_step)(*arguments)

        wrapped = tfdist_ext.optimizers.element_wise(Wrapped)(0.1)
    variables = layer.trainable_variables
    shape = variables[0].shape
    for optimizer in (chosen, wrapped):

        def step(optimizer=optimizer):
            optimizer.apply_gradients([(tf.ones(shape), variables[0])])

        with pytest.raises(ValueError, match="got a gradient that does not"):
            strategy.run(step)


def undeclared_optimizer(strategy, folder):
    """One that is on no list trains no table, and dense layers only."""

    class LARS(keras.optimizers.SGD):
        def update_step(self, *arguments):
            super().update_step(*arguments)

    x = np.arange(24).reshape(8, 3) % SMALL
    for table in (True, False):
        with strategy.scope():
            first = FullSparse(UNITS, SMALL, sharding="row")
            if not table:
                first = keras.layers.Dense(UNITS)
            model = keras.Sequential([first, keras.layers.Dense(1)])
            model.compile(LARS(0.1), "mse")
        refused = pytest.raises(ValueError, match="LARS cannot train")
        with refused if table else contextlib.nullcontext():
            model.fit(x, np.ones([8, 1], np.float32), verbose=0)
