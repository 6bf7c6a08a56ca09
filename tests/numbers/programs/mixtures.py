# SPDX-License-Identifier: Apache-2.0
"""Several tasks, and mixtures of experts and of densities."""

import tensorflow as tf

from tests.numbers.programs.guides import descend
from tests.numbers.programs.guides import small
from tests.numbers.registry import program

keras = tf.keras


@program("guide/multi_task_uncertainty")
def multi_task_uncertainty(c):
    """Two tasks, weighted by uncertainties that are trained."""

    class Weighted(keras.Model):
        def train_step(self, data):
            x, (a, b) = data
            with tf.GradientTape() as tape:
                p, q = self(x, training=True)
                first = tf.reduce_mean(tf.square(a - p))
                second = tf.reduce_mean(
                    keras.losses.binary_crossentropy(b, q, True)
                )
                s = tf.convert_to_tensor(self.uncertainty)
                value = tf.exp(-s[0]) * first + tf.exp(-s[1]) * second
                value += tf.reduce_sum(s)
            descend(self, self.optimizer, value, tape)
            return {"loss": value, "first": first, "second": second}

    with c.scope():
        inputs = c.input()
        x = c.dense(8, "tanh")(c.features(inputs))
        model = Weighted(inputs, [c.dense(2)(x), c.dense(1)(x)])
        model.uncertainty = model.add_weight(
            name="uncertainty", shape=(2,), initializer="zeros"
        )
    y = (c.labels(2), c.labels(1, "binary"))
    return c.train(model, c.batched((c.x(), y)), evaluate=False)


@program("guide/mixture_of_experts")
def mixture_of_experts(c):
    """A switch layer with the auxiliary loss of load balance."""

    class Switch(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.router = c.dense(3)
            self.experts = [c.dense(8, "relu") for _ in range(3)]

        def call(self, x):
            gates = tf.nn.softmax(self.router(x))
            chosen = tf.one_hot(tf.argmax(gates, -1), 3)
            load, wish = tf.reduce_mean(chosen, 0), tf.reduce_mean(gates, 0)
            self.add_loss(0.3 * tf.reduce_sum(load * wish))
            each = tf.stack([expert(x) for expert in self.experts], 1)
            return tf.reduce_sum(each * (chosen * gates)[..., None], 1)

    return c.train(c.model(between=Switch), c.data(), "mse", predict=True)


@program("guide/soft_mixture_of_experts")
def soft_mixture(c):
    """Experts mixed by soft gates, without an auxiliary loss."""

    class Mixture(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.gate = c.dense(3, "softmax")
            self.experts = [c.dense(8, "relu") for _ in range(3)]

        def call(self, x):
            each = tf.stack([expert(x) for expert in self.experts], 1)
            return tf.reduce_sum(each * self.gate(x)[..., None], 1)

    return c.train(c.model(between=Mixture), c.data(), "mse")


@program("guide/mixture_density", tables=(False,))
def mixture_density(c):
    """A mixture of Gaussians; its likelihood as a loss."""

    def likelihood(y, p):
        weight, mean, spread = tf.split(p, 3, -1)
        each = -0.5 * tf.square((y - mean) * tf.exp(-spread)) - spread
        return -tf.reduce_logsumexp(tf.nn.log_softmax(weight) + each, -1)

    data = c.batched((c.normal(c.samples, 6), c.labels(1)))
    return c.train(small(c, 6, "tanh"), data, likelihood)
