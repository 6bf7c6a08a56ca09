# SPDX-License-Identifier: Apache-2.0
"""What Keras's loops and its methods for one batch give, by case."""

import numpy as np
import tensorflow as tf
from fit_models import Logs

keras = tf.keras
KERAS_3 = hasattr(keras, "ops")


def data(samples=7, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.random([samples, 3]).astype(np.float32)
    return x, (rng.random([samples, 1]) > 0.5).astype(np.float32)


def scope(strategy):
    return strategy.scope() if strategy else tf.init_scope()


def classifier(strategy, reduction="sum_over_batch_size", **options):
    with scope(strategy):
        model = keras.Sequential(
            [
                keras.layers.Dense(
                    1,
                    activation="sigmoid",
                    kernel_initializer=keras.initializers.Constant(0.3),
                )
            ]
        )
        model.compile(
            keras.optimizers.SGD(0.5),
            keras.losses.BinaryCrossentropy(reduction=reduction),
            metrics=[
                "accuracy",
                keras.metrics.TruePositives(name="positives"),
                keras.metrics.AUC(name="auc"),
            ],
            **options,
        )
    return model


def weights_of(model):
    return [np.array(weight) for weight in model.get_weights()]


def on_batch(strategy, folder, reduction):
    model = classifier(strategy, reduction)
    x, y = data()
    weights = np.arange(7.0)
    return [
        model.train_on_batch(x, y),
        model.train_on_batch(x[:1], y[:1], return_dict=True),
        model.train_on_batch(x[:4], y[:4], sample_weight=weights[:4]),
        model.train_on_batch(x, y, class_weight={0: 1.0, 1: 3.0}),
        model.test_on_batch(x, y),
        model.test_on_batch(x[:2], y[:2], weights[:2], return_dict=True),
        model.predict_on_batch(x),
        model.predict_on_batch(tf.constant(x[:1])),
        [np.array(metric.result()) for metric in _metrics(model)],
        weights_of(model),
    ]


def _metrics(model):
    if not KERAS_3:
        return model.metrics
    return model.get_metrics_result().values() and [
        _Value(value) for value in model.get_metrics_result().values()
    ]


class _Value:
    """A number with the method that a metric has."""

    def __init__(self, value):
        self.result = lambda: value


def logs_of_batches(strategy, folder):
    model, logs = classifier(strategy), Logs()
    x, y = data()
    model.fit(
        *(x, y),
        batch_size=3,
        shuffle=False,
        verbose=0,
        callbacks=[logs],
        validation_data=(x, y),
        validation_batch_size=3,
    )
    return logs.seen


class Counts(keras.Model):
    """Returns integers of all kinds from its step."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        pairs = zip(gradients, self.trainable_variables, strict=True)
        self.optimizer.apply_gradients(pairs)
        return {
            "samples": tf.shape(x)[0],
            "samples64": tf.cast(tf.shape(x)[0], tf.int64),
            "constant": tf.constant(50),
            "positives": tf.reduce_sum(tf.cast(y > 0.5, tf.int32)),
            "steps": self.optimizer.iterations + 0,
            "largest": tf.reduce_max(tf.cast(10 * y, tf.int32)),
            "any": tf.reduce_any(y > 0.5),
        }


def integers(strategy, folder, drop):
    with scope(strategy):
        model = Counts()
        model.compile(keras.optimizers.SGD(0.1))
    dataset = tf.data.Dataset.from_tensor_slices(data(10))
    logs = Logs()
    model.fit(
        dataset.batch(4, drop_remainder=drop), verbose=0, callbacks=[logs]
    )
    return logs.seen


def mean_of_integers(strategy, folder):
    """What a step of Keras's loops, and one of the user's, make of a mean."""

    class Reducing(Counts):
        def train_step(self, data):
            context = tf.distribute.get_replica_context()
            return {"mean": context.all_reduce("MEAN", tf.constant(5))}

    with scope(strategy):
        model = Reducing()
        model.compile(keras.optimizers.SGD(0.1))
    dataset = tf.data.Dataset.from_tensor_slices(data(5)).batch(5)
    logs = model.fit(dataset, verbose=0).history
    return float(np.array(logs["mean"][0]))


def eager_steps(strategy, folder, reduction):
    """Batches that leave ranks without samples."""
    model = classifier(strategy, reduction, run_eagerly=True)
    x, y = data(5)
    arguments = {"batch_size": 2, "verbose": 0}
    history = model.fit(x, y, shuffle=False, **arguments).history
    return [
        history,
        model.evaluate(x, y, **arguments),
        model.predict(x, **arguments),
        weights_of(model),
    ]


OUTPUTS = {
    "kernel": lambda y, dense: (y, dense.kernel + 0.0),
    "scalar": lambda y, _: (y, tf.reduce_mean(y)),
    "vector": lambda y, _: (y, tf.reduce_mean(y, 0)),
    "string": lambda y, _: tf.as_string(y, precision=3),
    "ragged": lambda y, _: tf.RaggedTensor.from_tensor(tf.round(y), padding=2),
    "sparse": lambda y, _: tf.sparse.from_dense(tf.nn.relu(y - 1.8)),
    "boolean": lambda y, _: y > 1.8,
    "integer": lambda y, _: tf.argmax(y, -1),
    "half": lambda y, _: tf.cast(y, tf.float16),
    "transposed": lambda y, _: tf.transpose(y),
}


class Outputs(keras.Model):
    """Predicts something of a kind."""

    def __init__(self, kind):
        super().__init__()
        self.dense = keras.layers.Dense(2, kernel_initializer="ones")
        self.kind = kind

    def call(self, x):
        return OUTPUTS[self.kind](self.dense(x), self.dense)


def predictions(strategy, folder, kind, one_batch):
    with scope(strategy):
        model = Outputs(kind)
        model.compile()
    x, _ = data(5)
    if one_batch:
        found = model.predict_on_batch(x)
    else:
        found = model.predict(x, batch_size=2, verbose=0)
    flat = tf.nest.flatten(found, expand_composites=True)
    return [np.array(part).tolist() for part in flat]


class Triples(keras.Model):
    """The siamese network of keras.io: only its step can call it."""

    def __init__(self, network):
        super().__init__()
        self.network = network
        self.tracker = keras.metrics.Mean(name="loss")

    def call(self, inputs):
        return self.network(inputs)

    def loss_of(self, data):
        near, far = self.network(data)
        return tf.reduce_mean(tf.maximum(near - far + 0.5, 0.0))

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(data)
        variables = self.network.trainable_weights
        pairs = zip(tape.gradient(loss, variables), variables, strict=True)
        self.optimizer.apply_gradients(pairs)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}

    def test_step(self, data):
        self.tracker.update_state(self.loss_of(data))
        return {"loss": self.tracker.result()}

    @property
    def metrics(self):
        return [self.tracker]


def distances(values):
    anchor, positive, negative = values
    return (
        tf.reduce_sum((anchor - positive) ** 2, -1),
        tf.reduce_sum((anchor - negative) ** 2, -1),
    )


def triples(strategy, folder):
    with scope(strategy):
        inputs = [keras.Input((3,), name=name) for name in "apn"]
        dense = keras.layers.Dense(2, kernel_initializer="ones")
        distance = keras.layers.Lambda(
            distances, output_shape=[(None,), (None,)]
        )
        network = keras.Model(inputs, distance([dense(i) for i in inputs]))
        model = Triples(network)
        model.compile(keras.optimizers.SGD(0.1), weighted_metrics=[])
    values = tuple(data(10, seed)[0] for seed in range(3))
    dataset = tf.data.Dataset.from_tensor_slices(values).batch(4)
    history = model.fit(
        dataset, epochs=2, validation_data=dataset, verbose=0
    ).history
    return [history, weights_of(network)]


def regressor(strategy):
    with scope(strategy):
        model = keras.Sequential(
            [keras.layers.Dense(1, kernel_initializer="ones")]
        )
        model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def arrays_after_draws(strategy, folder, kind):
    """Ranks have drawn other numbers, or set other seeds, before."""
    x, y = data(20)
    model = regressor(strategy)
    tf.random.set_seed(3)
    for _ in range(1 + 2 * (strategy.rank if strategy else 0)):
        tf.random.uniform([])
    if kind == "seed" and strategy:
        tf.random.set_seed(3 + strategy.rank)
    before = tf.random.get_global_generator() is not None
    if kind == "ragged":
        x = tf.RaggedTensor.from_tensor(x)
        model = regressor_of_ragged(strategy)
    history = model.fit(x, y, batch_size=4, epochs=2, verbose=0).history
    assert before
    return history["loss"]


def regressor_of_ragged(strategy):
    with scope(strategy):
        inputs = keras.Input((None,), ragged=True)
        mean = keras.layers.Lambda(lambda v: tf.reduce_sum(v, 1)[:, tf.newaxis])
        model = keras.Model(inputs, keras.layers.Dense(1)(mean(inputs)))
        model.compile(keras.optimizers.SGD(0.1), "mse")
    return model
