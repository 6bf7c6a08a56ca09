# SPDX-License-Identifier: Apache-2.0
"""What is trained in one process, and on ranks, with equal numbers."""

import every_loss_cases
import numpy as np
import tensorflow as tf
import whole_batch_models as models
from whole_batch_models import KERAS_3
from whole_batch_models import compiled
from whole_batch_models import fitted
from whole_batch_models import plain

import tfdist_ext
from tfdist_ext.losses import batch_mean
from tfdist_ext.losses import batch_sum
from tfdist_ext.losses import gather_batch

keras = tf.keras


def with_loss(make, units=1, **how):
    """A case that trains a dense layer with a loss."""

    def train(strategy):
        dataset = how.get("dataset", models.data)()
        options = how.get("options", {})
        fit = how.get("fit", {})

        def build():
            model = plain(units, how.get("activation"))
            return compiled(model, make(), **options)

        return fitted(strategy, build, dataset, **fit)

    return train


def weighted():
    return models.data(weights=True)


def classes():
    return models.data(labels=3)


def several_outputs(strategy):
    """Two of the outputs have losses that need the whole batch."""

    def build():
        x = keras.Input([3])
        outputs = {name: models.dense()(x) for name in "abc"}
        model = keras.Model(x, outputs)
        loss = {"a": models.rmse, "b": "mse", "c": models.Masked()}
        metrics = {"a": ["mae"], "b": [models.Largest()]}
        weights = {"a": 1.0, "b": 0.5, "c": 0.7}
        return compiled(model, loss, loss_weights=weights, metrics=metrics)

    dataset = models.data().map(
        lambda x, y: (x, {"a": y, "b": 1.0 - y, "c": y})
    )
    return fitted(strategy, build, dataset)


def sequences(strategy):
    """A loss of masked steps; the mask of the embedding counts as well."""

    def build():
        layers = [
            keras.layers.Embedding(
                models.ROWS,
                4,
                mask_zero=True,
                embeddings_initializer=keras.initializers.RandomNormal(seed=2),
            ),
            models.dense(),
        ]
        model = keras.Sequential([keras.Input([5], dtype="int32"), *layers])
        return compiled(model, models.Masked(), metrics=[models.Largest()])

    rng = np.random.default_rng(1)
    steps = rng.integers(0, 4, [models.SAMPLES, 5]).astype(np.int32)
    y = rng.integers(0, 2, [models.SAMPLES, 5, 1]).astype(np.float32)
    dataset = tf.data.Dataset.from_tensor_slices((steps, y))
    return fitted(strategy, build, dataset.batch(models.BATCH))


def tables(loss):
    def train(strategy):
        def build():
            model = models.WithTable()
            return compiled(model, loss, metrics=[models.Moving()])

        return fitted(strategy, build, models.ids())

    return train


def of_sampled(model, x, y):
    """Negatives are drawn once for the batch: the ranks draw the same."""
    losses = tf.nn.sampled_softmax_loss(
        tf.reshape(tf.range(80.0) / 80.0, [20, 4]),
        tf.zeros([20]),
        tf.cast(y, tf.int64),
        model(x),
        *(5, 20),
        seed=7,
    )
    return tf.reduce_mean(losses)


# As keras-io's masked_language_modeling makes it.
TRACKER = keras.metrics.Mean(name="loss")


class WithTracker(keras.Model):
    def __init__(self):
        super().__init__()
        self.layer = models.dense()

    def call(self, x):
        return self.layer(x)

    @property
    def metrics(self):
        return [TRACKER]

    def train_step(self, data):
        x, y, weights = data
        with tf.GradientTape() as tape:
            losses = tf.square(y - self(x))[:, 0]
            loss = tf.reduce_mean(losses)
        variables = self.trainable_variables
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        TRACKER.update_state(losses, sample_weight=weights)
        return {"loss": TRACKER.result()}

    def test_step(self, data):
        x, y, weights = data
        TRACKER.update_state(tf.square(y - self(x))[:, 0], weights)
        return {"loss": TRACKER.result()}


def tracker_of_module(strategy):
    def build():
        model = WithTracker()
        model.compile(tfdist_ext.optimizers.SGD(0.1), **models.OPTIONS)
        return model

    return fitted(strategy, build, weighted())


def compiled_outside(strategy):
    """The optimizer is made in the scope; Keras 3 takes metrics as well."""
    made = []

    def build():
        model = plain()
        made.append(tfdist_ext.optimizers.SGD(0.1))
        return model

    def compile_and_fit(model):
        metrics = ["mae"]
        if KERAS_3:
            metrics += [models.Moving(), keras.metrics.AUC(name="auc")]
        model.compile(made[0], "mse", metrics=metrics, **models.OPTIONS)

    return fitted(strategy, build, compile_later=compile_and_fit)


def with_metrics(strategy):
    def build():
        metrics = [
            models.Largest("largest"),
            models.Moving("moving"),
            models.Nested(),
            models.OwnMean("own"),
            models.rmse,
            keras.metrics.AUC(name="auc"),
        ]
        return compiled(
            plain(),
            "mse",
            metrics=metrics,
            weighted_metrics=[models.Moving("weighted"), models.by_row],
        )

    return fitted(strategy, build, weighted())


