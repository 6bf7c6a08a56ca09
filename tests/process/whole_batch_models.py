# SPDX-License-Identifier: Apache-2.0
"""Losses and metrics that look at samples together, and models with them."""

import numpy as np
import tensorflow as tf

from tfdist_ext.layers import FullSparse
from tfdist_ext.optimizers import SGD

keras = tf.keras
KERAS_3 = hasattr(keras, "ops")
OPTIONS = {"jit_compile": False} if KERAS_3 else {}
SAMPLES, BATCH, ROWS, STEPS = 17, 8, 30, 5  # the last batch has one sample


def total(y, predicted):
    return tf.reduce_sum(tf.square(y - predicted))


def rmse(y, predicted):
    return tf.sqrt(tf.reduce_mean(tf.square(y - predicted)))


def masked(y, predicted):
    mask = tf.cast(y > 0, tf.float32)
    losses = tf.square(y - predicted)
    return tf.reduce_sum(losses * mask) / tf.maximum(tf.reduce_sum(mask), 1.0)


def dice(y, predicted):
    predicted = tf.sigmoid(predicted)
    both = tf.reduce_sum(y * predicted)
    return 1.0 - (2.0 * both + 1.0) / (
        tf.reduce_sum(y) + tf.reduce_sum(predicted) + 1.0
    )


def correlation(y, predicted):
    y, predicted = y - tf.reduce_mean(y), predicted - tf.reduce_mean(predicted)
    squares = tf.reduce_sum(y**2) * tf.reduce_sum(predicted**2)
    return -tf.reduce_sum(y * predicted) / tf.sqrt(squares + 0.1)


def largest(y, predicted):
    return tf.reduce_max(tf.abs(y - predicted))


def norm(y, predicted):
    return tf.norm(y - predicted)


def variance(y, predicted):
    return tf.math.reduce_variance(y - predicted)


def by_row(y, predicted):
    return tf.square(y - predicted)[:, 0]


def centred(y, predicted):
    """A value for each sample, which depends on all of them."""
    error = tf.square(y - predicted)
    return tf.abs(error - tf.reduce_mean(error))[:, 0]


class Masked(keras.losses.Loss):
    def call(self, y, predicted):
        return masked(y, predicted)


class Contrastive(keras.losses.Loss):
    """Every sample is to be near those of its label."""

    def call(self, y, predicted):
        scores = tf.matmul(predicted, predicted, transpose_b=True)
        same = tf.cast(tf.equal(y, tf.transpose(y)), scores.dtype)
        chances = tf.nn.log_softmax(scores)
        return -tf.reduce_sum(same * chances, 1) / tf.reduce_sum(same, 1)


class OwnCall(keras.losses.Loss):
    """Overrides what Keras does around `call`."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        return rmse(y_true, y_pred)

    def call(self, y_true, y_pred):
        raise NotImplementedError


class Narrowed(keras.losses.MeanSquaredError):
    """A class of Keras's with another `call`."""

    def call(self, y_true, y_pred):
        return super().call(y_true, y_pred) - rmse(y_true, y_pred)


class State(keras.metrics.Metric):
    start = -5.0

    def __init__(self, name="state", **options):
        super().__init__(name=name, **options)
        self.state = self.add_weight(
            name="state",
            shape=(),
            initializer=keras.initializers.Constant(self.start),
        )

    def result(self):
        return tf.convert_to_tensor(self.state)

    def reset_state(self):
        self.state.assign(self.start)


class Largest(State):
    def update_state(self, y, predicted, sample_weight=None):
        found = tf.reduce_max(predicted)
        self.state.assign(tf.maximum(tf.convert_to_tensor(self.state), found))


class Moving(State):
    """A moving average, of batches as they come."""

    start = 1.0

    def update_state(self, y, predicted, sample_weight=None):
        error = tf.reduce_mean(tf.abs(y - predicted))
        old = tf.convert_to_tensor(self.state)
        self.state.assign(0.9 * old + 0.1 * error)


class Nested(keras.metrics.Metric):
    """Has metrics of its own."""

    def __init__(self, name="nested", **options):
        super().__init__(name=name, **options)
        self.mean = keras.metrics.Mean()
        self.largest = Largest()

    def update_state(self, y, predicted, sample_weight=None):
        self.mean.update_state(tf.reduce_max(predicted) * tf.ones([3]))
        self.largest.update_state(y, predicted)

    def result(self):
        return self.mean.result() + self.largest.result()

    def reset_state(self):
        self.mean.reset_state()
        self.largest.reset_state()


class OwnMean(keras.metrics.Mean):
    def update_state(self, y, predicted, sample_weight=None):
        value = tf.sqrt(tf.reduce_mean(tf.square(y - predicted)))
        return super().update_state(value)


def data(weights=False, labels=2, dim=3):
    rng = np.random.default_rng(0)
    x = rng.normal(size=[SAMPLES, dim]).astype(np.float32)
    y = rng.integers(0, labels, [SAMPLES, 1]).astype(np.float32)
    weight = rng.random([SAMPLES]).astype(np.float32)
    parts = (x, y, weight) if weights else (x, y)
    return tf.data.Dataset.from_tensor_slices(parts).batch(BATCH)


def dense(units=1, **options):
    return keras.layers.Dense(
        units,
        kernel_initializer=keras.initializers.RandomNormal(seed=1),
        **options,
    )


def plain(units=1, activation=None):
    layer = dense(units, activation=activation)
    return keras.Sequential([keras.Input([3]), layer])


def fitted(strategy, build, dataset=None, epochs=2, compile_later=None, **fit):
    """Trains and evaluates what `build` makes in the scope.

    Returns:
        Logs by epoch, those of the evaluation, and weights.
    """
    with strategy.scope() if strategy else tf.init_scope():
        keras.utils.set_random_seed(3)
        model = build()
    if compile_later:
        compile_later(model)
    dataset = data() if dataset is None else dataset
    history = model.fit(dataset, epochs=epochs, verbose=0, **fit).history
    found = {f"fit {key}": values for key, values in history.items()}
    logs = model.evaluate(dataset, verbose=0, return_dict=True)
    found.update({f"evaluate {key}": value for key, value in logs.items()})
    weights = model.trainable_variables
    tables = getattr(model, "tables", [])
    kernels = [id(table.kernel) for table in tables]
    for i, weight in enumerate(weights):
        if id(weight) not in kernels:
            found[f"weight {i}"] = np.array(weight)
    for i, table in enumerate(tables):
        kernel = strategy.gather_table(table) if strategy else table.kernel
        found[f"table {i}"] = np.array(kernel)
    return found


def compiled(model, loss, **options):
    model.compile(SGD(0.1), loss, **{**OPTIONS, **options})
    return model


class WithTable(keras.Model):
    """A partitioned table."""

    def __init__(self):
        super().__init__()
        self.table = FullSparse(4, ROWS, sharding="row")
        self.tables = [self.table]
        self.dense = dense()

    def call(self, ids):
        return self.dense(self.table(ids))


def ids():
    rng = np.random.default_rng(0)
    rows = rng.integers(0, ROWS, [SAMPLES, 3])
    y = rng.integers(0, 2, [SAMPLES, 1]).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((rows, y)).batch(BATCH)
