# SPDX-License-Identifier: Apache-2.0
"""Layers and steps that assign variables, as one process would."""

import contextlib

import numpy as np
import tensorflow as tf

keras = tf.keras
KERAS_3 = hasattr(keras, "ops")
WIDTH, BATCH = 4, 8


def aggregation(name):
    """An argument of `add_weight`, as the Keras in use has it."""
    return name if KERAS_3 else getattr(tf.VariableAggregation, name.upper())


class Stateful(keras.layers.Layer):
    """Base of layers with variables of their own."""

    def state(self, name, shape=(), dtype="float32", value=None, **options):
        start = "zeros"
        if value is not None:
            start = keras.initializers.Constant(value)
        return self.add_weight(
            name=name,
            shape=shape,
            dtype=dtype,
            initializer=start,
            trainable=False,
            **options,
        )


class RunningMean(Stateful):
    """Named like that of batch normalisation, which is no special name."""

    def build(self, shape):
        self.mean = self.state("moving_mean", (WIDTH,))

    def call(self, x, training=False):
        if training:
            mean = tf.reduce_mean(x, axis=0)
            self.mean.assign(0.9 * self.mean + 0.1 * mean)
        return x - self.mean


class Counters(Stateful):
    """Samples in a float and in an integer, and steps."""

    def build(self, shape):
        self.samples = self.state("samples")
        total = aggregation("sum")
        self.exact = self.state("exact", dtype="int32", aggregation=total)
        first = aggregation("only_first_replica")
        self.steps = self.state("steps", dtype="int64", aggregation=first)
        self.of_first = self.state("of_first", aggregation=first)

    def call(self, x, training=False):
        if training:
            samples = tf.shape(x)[0]
            self.samples.assign_add(tf.cast(samples, tf.float32))
            self.exact.assign_add(samples)
            self.steps.assign_add(1)
            self.of_first.assign(self.samples + 0 * tf.reduce_sum(x))
        return x / (1.0 + self.samples)


class Codebook(Stateful):
    """The means of clusters, moved by sums over the samples next to them."""

    def build(self, shape):
        rows = np.linspace(-1, 1, 3 * WIDTH).reshape(3, WIDTH)
        self.codes = self.state("codes", (3, WIDTH), value=rows)
        self.counts = self.state("counts", (3,), value=1.0)
        self.sums = self.state("sums", (3, WIDTH), value=rows)

    def call(self, x, training=False):
        distances = tf.reduce_sum((x[:, None] - self.codes) ** 2, axis=2)
        chosen = tf.one_hot(tf.argmin(distances, axis=1), 3)
        if training:
            counts = tf.reduce_sum(chosen, axis=0)
            self.counts.assign(0.8 * self.counts + 0.2 * counts)
            sums = tf.matmul(chosen, x, transpose_a=True)
            self.sums.assign(0.8 * self.sums + 0.2 * sums)
            self.codes.assign(self.sums / self.counts[:, None])
        quantized = tf.matmul(chosen, tf.convert_to_tensor(self.codes))
        return x + tf.stop_gradient(quantized - x)


class Means(Codebook):
    """A codebook that is moved by means: ranks average it as it is."""

    def call(self, x, training=False):
        if training:
            mean = tf.reduce_mean(tf.nn.softmax(x[:, :3]), axis=0)
            self.counts.assign_add(0.1 * (mean - self.counts))
        return x * self.counts[0]


class Branching(Stateful):
    """Assigns every other step only, and in a loop, for the next step."""

    def build(self, shape):
        self.step = self.state("step")
        self.mean = self.state("mean", (WIDTH,))
        self.looped = self.state("looped")

    def call(self, x, training=False):
        result = x - tf.identity(tf.convert_to_tensor(self.mean))
        if training:
            self.step.assign_add(1.0)
            step = tf.convert_to_tensor(self.step)

            def assign():
                self.mean.assign(tf.reduce_mean(x, axis=0))
                return tf.constant(0)

            tf.cond(step % 2 < 1, assign, lambda: tf.constant(0))

            def body(i):
                self.looped.assign_add(tf.reduce_mean(x))
                return [i + 1]

            tf.while_loop(lambda i: i < 2, body, [0])
        return result


class OwnBranches(Stateful):
    """A rank assigns if its own samples say so."""

    def build(self, shape):
        self.seen = self.state("seen")
        self.rows = self.state("rows", (WIDTH, 2))

    def call(self, x, training=False):
        if training:
            mean = tf.reduce_mean(x)

            def assign():
                self.seen.assign_add(mean)
                return tf.constant(0)

            tf.cond(mean > 0, assign, lambda: tf.constant(0))
            row = tf.reduce_sum(x[:, :2], axis=0, keepdims=True)
            rows = tf.IndexedSlices(row, tf.constant([1]))
            native = self.rows.value if KERAS_3 else self.rows
            native.scatter_add(rows)
        return x + self.seen


class Teacher(keras.Model):
    """A second model that follows the first in each step."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher = keras.layers.Dense(1, name="teacher")
        self.teacher.build((None, WIDTH))

    def train_step(self, data):
        logs = super().train_step(data)
        student = self.get_layer("student")
        pairs = zip(self.teacher.weights, student.weights, strict=True)
        for mine, other in pairs:
            mine.assign(0.5 * mine + 0.5 * other)
        return logs


LAYERS = {
    layer.__name__: layer
    for layer in (
        RunningMean,
        Counters,
        Codebook,
        Means,
        Branching,
        OwnBranches,
    )
}
LAYERS["Dropout"] = lambda: keras.layers.Dropout(0.0)


def made(strategy, name, dtype=None, **options):
    """A compiled model with a layer that assigns."""
    scope = strategy.scope() if strategy else contextlib.nullcontext()
    with scope:
        keras.utils.set_random_seed(1)
        inputs = keras.Input([WIDTH])
        layer = LAYERS.get(name, LAYERS["Dropout"])()
        outputs = keras.layers.Dense(1, name="student")(layer(inputs))
        kind = Teacher if name == "Teacher" else keras.Model
        model = kind(inputs, outputs)
        model.compile("sgd", "mse", **options)
    return model


def data(samples=18):
    """The last batch has a sample for each of two ranks, and less for more."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=[samples, WIDTH]).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True)))


def fitted(strategy, name, samples=18, **options):
    """Losses, and the values of all variables."""
    model = made(strategy, name, **options)
    history = model.fit(data(samples).batch(BATCH), epochs=2, verbose=0)
    return history.history["loss"], [np.asarray(v) for v in model.weights]