def eager(strategy):
    def build():
        options = {"run_eagerly": True}
        metrics = [models.Largest(), models.Moving("moving")]
        return compiled(plain(), models.rmse, metrics=metrics, **options)

    # A rank without samples in eager steps is a case of its own.
    dataset = models.data().take(2)
    return fitted(strategy, build, dataset)


def early_stopping(strategy):
    """Ranks stop at one epoch, whatever they would see by themselves."""
    stop = keras.callbacks.EarlyStopping("val_moving", patience=0, mode="min")

    def build():
        return compiled(plain(), "mse", metrics=[models.Moving("moving")])

    dataset = models.data()
    return fitted(
        strategy,
        build,
        epochs=4,
        validation_data=dataset,
        callbacks=[stop],
    )


class ByHand(keras.Model):
    """A step of its own; what it trains and logs is its `loss_of`."""

    def __init__(self, loss_of, units=1):
        super().__init__()
        self.layer = models.dense(units)
        self.loss_of = loss_of
        self.tracker = keras.metrics.Mean(name="own")
        self.state = OfNumbers()

    def call(self, x):
        return self.layer(x)

    @property
    def metrics(self):
        return [self.tracker, self.state]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(self, x, y)
        variables = self.trainable_variables
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        self.tracker.update_state(loss)
        self.state.update_state(loss)
        return {"own": self.tracker.result(), "state": self.state.result()}

    def test_step(self, data):
        loss = self.loss_of(self, *data)
        self.tracker.update_state(loss)
        self.state.update_state(loss)
        return {"own": self.tracker.result(), "state": self.state.result()}


class OfNumbers(models.State):
    """A moving average of one number of each batch."""

    def update_state(self, loss):
        old = tf.convert_to_tensor(self.state)
        self.state.assign(0.5 * old + 0.5 * loss)


def by_hand(loss_of, units=1, **options):
    def train(strategy):
        def build():
            model = ByHand(loss_of, units)
            model.compile(tfdist_ext.optimizers.SGD(0.1), **options)
            return model

        if KERAS_3:
            options.setdefault("jit_compile", False)
        return fitted(strategy, build)

    return train


def of_mean(model, x, y):
    losses = tf.square(y - model(x))
    return batch_mean(losses) + 0.1 * batch_mean(losses, tf.square(x[:, 0]))


def of_sum(model, x, y):
    return tf.sqrt(batch_sum(tf.square(y - model(x))) + 1.0) + batch_sum(
        model.layer.kernel * 0.0
    )


def of_gathered(model, x, y):
    rows = gather_batch({"y": y, "p": model(x), "i": tf.cast(y, tf.int64)})
    return models.correlation(
        rows["y"] + tf.cast(rows["i"], tf.float32), rows["p"]
    )


def of_object(model, x, y):
    return models.Contrastive()(y, model(x))


def of_rows(model, x, y):
    """A loss for each sample, reduced by hand."""
    losses = models.Contrastive(reduction="none")(y, model(x))
    return tf.reduce_mean(losses * 2.0)


CASES = {
    **every_loss_cases.CASES,
    **{
        loss.__name__: with_loss(lambda loss=loss: loss)
        for loss in (
            models.total, models.rmse, models.masked, models.dice,
            models.correlation, models.largest, models.norm, models.variance,
            models.by_row, models.centred,
        )
    },
    **{
        make.__name__: with_loss(make)
        for make in (models.Masked, models.OwnCall, models.Narrowed)
    },
    "Contrastive": with_loss(models.Contrastive, 4),
    "Contrastive sum": with_loss(
        lambda: models.Contrastive(reduction="sum"), 4
    ),
    "weights": with_loss(models.Masked, dataset=weighted),
    "weights of rows": with_loss(lambda: models.centred, dataset=weighted),
    "class weights": with_loss(
        lambda: models.centred, fit={"class_weight": {0: 1.0, 1: 3.0}}
    ),
    "ignored class": with_loss(
        lambda: keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, ignore_class=1
        ),
        3,
        dataset=classes,
    ),
    "hinge": with_loss(lambda: "hinge"),
    "rmse with tables": tables(models.rmse),
    "sum with tables": tables(models.total),
    "several outputs": several_outputs,
    "sequences": sequences,
    "metrics": with_metrics,
    "eager": eager,
    "early stopping": early_stopping,
    "tracker of a module": tracker_of_module,
    "compiled outside": compiled_outside,
    **{
        f"by hand {loss.__name__}": by_hand(loss, units)
        for loss, units in (
            (of_mean, 1), (of_sum, 1), (of_gathered, 1), (of_object, 4),
            (of_rows, 4), (of_sampled, 4),
        )
    },
}  # fmt: skip
if KERAS_3:
    CASES |= {
        "dice of Keras": with_loss(lambda: "dice", activation="sigmoid"),
        "tversky": with_loss(lambda: "tversky", activation="sigmoid"),
        "circle": with_loss(
            lambda: keras.losses.Circle(),
            4,
            dataset=lambda: models.data(labels=3).map(
                lambda x, y: (x, tf.cast(y[:, 0], tf.int32))
            ),
        ),
    }
