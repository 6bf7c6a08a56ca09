# SPDX-License-Identifier: Apache-2.0
"""What `fit`, `evaluate` and `predict` are asked, and steps by hand."""

import numpy as np
import tensorflow as tf

from tests.numbers.registry import program

keras = tf.keras
KERAS_3 = hasattr(keras, "ops")


def metrics():
    return ["mae", keras.metrics.AUC(name="auc")]


def usual(c, kind="numbers", **how):
    return c.train(c.model(), c.data(kind=kind), "mse", **how)


def compiled(c, model=None, **how):
    """A compiled model."""
    model = model or c.model()
    with c.scope():
        if KERAS_3:
            how.setdefault("jit_compile", False)
        model.compile(
            keras.optimizers.SGD(0.1),
            how.pop("loss", "mse"),
            metrics=how.pop("metrics", metrics)(),
            **how,
        )
    return model


def with_logs(logs, name):
    return {f"{name}/{k}": v for k, v in logs.items()}


@program("loop/epochs")
def epochs(c):
    """Three epochs with metrics."""
    return usual(c, "binary", metrics=metrics, fit={"epochs": 3})


@program("loop/initial_epoch")
def initial_epoch(c):
    """`initial_epoch` skips epochs."""
    return usual(c, fit={"epochs": 3, "initial_epoch": 1})


@program("loop/validation")
def validation(c):
    """`validation_data` and `validation_freq`."""
    how = {"validation_data": c.data(kind="binary"), "validation_freq": 2}
    return usual(c, "binary", metrics=metrics, fit={"epochs": 4, **how})


@program("loop/validation_steps")
def validation_steps(c):
    """`validation_steps` ends validation early."""
    how = {"validation_data": c.data(), "validation_steps": 1}
    return usual(c, metrics=lambda: ["mae"], fit={"epochs": 2, **how})


@program("loop/validation_split")
def validation_split(c):
    """Arrays of which a part validates."""
    model = compiled(c)
    history = model.fit(
        c.x(),
        c.labels(kind="binary"),
        batch_size=5,
        epochs=2,
        validation_split=0.25,
        shuffle=False,
        verbose=0,
    )
    return with_logs(history.history, "fit") | c.weights(model)


@program("loop/steps_per_epoch")
def steps_per_epoch(c):
    """`steps_per_epoch` of a repeated dataset."""
    data = c.data().repeat()
    model = c.model()
    fit = {"steps_per_epoch": 3, "epochs": 2}
    return c.train(model, data, "mse", fit=fit, evaluate=False)


@program("loop/steps_per_execution")
def steps_per_execution(c):
    """Two steps of a loop at once."""
    return usual(
        c,
        "binary",
        metrics=metrics,
        predict=True,
        steps_per_execution=2,
        fit={"epochs": 2},
    )


@program("loop/run_eagerly")
def run_eagerly(c):
    """`run_eagerly=True`."""
    return usual(c, "binary", metrics=metrics, predict=True, run_eagerly=True)


@program("loop/arrays")
def arrays(c):
    """Arrays, with weights, in batches of 5."""
    model = compiled(c)
    x, y = c.x(), c.labels(kind="binary")
    w = np.abs(c.normal(c.samples, seed=3))
    history = model.fit(
        x, y, 5, sample_weight=w, epochs=2, shuffle=False, verbose=0
    )
    found = with_logs(history.history, "fit")
    logs = model.evaluate(x, y, 5, verbose=0, return_dict=True)
    predicted = {"predict": model.predict(x, batch_size=5, verbose=0)}
    return found | with_logs(logs, "evaluate") | predicted | c.weights(model)


@program("loop/arrays_weights_of_classes")
def arrays_class_weight(c):
    """Arrays with `class_weight`."""
    model = compiled(
        c,
        c.model(3, "softmax"),
        loss="sparse_categorical_crossentropy",
        metrics=lambda: ["accuracy"],
    )
    history = model.fit(
        c.x(),
        c.labels(3, "classes"),
        batch_size=5,
        class_weight={0: 1.0, 1: 2.0, 2: 0.5},
        shuffle=False,
        verbose=0,
    )
    return with_logs(history.history, "fit") | c.weights(model)


