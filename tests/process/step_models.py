# SPDX-License-Identifier: Apache-2.0
"""Models with a `train_step` of their own, as Keras's guides write them."""

import numpy as np
import tensorflow as tf

import tfdist_ext
from tfdist_ext.layers import FullSparse

keras = tf.keras
KERAS_3 = hasattr(keras, "ops")
ROWS, BATCH = 40, 8


def data(samples=17, seed=0):
    """The last batch has one sample, so ranks have none."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, ROWS, [samples, 3])
    labels = rng.normal(size=[samples, 1]).astype(np.float32)
    weights = rng.random([samples, 1]).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((ids, labels, weights))


class Base(keras.Model):
    """A partitioned table and a dense layer."""

    def __init__(self, regularizer=None):
        super().__init__()
        self.sparse = FullSparse(4, ROWS, sharding="row")
        self.dense = keras.layers.Dense(
            1,
            kernel_initializer=lambda *_, **__: tf.constant(
                [[0.5], [-0.2], [0.3], [0.7]]
            ),
            kernel_regularizer=regularizer,
        )
        self.tracker = keras.metrics.Mean(name="own")

    def call(self, ids, training=False):
        return self.dense(self.sparse(ids))

    def apply(self, tape, loss, optimizer=None, variables=None):
        variables = variables or self.trainable_variables
        gradients = tape.gradient(loss, variables)
        pairs = zip(gradients, variables, strict=True)
        (optimizer or self.optimizer).apply_gradients(pairs)


class Default(Base):
    pass


class OwnTracker(Base):
    """The guide's first example: `compute_loss`, and a tracker of its own."""

    def train_step(self, data):
        x, y, weight = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(
                x=x, y=y, y_pred=predicted, sample_weight=weight
            )
        self.apply(tape, loss)
        self.tracker.update_state(loss)
        return {"own": self.tracker.result()}

    @property
    def metrics(self):
        return [self.tracker]


class LossObject(OwnTracker):
    """The guide's lower level: a loss object of its own."""

    make_loss = keras.losses.MeanSquaredError

    def train_step(self, data):
        x, y, weight = data
        with tf.GradientTape() as tape:
            loss = self.make_loss()(y, self(x, training=True), weight)
        self.apply(tape, loss)
        self.tracker.update_state(loss)
        return {"own": self.tracker.result()}


class SumObject(LossObject):
    @staticmethod
    def make_loss():
        return keras.losses.MeanSquaredError(reduction="sum")


class ByHand(OwnTracker):
    def loss(self, y, predicted, weight):
        return tf.reduce_mean(weight * tf.square(y - predicted))

    def train_step(self, data):
        x, y, weight = data
        with tf.GradientTape() as tape:
            loss = self.by_hand(y, self(x, training=True), weight)
        self.apply(tape, loss)
        self.tracker.update_state(loss)
        return {"plain": tf.reduce_sum(loss)}

    def by_hand(self, y, predicted, weight):
        return tf.reduce_mean(weight * tf.square(y - predicted))


class AverageLoss(ByHand):
    """`tf.nn.compute_average_loss`, as the guides of tf.distribute have it."""

    def by_hand(self, y, predicted, weight):
        losses = tf.reduce_mean(tf.square(y - predicted), axis=-1)
        return tf.nn.compute_average_loss(losses)


class GlobalBatch(ByHand):
    """A sum, divided by a number that the program knows."""

    def by_hand(self, y, predicted, weight):
        losses = tf.reduce_mean(tf.square(y - predicted), axis=-1)
        return tf.nn.compute_average_loss(losses, global_batch_size=BATCH)


class DividedSum(ByHand):
    def by_hand(self, y, predicted, weight):
        count = tf.cast(tf.shape(y)[0], tf.float32)
        return tf.reduce_sum(tf.square(y - predicted)) / tf.maximum(count, 1.0)


class SumAndMean(ByHand):
    """A sum over samples beside a mean, and a term without any."""

    def by_hand(self, y, predicted, weight):
        mean = tf.reduce_mean(tf.square(y - predicted))
        total = tf.reduce_sum(weight * tf.abs(predicted)) / 16.0
        return mean - 0.25 * total + tf.nn.l2_loss(self.dense.kernel) * 0.01


class Vector(ByHand):
    """The guide of tf_keras differentiates one loss per sample."""

    def by_hand(self, y, predicted, weight):
        return tf.reduce_mean(tf.square(y - predicted), axis=-1) / 8.0


class Function(ByHand):
    """A step that is a tf.function already."""

    train_step = tf.function(ByHand.train_step)


