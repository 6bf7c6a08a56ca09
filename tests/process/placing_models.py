# SPDX-License-Identifier: Apache-2.0
"""Models of several sparse layers, of every kind that Keras knows."""

import functools

import numpy as np
import tensorflow as tf

import tfdist_ext
from tfdist_ext.layers import DistributedEmbedding
from tfdist_ext.layers import FeatureConfig
from tfdist_ext.layers import FullSparse
from tfdist_ext.layers import SharedExchange
from tfdist_ext.layers import TableConfig

keras = tf.keras
BATCH, HOTNESS, UNITS = 96, 20, 10
ROWS = {"users": 6000, "items": 5000, "words": 4000}
NAMES = list(ROWS)


@functools.cache
def dataset(samples=4 * BATCH + 41):
    """Batches for all ranks; the last not one that they divide."""
    rng = np.random.default_rng(1)
    inputs = {
        name: (rng.zipf(1.2, [samples, HOTNESS]) % rows).astype(np.int64)
        for name, rows in ROWS.items()
    }
    labels = rng.normal(size=[samples, 1]).astype(np.float32)
    whole = tf.data.Dataset.from_tensor_slices((inputs, labels))
    return whole.batch(BATCH)


def full_sparse(name, **arguments):
    initializer = keras.initializers.RandomNormal(0.0, 0.3, seed=4)
    return FullSparse(
        UNITS,
        ROWS[name],
        name=name,
        kernel_initializer=initializer,
        **arguments,
    )


def embedding(name, **arguments):
    table = TableConfig(
        "table" if name != "words" else "words",
        ROWS[name],
        UNITS,
        keras.initializers.RandomNormal(0.0, 0.3, seed=4),
        combiner="mean",
        **arguments,
    )
    feature = FeatureConfig(name, table, (None, HOTNESS), (None, UNITS))
    return DistributedEmbedding({name: feature}, name=name)


def head():
    return keras.layers.Dense(
        1, kernel_initializer=keras.initializers.GlorotUniform(seed=2)
    )


def functional(make=full_sparse, **arguments):
    """Every layer is built before the next one is there."""
    inputs = {
        name: keras.Input([HOTNESS], dtype="int64", name=f"{name}_ids")
        for name in NAMES
    }
    outputs = []
    for name in NAMES:
        layer = make(name, **arguments)
        if make is embedding:
            outputs.append(layer({name: inputs[name]})[name])
        else:
            outputs.append(layer(inputs[name]))
    return keras.Model(inputs, head()(keras.layers.Concatenate()(outputs)))


class Towers(keras.layers.Layer):
    """A layer of layers, which are built when it is called."""

    def __init__(self, layers, **arguments):
        super().__init__(autocast=False, **arguments)
        self.towers = layers

    def call(self, inputs):
        return tf.concat(
            [layer(inputs[layer.name]) for layer in self.towers], axis=1
        )

    def build(self, input_shape=None):
        self.built = True

    def compute_output_shape(self, input_shape):
        return (None, UNITS * len(self.towers))


def sequential():
    return keras.Sequential(
        [Towers([full_sparse(name) for name in NAMES]), head()]
    )


class Subclassed(keras.Model):
    """Built in its first call, in `fit`."""

    def __init__(self):
        super().__init__()
        self.sparse = [full_sparse(name) for name in NAMES]
        self.top = head()

    def call(self, inputs):
        found = [layer(inputs[layer.name]) for layer in self.sparse]
        return self.top(tf.ensure_shape(tf.concat(found, 1), [None, 3 * UNITS]))


class Nested(keras.Model):
    """A model with models in it, one of which is built before."""

    def __init__(self):
        super().__init__()
        self.first = functional()
        self.second = Subclassed()

    def call(self, inputs):
        return self.first(inputs) + self.second(inputs)


class Shared(keras.Model):
    """The layers in a `SharedExchange`, built before the batch is known."""

    def __init__(self):
        super().__init__()
        self.shared = SharedExchange([full_sparse(name) for name in NAMES])
        self.shared.build([(None, HOTNESS)] * len(NAMES))
        self.top = head()

    def call(self, inputs):
        found = self.shared([inputs[name] for name in NAMES])
        return self.top(tf.ensure_shape(tf.concat(found, 1), [None, 3 * UNITS]))


def sparse_layers(model):
    kinds = FullSparse, DistributedEmbedding
    return [x for x in model._flatten_layers() if isinstance(x, kinds)]


def compiled(make):
    model = make()
    model.compile(tfdist_ext.optimizers.Adagrad(0.3), "mse")
    return model


def fit(model, data=None):
    """Mean losses so far, after every whole batch."""
    losses = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: losses.append(logs["loss"])
    )
    model.fit(data or dataset(), verbose=0, callbacks=[note], shuffle=False)
    return np.array(losses[:-1])


def weights(strategy, model):
    """All weights of a model, whole."""
    found = []
    for variable in model.weights:
        gather = strategy.gather_table if strategy else np.asarray
        found.append(np.asarray(gather(variable)))
    return found