@program("loop/static_batch_with_add_loss")
def static_batch(c):
    """`fit` on arrays, batch 16 and 8 units, with `add_loss` of a mean."""

    class Penalty(keras.layers.Layer):
        def call(self, x):
            self.add_loss(tf.reduce_sum(tf.reduce_mean(tf.square(x), 0)))
            return x

    model = compiled(c, c.model(between=Penalty))
    x = np.concatenate([c.x()[:16]] * 2)
    y = np.concatenate([c.labels(2)[:16]] * 2)
    history = model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    return with_logs(history.history, "fit") | c.weights(model)


@program("loop/shuffled_arrays")
def shuffled_arrays(c):
    """Arrays in an order that a seed fixes."""
    model = compiled(c)
    keras.utils.set_random_seed(3)
    x, y = c.x(), c.labels(kind="binary")
    history = model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    return with_logs(history.history, "fit") | c.weights(model)


@program("loop/generator", batches=("even",))
def generator(c):
    """A Python generator of batches."""
    x, y = c.x(), c.labels()

    def batches():
        for _ in range(4):
            for start in range(0, 16, 8):
                yield x[start : start + 8], y[start : start + 8]

    model = compiled(c)
    history = model.fit(batches(), steps_per_epoch=2, epochs=2, verbose=0)
    return with_logs(history.history, "fit") | c.weights(model)


@program("loop/sequence_of_batches")
def sequence_of_batches(c):
    """A `keras.utils.Sequence`."""
    x, y, edges = c.x(), c.labels(), np.cumsum((0, *c.sizes))

    class Batches(keras.utils.Sequence):
        def __len__(self):
            return len(edges) - 1

        def __getitem__(self, i):
            part = slice(edges[i], edges[i + 1])
            return x[part], y[part]

    model = compiled(c)
    history = model.fit(Batches(), epochs=2, shuffle=False, verbose=0)
    return with_logs(history.history, "fit") | c.weights(model)


@program("loop/train_on_batch")
def train_on_batch(c):
    """`train_on_batch` on the global batch, and what it returns."""
    model = compiled(c)
    x, y, found = c.x(), c.labels(kind="binary"), {}
    for i in range(3):
        logs = model.train_on_batch(x[:9], y[:9], return_dict=True)
        found |= with_logs(logs, f"batch/{i}")
    return found | c.weights(model)


@program("loop/train_on_batch_own_step")
def train_on_batch_own_step(c):
    """`train_on_batch` of a `train_step` of the user's, and then `fit`."""

    class Own(keras.Model):
        def train_step(self, data):
            x, y = data[:2]
            with tf.GradientTape() as tape:
                error = tf.square(y - self(x, training=True))
                loss = tf.sqrt(tf.reduce_mean(error))
            variables = self.trainable_variables
            gradients = tape.gradient(loss, variables)
            pairs = zip(gradients, variables, strict=True)
            self.optimizer.apply_gradients(pairs)
            return {"loss": loss}

    model = c.model(kind=Own)
    with c.scope():
        model.compile(keras.optimizers.SGD(0.1))
    x, y, found = c.x(), c.labels(), {}
    for i in range(2):
        logs = model.train_on_batch(x[:9], y[:9], return_dict=True)
        found |= with_logs(logs, f"batch/{i}")
    history = model.fit(c.data(), epochs=2, verbose=0)
    return found | with_logs(history.history, "fit") | c.weights(model)


@program("loop/train_on_batch_sum")
def train_on_batch_sum(c):
    """`train_on_batch` with the reduction "sum"."""
    loss = keras.losses.MeanSquaredError(reduction="sum")
    model = compiled(c, loss=loss)
    for _ in range(2):
        model.train_on_batch(c.x()[:8], c.labels()[:8] / 4)
    return c.weights(model)


@program("loop/train_on_batch_weighted")
def train_on_batch_weighted(c):
    """`train_on_batch` with sample weights and with class weights."""
    model = compiled(
        c,
        c.model(3, "softmax"),
        loss="sparse_categorical_crossentropy",
        metrics=lambda: ["accuracy"],
    )
    x, y = c.x()[:8], c.labels(3, "classes")[:8]
    w = np.abs(c.normal(8, seed=3))
    logs = model.train_on_batch(x, y, sample_weight=w, return_dict=True)
    other = model.train_on_batch(
        x, y, class_weight={0: 1.0, 1: 2.0, 2: 0.5}, return_dict=True
    )
    found = with_logs(logs, "first") | with_logs(other, "second")
    return found | c.weights(model)