class AddLoss(Base):
    def call(self, ids, training=False):
        found = self.sparse(ids)
        self.add_loss(1e-2 * tf.reduce_mean(tf.square(found)))
        return self.dense(found)


class ComputeLoss(Base):
    """An override with a mean of its own."""

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        loss = tf.reduce_mean(tf.abs(y - y_pred) * sample_weight)
        self.tracker.update_state(loss)
        return loss


class TwoOptimizers(ByHand):
    """As a GAN: one loss by Keras, one by hand, an optimizer for each."""

    def train_step(self, data):
        x, y, weight = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(
                x=x, y=y, y_pred=self(x, training=True), sample_weight=weight
            )
        self.apply(tape, loss, variables=self.sparse.trainable_variables)
        with tf.GradientTape() as tape:
            other = self.by_hand(y, self(x, training=True), weight)
        self.apply(
            tape, other, self.second, variables=self.dense.trainable_variables
        )
        self.tracker.update_state(other)
        return {"own": self.tracker.result()}


class InBatch(ByHand):
    """Every sample is told from all others, whatever rank has them."""

    def by_hand(self, y, predicted, weight):
        context = tf.distribute.get_replica_context()
        everyone = context.all_gather(predicted, 0)
        own = tf.shape(y)[:1]
        first = tf.reduce_sum(
            context.all_gather(own, 0)[: context.replica_id_in_sync_group]
        )
        everyone = tf.roll(everyone, -first, axis=0)  # own ones first
        scores = tf.matmul(y * predicted, everyone, transpose_b=True)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
            tf.range(own[0]), scores
        )
        return tf.reduce_mean(losses)


class InBatchSum(InBatch):
    def by_hand(self, y, predicted, weight):
        mean = super().by_hand(y, predicted, weight)
        return mean * tf.cast(tf.shape(y)[0], tf.float32) / 8.0


class Aggregated(OwnTracker):
    """Gradients summed by the step itself, as with clipping by hand."""

    def train_step(self, data):
        x, y, weight = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(
                x=x, y=y, y_pred=self(x, training=True), sample_weight=weight
            )
        variables = self.dense.trainable_variables
        gradients = tape.gradient(loss, variables)
        context = tf.distribute.get_replica_context()
        gradients = context.all_reduce("sum", gradients)
        samples = context.all_reduce("sum", tf.cast(tf.shape(y)[0], tf.float32))
        for variable, gradient in zip(variables, gradients, strict=True):
            native = getattr(variable, "value", variable)
            native = variable if callable(native) else native
            context.merge_call(
                lambda strategy, v, g: strategy.extended.update(
                    v, lambda v, g: v.assign_sub(0.1 * g), args=(g,)
                ),
                args=(native, gradient),
            )
        self.tracker.update_state(samples)
        return {"own": self.tracker.result()}


MODELS = {
    make.__name__: make
    for make in (
        Default, OwnTracker, LossObject, SumObject, ByHand, AverageLoss,
        GlobalBatch, DividedSum, SumAndMean, Vector, Function, AddLoss,
        ComputeLoss, TwoOptimizers, InBatch, InBatchSum, Aggregated,
    )
}  # fmt: skip
if not KERAS_3:
    del MODELS["Function"]  # stock: merge_call in a new graph


def branching(y, predicted):
    """A loss that autograph has to convert."""
    error = tf.reduce_mean(tf.square(y - predicted), axis=-1)
    if tf.size(y) < 0:
        error = 2.0 * error
    return error


def branching_activation(x):
    """An activation that autograph has to convert."""
    if tf.size(x) < 0:
        x = 2.0 * x
    return tf.tanh(x)


def fitted(strategy, name, drop=False, activation=None, **options):
    """Trains a model; in one process where there is no strategy.

    Returns:
        Its logs and weights.
    """
    scope = strategy.scope() if strategy else tf.init_scope()
    with scope:
        model = MODELS[name](keras.regularizers.L2(0.01))
        model.sparse.activation = keras.activations.get(activation)
        model.second = tfdist_ext.optimizers.SGD(0.05)
        loss = options.pop("loss", "mse")
        if KERAS_3:
            options.setdefault("jit_compile", False)
        model.compile(tfdist_ext.optimizers.SGD(0.2), loss, **options)
    dataset = data().batch(BATCH, drop_remainder=drop)
    logs = model.fit(dataset, epochs=1, verbose=0).history
    table = model.sparse.kernel
    if strategy:
        table = strategy.gather_table(model.sparse)
    weights = [np.array(w) for w in (table, *model.dense.weights)]
    return logs, weights
