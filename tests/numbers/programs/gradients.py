# SPDX-License-Identifier: Apache-2.0
"""Gradients that a `train_step` looks at or changes before it applies them."""

import tensorflow as tf

from tests.numbers.registry import EQUAL
from tests.numbers.registry import program
from tests.numbers.stepping import stepped

keras = tf.keras


def loss(y, p):
    return tf.reduce_mean(tf.square(y - p))


def processed(name, about, verdict=EQUAL, **how):
    """Registers a program that changes gradients by the function."""

    def register(process):
        def run(c):
            # Of repeated ids one process takes the norm of each by itself,
            # this package's layers that of their sum, on one rank too.
            c.distinct = True
            return stepped(
                c, loss, lambda gradients, v: process(list(gradients))
            )

        run.__doc__ = about
        program(f"gradient/{name}", verdict, **how)(run)
        return process

    return register


def dense(gradients):
    return [tf.convert_to_tensor(each) for each in gradients]


@processed("clip_by_global_norm", "`tf.clip_by_global_norm`.")
def clip_by_global_norm(gradients):
    return tf.clip_by_global_norm(gradients, 0.1)[0]


@processed("clip_by_norm", "`tf.clip_by_norm` of each gradient.")
def clip_by_norm(gradients):
    return [tf.clip_by_norm(each, 0.05) for each in gradients]


@processed("clip_by_value", "`tf.clip_by_value`.", tables=(False,))
def clip_by_value(gradients):
    return [tf.clip_by_value(each, -0.01, 0.01) for each in gradients]


@processed("sign", "Sign descent.", tables=(False,))
def sign(gradients):
    return [0.01 * tf.sign(each) for each in gradients]


@processed("normalised", "Gradients of norm one.", tables=(False,))
def normalised(gradients):
    return [each / (tf.norm(each) + 1e-3) for each in gradients]


@processed("centralised", "Gradients without their mean.", tables=(False,))
def centralised(gradients):
    return [each - tf.reduce_mean(each) for each in gradients]


@processed("scaled", "Half of each gradient.", tables=(False,))
def scaled(gradients):
    return [0.5 * each for each in gradients]


@processed("finite_only", "Gradients that are finite.", tables=(False,))
def finite_only(gradients):
    return [
        tf.where(tf.math.is_finite(each), each, 0.0 * each)
        for each in gradients
    ]


@processed("sparsified", "The largest elements only.", tables=(False,))
def sparsified(gradients):
    return [
        tf.where(tf.abs(g) >= 0.5 * tf.reduce_max(tf.abs(g)), g, 0.0 * g)
        for g in gradients
    ]


@processed("softened", "`tanh` of each gradient.", tables=(False,))
def softened(gradients):
    return [tf.tanh(20 * each) / 20 for each in gradients]


@program("gradient/adaptive_clipping", tables=(False,))
def adaptive_clipping(c):
    """Gradients are clipped by the norm of their variables."""

    def process(gradients, variables):
        return [
            g * tf.minimum(1.0, 0.02 * tf.norm(v) / (tf.norm(g) + 1e-6))
            for g, v in zip(gradients, variables, strict=True)
        ]

    return stepped(c, loss, process)


@program("gradient/norm_in_logs")
def norm_in_logs(c):
    """The global norm of the gradients is returned."""
    c.distinct = True

    def logs(_, gradients):
        return {"norm": tf.linalg.global_norm(gradients)}

    return stepped(c, loss, logs=logs)


@program("gradient/largest_in_logs", tables=(False,))
def largest_in_logs(c):
    """The largest element of the gradients is returned."""

    def logs(_, gradients):
        flat = tf.concat([tf.reshape(g, [-1]) for g in gradients], 0)
        return {"largest": tf.reduce_max(tf.abs(flat))}

    return stepped(c, loss, logs=logs)


@program("gradient/sum_clipped_by_norm")
def sum_clipped_by_norm(c):
    """A loss that is a sum, with clipping by hand."""
    c.distinct = True

    def total(y, p):
        return tf.reduce_sum(tf.square(y - p))

    def process(gradients, variables):
        return tf.clip_by_global_norm(gradients, 0.3)[0]

    return stepped(c, total, process)