@program("loop/test_on_batch")
def test_on_batch(c):
    """`test_on_batch` with metrics that count."""
    model = compiled(
        c, metrics=lambda: [keras.metrics.TruePositives(name="hits"), "mae"]
    )
    x, y = c.x(), c.labels(kind="binary")
    logs = model.test_on_batch(x[:7], y[:7], return_dict=True)
    return with_logs(logs, "test")


@program("loop/predict_on_batch")
def predict_on_batch(c):
    """`predict_on_batch` gives each sample once, in order."""
    return {"predict": compiled(c).predict_on_batch(c.x()[:7])}


@program("loop/predict_nest")
def predict_nest(c):
    """`predict` of a model with a dictionary of outputs."""
    with c.scope():
        inputs = c.input()
        x = c.dense(8, "tanh")(c.features(inputs))
        model = keras.Model(inputs, {"a": c.dense(2)(x), "b": c.dense(1)(x)})
    found = model.predict(c.data().map(lambda x, y: x), verbose=0)
    return {f"predict/{k}": v for k, v in found.items()}


@program("loop/predict_steps")
def predict_steps(c):
    """`predict` of some steps."""
    data = c.data().map(lambda x, y: x)
    return {"predict": compiled(c).predict(data, steps=2, verbose=0)}


class Unbatched(keras.layers.Layer):
    """The mean of all samples."""

    def call(self, x):
        return tf.reduce_mean(x)


@program(
    "loop/predict_without_batch",
    tables=(False,),
    batches=("even",),
)
def predict_without_batch(c):
    """`predict` of an output without a batch dimension."""

    class Own(keras.Model):
        def call(self, x, training=False):
            return {"each": x, "all": tf.reduce_sum(x, 0)}

    with c.scope():
        model = Own()
    data = c.data().map(lambda x, y: x)
    return {
        f"predict/{k}": v for k, v in model.predict(data, verbose=0).items()
    }


@program("loop/predict_strings", tables=(False,))
def predict_strings(c):
    """`predict` of strings."""

    class Own(keras.Model):
        def predict_step(self, x):
            return tf.strings.as_string(tf.cast(x[:, 0] * 8, tf.int32))

    with c.scope():
        model = Own()
        model.compile()
    data = c.data().map(lambda x, y: x)
    return {"predict": model.predict(data, verbose=0)}


@program("loop/call")
def call(c):
    """A model is called on all samples."""
    return {"call": np.array(compiled(c)(c.x()))}


@program("loop/compile_twice")
def compile_twice(c):
    """A model is compiled anew between two fits."""
    model = c.model()
    first = c.train(model, c.data(), "mse")
    second = c.train(model, c.data(), "mae", metrics=lambda: ["mse"])
    return {f"first/{k}": v for k, v in first.items()} | second


@program("loop/fit_twice")
def fit_twice(c):
    """Two calls of `fit` go on with one optimizer."""
    model = compiled(c)
    data, found = c.data(kind="binary"), {}
    for i in range(2):
        history = model.fit(data, verbose=0).history
        found |= with_logs(history, f"fit/{i}")
    return found | c.weights(model)


@program("loop/evaluate_then_fit")
def evaluate_then_fit(c):
    """`evaluate` before `fit`."""
    model, data = compiled(c), c.data(kind="binary")
    before = with_logs(
        model.evaluate(data, verbose=0, return_dict=True), "before"
    )
    history = model.fit(data, verbose=0).history
    return before | with_logs(history, "fit") | c.weights(model)


def looped(c, step, optimizer, model, passes=2):
    """A loop of the user's own with `strategy.run`, or without."""
    data = c.data()
    if c.strategy is None:
        run = tf.function(step)
    else:
        data = c.strategy.experimental_distribute_dataset(data)

        def distributed(batch):
            each = c.strategy.run(step, (batch,))
            return c.strategy.reduce("sum", each, axis=None)

        run = tf.function(distributed)
    losses = [run(batch) for _ in range(passes) for batch in data]
    return {"losses": np.array(losses)} | c.weights(model)


@program("loop/own_loop")
def own_loop(c):
    """A loop with `strategy.run` that divides by the global batch."""
    model = c.model()
    with c.scope():
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)

    def step(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            each = tf.reduce_mean(tf.square(y - model(x, training=True)), -1)
            value = tf.reduce_sum(each) / 8.0
        v = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(value, v), v, strict=True))
        return value

    return looped(c, step, optimizer, model)
