# SPDX-License-Identifier: Apache-2.0
"""Where metrics are made and how they are updated."""

import tensorflow as tf

import tfdist_ext
from tests.numbers.registry import REFUSED
from tests.numbers.registry import program
from tests.numbers.stepping import stepped

keras = tf.keras
HERE = keras.metrics.Mean(name="tracked")


def loss(y, p):
    return tf.reduce_mean(tf.square(y - p))


def tracking(c, make, update, name="tracked"):
    """Trains by a step that updates a metric of its own.

    Args:
        c: the context.
        make: makes the metric, in the scope.
        update: is called with the metric, labels, predictions, the loss.
        name: of the metric; the step returns its result as "tracked".
    """
    with c.scope():
        tracker = make(name=name)

    class Own(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                p = self(x, training=True)
                value = loss(y, p)
            v = self.trainable_variables
            g = tape.gradient(value, v)
            self.optimizer.apply_gradients(zip(g, v, strict=True))
            update(tracker, y, p, value)
            return {"tracked": tracker.result()}

        @property
        def metrics(self):
            return [tracker]

    return c.train(c.model(kind=Own), c.data(), evaluate=False)


@program("metric/step/mean_of_loss")
def mean_of_loss(c):
    """A `Mean` of the loss."""
    return tracking(c, keras.metrics.Mean, lambda m, y, p, v: m.update_state(v))


@program("metric/step/other_name")
def other_name(c):
    """A `Mean` that is returned by another name than its own."""
    return tracking(
        c,
        keras.metrics.Mean,
        lambda m, y, p, v: m.update_state(v),
        name="total",
    )


@program("metric/step/mean_of_samples")
def mean_of_samples(c):
    """A `Mean` of a number for each sample."""
    return tracking(
        c,
        keras.metrics.Mean,
        lambda m, y, p, v: m.update_state(tf.reduce_mean(p, -1)),
    )


@program("metric/step/mean_weighted")
def mean_weighted(c):
    """A `Mean` of the loss, weighted by the samples."""
    return tracking(
        c,
        keras.metrics.Mean,
        lambda m, y, p, v: m.update_state(
            v, sample_weight=tf.cast(tf.shape(y)[0], tf.float32)
        ),
    )


@program("metric/step/sum_of_samples")
def sum_of_samples(c):
    """A `Sum` of a number for each sample."""
    return tracking(
        c,
        keras.metrics.Sum,
        lambda m, y, p, v: m.update_state(tf.reduce_sum(p, -1)),
    )


@program("metric/step/sum_of_loss")
def sum_of_loss(c):
    """A `Sum` of the loss of each batch."""
    return tracking(c, keras.metrics.Sum, lambda m, y, p, v: m.update_state(v))


@program("metric/step/mean_of_root")
def mean_of_root(c):
    """A `Mean` of the root of each batch's error."""
    return tracking(
        c,
        keras.metrics.Mean,
        lambda m, y, p, v: m.update_state(tf.sqrt(v)),
    )


@program("metric/step/sum_of_gathered")
def sum_of_gathered(c):
    """A `Sum` of what `gather_batch` returns."""
    gather = tfdist_ext.losses.gather_batch
    return tracking(
        c, keras.metrics.Sum, lambda m, y, p, v: m.update_state(gather(p))
    )


@program("metric/step/count_of_gathered")
def count_of_gathered(c):
    """`TruePositives` of what `gather_batch` returns, with weights."""

    def update(metric, y, p, value):
        y, p = tfdist_ext.losses.gather_batch((y, p))
        metric.update_state(y > 0, tf.sigmoid(p), sample_weight=p[:, 0] ** 2)

    return tracking(c, keras.metrics.TruePositives, update)


@program("metric/step/auc")
def auc(c):
    """An `AUC` that the step updates."""
    return tracking(
        c,
        keras.metrics.AUC,
        lambda m, y, p, v: m.update_state(y > 0, tf.sigmoid(p)),
    )


@program("metric/step/constant")
def constant(c):
    """A `Mean` of a number that the data has no part in."""
    return tracking(
        c, keras.metrics.Mean, lambda m, y, p, v: m.update_state(3.0)
    )


@program("metric/step/integer_logs")
def integer_logs(c):
    """Integers that the step returns."""

    def logs(value, gradients):
        return {"number": tf.constant(5), "gradients": len(gradients)}

    return stepped(c, loss, logs=logs)


@program("metric/step/samples_in_logs")
def samples_in_logs(c):
    """The step returns the number of its samples."""

    class Own(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                value = loss(y, self(x, training=True))
            v = self.trainable_variables
            g = tape.gradient(value, v)
            self.optimizer.apply_gradients(zip(g, v, strict=True))
            return {"samples": tf.shape(y)[0], "loss": value}

    return c.train(c.model(kind=Own), c.data(), evaluate=False)


@program("metric/outside_of_scope/module")
def module_level(c):
    """A tracker that is made when its module is imported."""
    HERE.reset_state()
    return _with_tracker(c, HERE)


@program("metric/outside_of_scope/function")
def outside_of_scope(c):
    """A tracker that is made before the scope is entered."""
    return _with_tracker(c, keras.metrics.Mean(name="tracked"))


def _with_tracker(c, tracker):
    class Own(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                value = loss(y, self(x, training=True))
            v = self.trainable_variables
            g = tape.gradient(value, v)
            self.optimizer.apply_gradients(zip(g, v, strict=True))
            tracker.update_state(value)
            return {"tracked": tracker.result()}

        @property
        def metrics(self):
            return [tracker]

    return c.train(c.model(kind=Own), c.data(), evaluate=False)


@program("metric/outside_of_scope/compiled", kerases=(3,))
@program(
    "metric/outside_of_scope/compiled_of_tf_keras",
    REFUSED,
    kerases=(2,),
    says="created in the same distribution strategy scope",
    alone=REFUSED,
)
def compiled_outside(c):
    """`compile` is given metrics made outside of the scope."""
    made = [keras.metrics.MeanAbsoluteError(name="outside")]
    return c.train(c.model(), c.data(), "mse", metrics=lambda: made)


@program("metric/outside_of_scope/compile", kerases=(3,))
@program(
    "metric/outside_of_scope/compile_of_tf_keras",
    REFUSED,
    kerases=(2,),
    says="created in the same distribution strategy scope",
    alone=REFUSED,
)
def compile_outside(c):
    """`compile` is called outside of the scope, the optimizer made inside."""
    model = c.model()
    with c.scope():
        optimizer = keras.optimizers.SGD(0.1)
    model.compile(optimizer, "mse", metrics=["mae", keras.metrics.AUC()])
    data = c.data(kind="binary")
    history = model.fit(data, verbose=0).history
    found = {f"fit/{k}": v for k, v in history.items()}
    return found | c.evaluated(model, data) | c.weights(model)


@program("metric/add_metric", kerases=(2,))
def add_metric(c):
    """`add_metric` of a functional model."""
    model = c.model()
    with c.scope():
        model.add_metric(tf.reduce_mean(model.output), name="mean_output")
    return c.train(model, c.data(), "mse")


# Strategies of tf_keras refuse to update a metric where a model is built.
@program("metric/in_layer", kerases=(3,))
def in_layer(c):
    """A layer has a metric that it updates in `call`."""

    class Layer(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.seen = keras.metrics.Mean(name="seen")

        def call(self, x):
            self.seen.update_state(tf.reduce_mean(tf.abs(x), -1))
            return x

    return c.train(c.model(between=Layer), c.data(), "mse")