@program("gradient/two_losses_combined", tables=(False,))
def two_losses_combined(c):
    """Gradients of two losses, one made orthogonal to the other."""

    class Own(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape(persistent=True) as tape:
                p = self(x, training=True)
                first = tf.reduce_mean(tf.square(y - p))
                second = tf.reduce_mean(tf.abs(p))
            v = self.trainable_variables
            a, b = (tape.gradient(each, v) for each in (first, second))
            changed = []
            for g, h in zip(a, b, strict=True):
                dot = tf.reduce_sum(g * h)
                part = tf.minimum(dot, 0.0) / (tf.reduce_sum(h * h) + 1e-6)
                changed.append(g + h - part * h)
            self.optimizer.apply_gradients(zip(changed, v, strict=True))
            return {"first": first, "second": second}

    return c.train(c.model(kind=Own), c.data(), evaluate=False)


@program("gradient/sam", tables=(False,))
def sam(c):
    """Sharpness-aware minimization: a step uphill, then down from there."""

    class Own(keras.Model):
        def train_step(self, data):
            x, y = data
            v = self.trainable_variables
            with tf.GradientTape() as tape:
                value = tf.reduce_mean(tf.square(y - self(x, training=True)))
            g = tape.gradient(value, v)
            norm = tf.linalg.global_norm(g) + 1e-12
            steps = [0.5 * each / norm for each in g]
            for each, by in zip(v, steps, strict=True):
                each.assign_add(by)
            with tf.GradientTape() as tape:
                there = tf.reduce_mean(tf.square(y - self(x, training=True)))
            g = tape.gradient(there, v)
            for each, by in zip(v, steps, strict=True):
                each.assign_sub(by)
            self.optimizer.apply_gradients(zip(g, v, strict=True))
            return {"loss": value}

    return c.train(c.model(kind=Own), c.data(), evaluate=False)


@program("gradient/output_gradients")
def output_gradients(c):
    """`tape.gradient` of an inner tensor with `output_gradients`."""

    class Own(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                p = self(x, training=True)
            by = 2.0 * (p - y) / tf.cast(tf.maximum(tf.size(y), 1), p.dtype)
            v = self.trainable_variables
            g = tape.gradient(p, v, output_gradients=by)
            self.optimizer.apply_gradients(zip(g, v, strict=True))
            return {"loss": tf.reduce_mean(tf.square(p - y))}

    return c.train(c.model(kind=Own), c.data(), evaluate=False)


@program("gradient/variables_and_tensors", tables=(False,))
def variables_and_tensors(c):
    """Sources that mix variables and tensors."""

    class Own(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                tape.watch(x)
                value = tf.reduce_mean(tf.square(y - self(x, training=True)))
            v = self.trainable_variables
            *g, by_input = tape.gradient(value, [*v, x])
            self.optimizer.apply_gradients(zip(g, v, strict=True))
            return {"loss": value, "input": tf.reduce_sum(tf.abs(by_input))}

    return c.train(c.model(kind=Own), c.data(), evaluate=False)


@program("gradient/fourth_argument")
def fourth_argument(c):
    """`tape.gradient` with `unconnected_gradients` by position."""

    class Own(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                value = tf.reduce_mean(tf.square(y - self(x, training=True)))
            v = self.trainable_variables
            g = tape.gradient(value, v, None, "zero")
            self.optimizer.apply_gradients(zip(g, v, strict=True))
            return {"loss": value}

    return c.train(c.model(kind=Own), c.data(), evaluate=False)


@program("gradient/penalty_on_input", tables=(False,))
def penalty_on_input(c):
    """A penalty on the gradient by the inputs, as in WGAN-GP."""

    class Own(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    p = self(x, training=True)
                slope = inner.gradient(p, x)
                norm = tf.sqrt(tf.reduce_sum(slope * slope, -1) + 1e-6)
                penalty = tf.reduce_mean((norm - 1.0) ** 2)
                value = tf.reduce_mean(tf.square(y - p)) + 0.1 * penalty
            v = self.trainable_variables
            g = tape.gradient(value, v)
            self.optimizer.apply_gradients(zip(g, v, strict=True))
            return {"loss": value, "penalty": penalty}

    return c.train(c.model(kind=Own), c.data(), evaluate=False)


@program("gradient/penalty_on_weights", tables=(False,))
def penalty_on_weights(c):
    """A penalty on the norm of the gradient by the weights."""

    class Own(keras.Model):
        def train_step(self, data):
            x, y = data
            v = self.trainable_variables
            with tf.GradientTape() as tape:
                with tf.GradientTape() as inner:
                    p = self(x, training=True)
                    value = tf.reduce_mean(tf.square(y - p))
                g = inner.gradient(value, v)
                norm = tf.add_n([tf.reduce_sum(each**2) for each in g])
                both = value + 0.1 * norm
            g = tape.gradient(both, v, unconnected_gradients="zero")
            self.optimizer.apply_gradients(zip(g, v, strict=True))
            return {"loss": value, "norm": norm}

    return c.train(c.model(kind=Own), c.data(), evaluate=False)


@program("gradient/accumulated_by_hand", tables=(False,))
def accumulated_by_hand(c):
    """The gradients of two halves of the features are added."""

    class Own(keras.Model):
        def train_step(self, data):
            x, y = data
            v = self.trainable_variables
            total = None
            for column in range(2):
                with tf.GradientTape() as tape:
                    p = self(x, training=True)[:, column]
                    value = tf.reduce_mean(tf.square(y[:, column] - p))
                g = tape.gradient(value, v)
                total = (
                    g
                    if total is None
                    else [a + b for a, b in zip(total, g, strict=True)]
                )
            self.optimizer.apply_gradients(zip(total, v, strict=True))
            return {"loss": value}

    return c.train(c.model(kind=Own), c.data(), evaluate=False)
