# SPDX-License-Identifier: Apache-2.0
"""Models of several sparse layers that nobody told to share an exchange."""

import contextlib

import numpy as np
import tensorflow as tf

import tfdist_ext
from tfdist_ext.keras_internals import KERAS_3
from tfdist_ext.layers import DistributedEmbedding
from tfdist_ext.layers import FeatureConfig
from tfdist_ext.layers import FullSparse
from tfdist_ext.layers import TableConfig

keras = tf.keras
ROWS = {"a": 50, "b": 40, "c": 30}
WIDTHS = {"a": 2, "b": 4, "c": 3}


def data(samples=25):
    """With batches of 6 the last one has one sample, so ranks have none."""
    rng = np.random.default_rng(0)
    ids = {k: rng.integers(0, n, [samples, 3]) for k, n in ROWS.items()}
    return ids, rng.normal(size=[samples, 1]).astype(np.float32)


def sparse(name, **options):
    kernel = keras.initializers.RandomUniform(-0.1, 0.1, seed=7)
    options = {"sharding": "row", "kernel_initializer": kernel, **options}
    return FullSparse(
        WIDTHS[name], ROWS[name], name=f"sparse_{name}", **options
    )


def dense():
    return keras.layers.Dense(1, kernel_initializer="ones", name="dense")


def inputs():
    return {k: keras.Input([3], dtype="int64", name=k) for k in ROWS}


def functional(**options):
    ids = inputs()
    found = [sparse(k, **options.get(k, {}))(ids[k]) for k in ROWS]
    return keras.Model(ids, dense()(keras.layers.Concatenate()(found)))


def other_wire():
    """One layer's numbers are rounded on their way: it travels by itself."""
    return functional(a={"wire_dtype": "bfloat16"})


