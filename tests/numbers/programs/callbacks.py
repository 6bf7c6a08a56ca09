# SPDX-License-Identifier: Apache-2.0
"""Callbacks that look at logs and change the training."""

import itertools

import numpy as np
import tensorflow as tf

from tests.numbers.registry import REFUSED
from tests.numbers.registry import program

keras = tf.keras


def watched(name, about, **how):
    """Registers a program with the callbacks that the function makes."""

    def register(make):
        def run(c):
            callbacks = make(c)
            fit = {
                "epochs": 5,
                "callbacks": callbacks,
                "validation_data": c.data(kind="binary"),
            }
            found = c.train(
                c.model(),
                c.data(kind="binary"),
                "mse",
                metrics=lambda: ["mae"],
                fit=fit,
                evaluate=False,
            )
            seen = [v for each in callbacks for v in getattr(each, "seen", [])]
            return found | ({"seen": np.array(seen)} if seen else {})

        run.__doc__ = about
        program(f"callback/{name}", **how)(run)
        return make

    return register


@watched("early_stopping", "`EarlyStopping` with the best weights.")
def early_stopping(c):
    return [
        keras.callbacks.EarlyStopping(
            "val_loss", min_delta=0.02, restore_best_weights=True
        )
    ]


@watched("reduce_rate", "`ReduceLROnPlateau`.")
def reduce_rate(c):
    return [
        keras.callbacks.ReduceLROnPlateau(
            "loss", factor=0.5, patience=1, min_delta=0.05
        )
    ]


@watched("rate_scheduler", "`LearningRateScheduler`.")
def rate_scheduler(c):
    def rate(epoch, rate):
        return 0.1 / (epoch + 1)

    return [keras.callbacks.LearningRateScheduler(rate)]


@watched("lambda", "`LambdaCallback` that keeps logs.")
def lambda_callback(c):
    seen = []
    callback = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(logs["val_mae"])
    )
    callback.seen = seen
    return [callback]


