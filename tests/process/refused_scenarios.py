# SPDX-License-Identifier: Apache-2.0
"""Data, models and outputs that several ranks refuse, and those they do not."""

import pathlib

import numpy as np
import tensorflow as tf
from loop_scenarios import data
from loop_scenarios import predictions
from loop_scenarios import regressor

keras = tf.keras


def refused_output(strategy, folder, one_batch):
    try:
        predictions(strategy, folder, "transposed", one_batch)
    except ValueError as error:
        return str(error)
    return ""


def _of_generator(x, y):
    spec = (tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1]))
    return tf.data.Dataset.from_generator(
        lambda: iter([(x, y)] * 2), output_signature=spec
    )


def _parted(deterministic, samples):
    x, y = data(400)

    def read(i):
        # Some order of the clock, which differs from rank to rank.
        rank = tf.distribute.get_strategy().rank
        i = tf.where(i > 20, i + rank, i) % 400
        return tf.gather(x, i), tf.gather(y, i)

    return (
        tf.data.Dataset.range(samples)
        .map(read, num_parallel_calls=4, deterministic=deterministic)
        .batch(4)
    )


def datasets(folder):
    x, y = data(8)
    by_batch = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    cache = str(pathlib.Path(folder) / "cache")
    return {
        "known lengths": lambda: tf.data.Dataset.from_tensors((x, y[:4])),
        "lengths": lambda: _of_generator(x, y[:4]),
        "table": lambda: by_batch.map(
            lambda x, y: ((x, tf.zeros([100, 3])), y)
        ),
        "cache": lambda: by_batch.cache(cache),
        "later": lambda: _parted(False, 40),
        "scalar": lambda: by_batch.map(lambda x, y: (x, y, 2.0)),
        "own cache": lambda: by_batch.cache(
            f"{cache}-{tf.distribute.get_strategy().rank}"
        ),
        "deterministic": lambda: _parted(True, 16),
    }


def refusal(strategy, folder, name):
    """How a dataset is refused, "" if it is not."""
    with strategy.scope():
        dataset = datasets(folder)[name]()
        local = strategy.experimental_distribute_dataset
        try:
            for _ in local(dataset):
                pass
        except (ValueError, tf.errors.InvalidArgumentError) as error:
            return str(error)
    return ""


class First(keras.Model):
    def call(self, x):
        return x["a"]


def refused_models(strategy, folder, name):
    """How a model is refused by `fit`, or its batch by `train_on_batch`."""
    x = np.ones([8, 4, 3], np.float32)
    y = np.ones([8, 1], np.float32)
    try:
        if name == "stateful":
            with strategy.scope():
                inputs = keras.Input(batch_size=8, shape=(4, 3))
                states = keras.layers.LSTM(2, stateful=True)(inputs)
                model = keras.Model(inputs, keras.layers.Dense(1)(states))
                model.compile("sgd", "mse")
            model.fit(x, y, batch_size=8, verbose=0)
        elif name == "lengths":
            with strategy.scope():
                model = First()
                model.compile()
            model.predict_on_batch({"a": x[:, 0], "b": y[:4]})
        else:
            rows = x[:, 0] + strategy.rank
            regressor(strategy).train_on_batch(rows, y)
    except ValueError as error:
        return str(error)
    return ""