def sequential():
    """The sparse layers are in a layer of the user's."""

    class Wide(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner = {k: sparse(k) for k in ROWS}
            for name, layer in self.inner.items():
                setattr(self, name, layer)

        def call(self, ids):
            return tf.concat([self.inner[k](ids[k]) for k in ROWS], 1)

    return keras.Sequential([Wide(), dense()])


class Subclassed(keras.Model):
    """Keeps tensors of its call in a list, as for a loss to read."""

    def __init__(self, **options):
        super().__init__()
        self.a, self.b, self.c = (sparse(k, **options) for k in ROWS)
        self.dense = dense()
        self.drop = keras.layers.Dropout(0.0)
        self.seen = []

    def call(self, ids, training=False):
        first = self.a(ids["a"])
        self.seen.append(first)
        rest = [self.b(ids["b"]), self.c(ids["c"])]
        return self.dense(
            self.drop(tf.concat([first, *rest], 1), training=training)
        )

    def train_step(self, data):
        x, y = data
        self.seen.clear()
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            kept = tf.add_n([tf.reduce_mean(tf.square(t)) for t in self.seen])
            loss = self.compute_loss(x, y, predicted) + 0.1 * kept
        variables = self.trainable_variables
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return {"total": loss}


class Dependent(Subclassed):
    """Ids of one lookup come from another's result, so it comes later."""

    def call(self, ids, training=False):
        first = self.a(ids["a"])
        shift = tf.cast(first[:, :1] > 0, tf.int64)
        rest = [self.b(ids["b"]), self.c((ids["c"] + shift) % ROWS["c"])]
        return self.dense(tf.concat([first, *rest], 1))

    train_step = keras.Model.train_step


class Twice(Dependent):
    """A layer that is called twice, on ids that layers of Keras have made."""

    def __init__(self):
        super().__init__()
        self.hashing = keras.layers.Hashing(ROWS["c"])
        self.table = keras.layers.IntegerLookup(
            vocabulary=list(range(ROWS["b"] - 1))
        )

    def call(self, ids, training=False):
        found = [
            self.a(ids["a"]),
            self.b(self.table(ids["b"])),
            self.c(ids["c"]),
            self.c(tf.cast(self.hashing(ids["a"]), tf.int64)),
        ]
        return self.dense(tf.concat(found, 1))


class Composite(Dependent):
    """Ragged and weighted inputs, and several tables of one layer."""

    def __init__(self):
        super().__init__()
        initializer = keras.initializers.RandomUniform(-0.1, 0.1, seed=8)
        table = TableConfig(
            "t", 50, 4, initializer, combiner="mean", placement="row_wise"
        )
        self.tables = DistributedEmbedding(
            {
                "a": FeatureConfig("a", table, (None, 3), (None, 4)),
                "b": FeatureConfig("b", table, (None, 3), (None, 4)),
            }
        )

    def call(self, ids, training=False):
        found = self.tables({"a": ids["a"], "b": ids["b"]})
        ragged = tf.RaggedTensor.from_tensor(ids["b"], padding=3)
        matrix = tf.sparse.from_dense(
            tf.one_hot(ids["c"][:, 0], ROWS["c"]) * 0.5
        )
        rest = [self.b(ragged), self.c(matrix)]
        return self.dense(tf.concat([*found.values(), *rest], 1))


class Nested(Dependent):
    """Lookups within a tf.function of the user's."""

    def __init__(self, **options):
        super().__init__(**options)
        for layer in (self.a, self.b, self.c):
            layer.build((None, 3))

    @tf.function
    def inner(self, ids):
        return tf.concat([self.a(ids["a"]), self.b(ids["b"])], 1)

    def call(self, ids, training=False):
        return self.dense(tf.concat([self.inner(ids), self.c(ids["c"])], 1))


MODELS = {
    "functional": functional,
    "other_wire": other_wire,
    "sequential": sequential,
    "subclassed": Subclassed,
    "dependent": Dependent,
    "twice": Twice,
    "composite": Composite,
}


def asked_for_data(strategy):
    """How often ranks have asked each other for the end of their data."""
    labels = strategy.statistics().get("labels", {})
    return sum(n[0] for k, n in labels.items() if k.endswith("/has_data"))


def train(strategy, folder, kind):
    """Losses, predictions, and the exchanges of a step in their order."""
    del folder
    exchanges = []

    def loss(labels, predicted):
        step = strategy.collectives.step if strategy.collectives else None
        if step is not None:
            exchanges.append([line.split("#")[0] for line in step.exchanges])
        return tf.reduce_mean(tf.square(labels - predicted), -1)

    with strategy.scope():
        model = MODELS[kind]()
        optimizer = tfdist_ext.optimizers.Adagrad(0.1)
        model.compile(optimizer=optimizer, loss=loss)
    x, y = data()
    asked = asked_for_data(strategy)
    history = model.fit(
        x, y, batch_size=6, epochs=2, shuffle=False, verbose=0
    ).history
    # Keras 3 logs its own tracker as the loss, which some steps do not use.
    losses = history["total" if kind == "subclassed" else "loss"]
    assert min(losses) > 0
    predicted = model.predict(x, batch_size=6, verbose=0)
    evaluated = model.evaluate(x, y, batch_size=6, verbose=0)
    if KERAS_3 and strategy.collectives:
        # Arrays have a length, and the last batch's size is not traced for.
        assert asked_for_data(strategy) == asked
        assert model.predict_function.experimental_get_tracing_count() == 1
    return losses, evaluated, predicted.tolist(), exchanges


def error_of_a_function(strategy, folder):
    """What `fit` raises for lookups in a tf.function of the user's."""
    del folder
    with strategy.scope():
        model = Nested()
        model.compile(optimizer=tfdist_ext.optimizers.SGD(0.1), loss="mse")
    try:
        model.fit(*data(24), batch_size=6, verbose=0)
    except ValueError as error:
        return str(error)


def plan_after_a_failed_capture(strategy, folder):
    """The plan of a layer that a tf.function of the user's calls."""
    del folder
    with strategy.scope():
        model = Nested(sharding="auto")
        model.compile(optimizer=tfdist_ext.optimizers.SGD(0.1), loss="mse")
    x, _ = data(24)
    model.predict(x, batch_size=6, verbose=0)
    return model.c.plan.summary()


def loop_of_ones_own(strategy, folder):
    """The exchanges of a step in a loop that is not Keras's."""
    del folder
    exchanges = []
    with strategy.scope():
        model = functional()
    x, _ = data(8)

    def step(ids):
        model(ids)
        exchanges.extend(strategy.collectives.step.exchanges)

    dataset = tf.data.Dataset.from_tensor_slices(x).batch(8)
    for batch in strategy.experimental_distribute_dataset(dataset):
        tf.function(strategy.run)(step, (batch,))
    return exchanges


def error_of_the_call(strategy, folder):
    """What `fit` raises if the model's call does, and how often it ran."""
    del folder
    calls = []

    class Wrong(Dependent):
        def call(self, ids, training=False):
            self.a(ids["a"]), self.b(ids["b"])
            if not tf.executing_eagerly() and training:
                calls.append(1)
                raise ValueError("the user's own")
            return self.dense(self.a(ids["a"]))

    with strategy.scope():
        model = Wrong()
        model.compile(optimizer=tfdist_ext.optimizers.SGD(0.1), loss="mse")
    x, y = data()
    with contextlib.suppress(ValueError):
        model.fit(x, y, batch_size=6, verbose=0)
        return "no error"
    return "an error"