@watched("end_by_logs", "A callback ends the training by its logs.")
def end_by_logs(c):
    class End(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = logs["loss"] < 0.45

    return [End()]


@watched("own_evaluation", "A callback evaluates and predicts.")
def own_evaluation(c):
    class Look(keras.callbacks.Callback):
        seen = ()

        def on_epoch_end(self, epoch, logs=None):
            logs = self.model.evaluate(c.data(), verbose=0, return_dict=True)
            x = c.data().map(lambda x, y: x)
            mean = np.mean(self.model.predict(x, verbose=0))
            self.seen = (*self.seen, logs["loss"], mean)

    return [Look()]


@watched("checkpoint", "`ModelCheckpoint` of the best weights.")
def checkpoint(c):
    # tf_keras cannot write partitioned tables to a file of HDF5.
    name = "best.weights.h5" if hasattr(keras, "ops") else "best"
    path = str(c.folder / name)
    return [
        keras.callbacks.ModelCheckpoint(
            path, "val_loss", save_best_only=True, save_weights_only=True
        )
    ]


@watched("weights_by_hand", "A callback sets dense weights.", tables=(False,))
def weights_by_hand(c):
    class Shrink(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            last = self.model.layers[-1]
            last.set_weights([0.9 * w for w in last.get_weights()])

    return [Shrink()]


@program("callback/ema_weights", kerases=(3,), tables=(False,))
def ema_weights(c):
    """`SwapEMAWeights` evaluates the averages."""
    return c.train(
        c.model(),
        c.data(),
        "mse",
        optimizer=lambda: keras.optimizers.SGD(
            0.1, use_ema=True, ema_momentum=0.5
        ),
        fit={
            "epochs": 3,
            "callbacks": [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)],
            "validation_data": c.data(),
        },
    )


@program("data/dictionary")
def dictionary(c):
    """Dictionaries of inputs."""
    with c.scope():
        a = c.input()
        b = keras.Input([2], name="b")
        x = keras.layers.Concatenate()([c.features(a), b])
        model = keras.Model({"a": a, "b": b}, c.dense(2)(x))
    x = {"a": c.x(), "b": c.normal(c.samples, 2, seed=5)}
    return c.train(model, c.batched((x, c.labels(2))), "mse", predict=True)


@program("data/sparse", tables=(False,))
def sparse(c):
    """Sparse tensors as inputs."""
    with c.scope():
        x = keras.Input([6], sparse=True)
        model = keras.Model(x, c.dense(2)(x))
    data = c.data().map(lambda x, y: (tf.sparse.from_dense(x * 1.0), y))
    return c.train(model, data, "mse")


@program("data/sparse_generator", kerases=(3,), tables=(False,))
def sparse_generator(c):
    """A generator of sparse tensors, whose batches have other sizes."""
    with c.scope():
        x = keras.Input([6], sparse=True)
        model = keras.Model(x, c.dense(2)(x))
        model.compile(keras.optimizers.SGD(0.1), "mse")
    x, y, edges = c.x(), c.labels(), np.cumsum((0, *c.sizes))

    def batches():
        for start, end in itertools.pairwise(edges):
            yield tf.sparse.from_dense(x[start:end]), y[start:end]

    history = model.fit(batches(), verbose=0)
    found = {f"fit/{k}": v for k, v in history.history.items()}
    found["predict"] = model.predict(batches(), verbose=0)
    return found | c.evaluated(model, batches()) | c.weights(model)


@program("data/normalization", tables=(False,))
def normalization(c):
    """`Normalization` adapted before training."""
    layer = keras.layers.Normalization()
    with c.scope():
        layer = keras.layers.Normalization()
        layer.adapt(c.normal(c.samples, 6, seed=1))
        x = keras.Input([6])
        model = keras.Model(x, c.dense(2)(layer(x)))
    return c.train(model, c.data(), "mse", predict=True)


@program(
    "data/graph_batches",
    REFUSED,
    tables=(False,),
    batches=("even",),
    says="(?i)dimension|shape|nodes",
)
def graph_batches(c):
    """Elements whose tensors have different leading dimensions."""

    class Graphs(keras.Model):
        def __init__(self):
            super().__init__()
            self.last = c.dense(1)

        def call(self, x, training=False):
            sent = tf.gather(x["nodes"], x["edges"][:, 0])
            both = tf.math.unsorted_segment_sum(sent, x["edges"][:, 1], 12)
            return self.last(both)[:4]

    x = {
        "nodes": c.normal(2, 12, 3),
        "edges": c.integers(6, 2, 30, 2),
    }
    data = tf.data.Dataset.from_tensor_slices((x, c.normal(2, 4, 1)))
    with c.scope():
        model = Graphs()
    return c.train(model, data, "mse", evaluate=False)


@program("data/cache_in_file", REFUSED, says="cache")
def cache_in_file(c):
    """`dataset.cache` in a file."""
    data = c.data().cache(str(c.folder / "cache"))
    return c.train(c.model(), data, "mse", fit={"epochs": 2})


@program("data/shuffled")
def shuffled(c):
    """A dataset that is shuffled with a seed."""
    arrays = (c.x(), c.labels(2))
    data = tf.data.Dataset.from_tensor_slices(arrays)
    data = data.shuffle(50, seed=3).batch(8)
    return c.train(c.model(), data, "mse", fit={"epochs": 2})


@program("data/mapped_random")
def mapped_random(c):
    """A pipeline that draws random numbers by a seed of each sample."""

    def noisy(x, y):
        noise = tf.random.stateless_normal(tf.shape(y), [3, 4])
        return x, y + 0.1 * noise

    return c.train(c.model(), c.data().map(noisy), "mse")


@program("data/dropout_off")
def dropout(c):
    """`Dropout` of rate zero."""
    model = c.model(between=lambda: keras.layers.Dropout(0.0))
    return c.train(model, c.data(), "mse", predict=True)


@program("data/mixed_bfloat16", tables=(False,), tolerance=3e-2)
def mixed_bfloat16(c):
    """The policy `mixed_bfloat16`."""
    with c.scope():
        x = keras.Input([6])
        hidden = c.dense(8, "tanh", dtype="mixed_bfloat16")(x)
        model = keras.Model(x, c.dense(2, dtype="float32")(hidden))
    return c.train(model, c.data(), "mse")


@program("data/mixed_float16", tables=(False,), tolerance=1e-2)
def mixed_float16(c):
    """The policy `mixed_float16` with a loss scale."""
    with c.scope():
        x = keras.Input([6])
        hidden = c.dense(8, "tanh", dtype="mixed_float16")(x)
        model = keras.Model(x, c.dense(2, dtype="float32")(hidden))
    make = keras.mixed_precision.LossScaleOptimizer
    return c.train(
        model,
        c.data(),
        "mse",
        optimizer=lambda: make(keras.optimizers.SGD(0.1)),
    )


@program("data/float64", tables=(False,), kerases=(3,))
def float64(c):
    """Layers of float64."""
    with c.scope():
        x = keras.Input([6], dtype="float64")
        hidden = c.dense(8, "tanh", dtype="float64")(x)
        model = keras.Model(x, c.dense(2, dtype="float64")(hidden))
    return c.train(model, c.data(), "mse")


@program("data/few_samples", batches=("uneven",))
def few_samples(c):
    """Every batch has one sample, so most ranks have none."""
    arrays = (c.x()[:5], c.labels(2)[:5])
    data = tf.data.Dataset.from_tensor_slices(arrays).batch(1)
    return c.train(
        c.model(), data, "mse", metrics=lambda: ["mae"], predict=True
    )
