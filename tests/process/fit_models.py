# SPDX-License-Identifier: Apache-2.0
"""A small model with a sparse layer, its data, and what is compared."""

import numpy as np
import tensorflow as tf

import tfdist_ext
from tfdist_ext.layers import FullSparse

keras = tf.keras
ROWS, BATCH = 40, 8


def data(samples=64, seed=0):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, ROWS, [samples, 3])
    labels = (rng.random([samples, 1]) < 0.4).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((ids, labels)).batch(BATCH)


def make_model(strategy, metrics=(), sharding="row", **compile_arguments):
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input([3], dtype="int64", name="ids"),
                FullSparse(
                    4,
                    ROWS,
                    sharding=sharding,
                    kernel_initializer=keras.initializers.RandomNormal(
                        0, 0.1, seed=1
                    ),
                    name="sparse",
                ),
                keras.layers.Dense(
                    1,
                    activation="sigmoid",
                    kernel_initializer=keras.initializers.GlorotUniform(seed=2),
                ),
            ]
        )
        compile_arguments.setdefault(
            "optimizer", tfdist_ext.optimizers.Adagrad(0.5)
        )
        model.compile(
            loss="binary_crossentropy",
            metrics=[make() for make in metrics],
            **compile_arguments,
        )
    return model


def weights(strategy, model):
    table = strategy.gather_table(model.get_layer("sparse"))
    return [table, *(np.array(w) for w in model.layers[-1].weights)]


def same_on_all_ranks(strategy, value):
    """Whether an array is bitwise the same on all ranks."""
    flat = np.asarray(value, np.float32).reshape(1, -1)
    gathered = strategy.gather(tf.constant(flat), axis=0).numpy()
    return (gathered == gathered[0]).all()


class Logs(keras.callbacks.Callback):
    """The logs at the end of each batch."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append({k: float(v) for k, v in logs.items()})

    def on_test_batch_end(self, batch, logs=None):
        self.on_train_batch_end(batch, logs)
