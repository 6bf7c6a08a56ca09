# SPDX-License-Identifier: Apache-2.0
"""Models that a check compares: right ones, and wrong ones."""

import numpy as np
import tensorflow as tf

import tfdist_ext
from tfdist_ext.layers import DistributedEmbedding
from tfdist_ext.layers import FeatureConfig
from tfdist_ext.layers import FullSparse
from tfdist_ext.layers import TableConfig
from tfdist_ext.tables.table_config import DynamicVocabulary

keras = tf.keras
ROWS, BATCH = 40, 8


def data(samples=17, seed=0):
    """The last batch has one sample, so ranks have none."""
    rng = np.random.default_rng(seed)
    numbers = rng.normal(size=[samples, 5]).astype(np.float32)
    ids = rng.integers(0, ROWS, [samples, 3])
    labels = rng.normal(size=[samples, 1]).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices(((numbers, ids), labels))


class Right(keras.Model):
    """A step of its own, whose loss is a mean."""

    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(4, activation="relu")
        self.last = keras.layers.Dense(1)
        self.tracker = keras.metrics.Mean(name="tracked")
        self.add_layers()

    def add_layers(self):
        pass

    def call(self, inputs, training=False):
        numbers, ids = inputs
        return self.last(self.features(self.hidden(numbers), ids, training))

    def features(self, hidden, ids, training):
        return hidden

    def loss_of(self, error):
        return tf.reduce_mean(tf.square(error))

    def process(self, gradients):
        return gradients

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(self(x, training=True) - y)
        variables = self.trainable_variables
        gradients = self.process(tape.gradient(loss, variables))
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        self.tracker.update_state(loss)
        return {"loss": loss, "tracked": self.tracker.result()}

    @property
    def metrics(self):
        return [self.tracker]


class Table(Right):
    """Rows of a partitioned table beside the dense layers."""

    def add_layers(self):
        self.table = FullSparse(3, ROWS, sharding="row")

    def features(self, hidden, ids, training):
        return tf.concat([hidden, self.table(ids)], 1)


class Grows(Right):
    """A table whose vocabulary grows, and forgets."""

    def add_layers(self):
        vocabulary = DynamicVocabulary(20, evict="lru")
        table = TableConfig("keys", embedding_dim=3, vocabulary=vocabulary)
        self.table = DistributedEmbedding(
            FeatureConfig("keys", table, (None, 3), (None, 3))
        )

    def features(self, hidden, ids, training):
        return tf.concat([hidden, self.table(ids)], 1)


class Drops(Right):
    """A step that draws random numbers."""

    def add_layers(self):
        self.drop = keras.layers.Dropout(0.4, seed=3)

    def features(self, hidden, ids, training):
        return self.drop(hidden, training=training)


class Normalizes(Right):
    """Normalizes by the samples of all ranks."""

    synchronized = True

    def add_layers(self):
        self.norm = keras.layers.BatchNormalization(
            synchronized=self.synchronized
        )

    def features(self, hidden, ids, training):
        return self.norm(hidden, training=training)


class Alone(Normalizes):
    """Normalizes by the samples of a rank."""

    synchronized = False


class Einsum(Right):
    """A sum that no reduction computes."""

    def loss_of(self, error):
        error = tf.reshape(error, [-1])
        return tf.einsum("i,i->", error, error)


class TableSum(Table):
    """A sum, with a partitioned table."""

    def loss_of(self, error):
        return tf.reduce_sum(tf.square(error))


class Root(Right):
    """A loss of all samples jointly."""

    def loss_of(self, error):
        return tf.sqrt(tf.reduce_mean(tf.square(error)))


class Clips(Right):
    """Clips gradients by hand."""

    def process(self, gradients):
        return tf.clip_by_global_norm(gradients, 0.5)[0]


class Largest(keras.layers.Layer):
    """Remembers the largest number that it has seen."""

    def build(self, shape):
        self.largest = self.add_weight(
            name="largest", shape=(), initializer="zeros", trainable=False
        )

    def call(self, x):
        self.largest.assign(tf.maximum(self.largest, tf.reduce_max(tf.abs(x))))
        return x


class Remembers(Right):
    """State that each rank updates by its own samples."""

    def add_layers(self):
        self.largest = Largest()

    def features(self, hidden, ids, training):
        return self.largest(hidden)


MODELS = {
    each.__name__: each
    for each in (
        *(Right, Table, Grows, Drops, Normalizes),
        *(Alone, Einsum, TableSum, Root, Clips, Remembers),
    )
}


def root(true, predicted):
    """A metric of all samples jointly."""
    return tf.sqrt(tf.reduce_mean(tf.square(true - predicted)))


def plain():
    """A model of Keras's parts alone."""
    numbers, ids = keras.Input([5]), keras.Input([3], dtype="int64")
    hidden = keras.layers.Dense(4, activation="relu")(numbers)
    return keras.Model((numbers, ids), keras.layers.Dense(1, "sigmoid")(hidden))


def compiled(name, **options):
    """A model of that name, for a strategy in scope."""
    model = plain() if name == "plain" else MODELS[name]()
    if name == "plain":
        options = {"metrics": ["mae", "AUC", root], **options}
    model.compile(tfdist_ext.optimizers.Adam(0.05), "mse", **options)
    return model
