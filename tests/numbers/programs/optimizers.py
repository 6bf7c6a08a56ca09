# SPDX-License-Identifier: Apache-2.0
"""Keras's optimizers with each of their options."""

import functools
import itertools

import numpy as np
import tensorflow as tf

import tfdist_ext
from tests.numbers.registry import EQUAL
from tests.numbers.registry import REFUSED
from tests.numbers.registry import WARNED
from tests.numbers.registry import program
from tfdist_ext.layers import Embedding

keras = tf.keras
KERAS_3 = hasattr(keras, "ops")
BOTH = (3, 2)
MADE = {
    "SGD": {"learning_rate": 0.1},
    "SGD_momentum": {"learning_rate": 0.05, "momentum": 0.9},
    "SGD_nesterov": {
        "learning_rate": 0.05,
        "momentum": 0.9,
        "nesterov": True,
    },
    "Adam": {"learning_rate": 0.02},
    "Adam_amsgrad": {"learning_rate": 0.02, "amsgrad": True},
    "AdamW": {"learning_rate": 0.02, "weight_decay": 0.1},
    "RMSprop": {"learning_rate": 0.01},
    "RMSprop_centered": {
        "learning_rate": 0.01,
        "centered": True,
        "momentum": 0.5,
    },
    "Adagrad": {"learning_rate": 0.05},
    "Adadelta": {"learning_rate": 1.0},
    "Adamax": {"learning_rate": 0.02},
    "Nadam": {"learning_rate": 0.02},
    "Ftrl": {"learning_rate": 0.1},
    "Lion": {"learning_rate": 0.01},
    "Adafactor": {"learning_rate": 0.02},
    "Lamb": {"learning_rate": 0.02},
}
OPTIONS = {
    "clipnorm": {"clipnorm": 0.05},
    "global_clipnorm": {"global_clipnorm": 0.1},
    "clipvalue": {"clipvalue": 0.01},
    "use_ema": {"use_ema": True, "ema_momentum": 0.8},
    "ema_overwrite": {
        "use_ema": True,
        "ema_momentum": 0.8,
        "ema_overwrite_frequency": 2,
    },
    "weight_decay": {"weight_decay": 0.1},
}
CLIPPED = "tfdist_ext.optimizers"


def trained(c, make, **how):
    """A model that an optimizer trains for two passes over the data."""
    return c.train(
        c.model(),
        c.data(),
        "mse",
        optimizer=make,
        fit={"epochs": 2},
        evaluate=False,
        **how,
    )


def register(name, about, make, verdict=EQUAL, tables=(False,), **how):
    def run(c):
        return trained(c, make)

    run.__doc__ = about
    how.setdefault("family", True)
    program(f"optimizer/{name}", verdict, tables=tables, **how)(run)


def keras_own(name, **more):
    return getattr(keras.optimizers, name.partition("_")[0])(
        **MADE[name], **more
    )


for each in MADE:
    register(
        f"keras/{each}",
        f"Keras's `{each.replace('_', ' with ')}`.",
        lambda each=each: keras_own(each),
        kerases=BOTH if each != "Lamb" else (3,),
    )
for base in ("SGD", "Adam"):
    for option, arguments in OPTIONS.items():
        register(
            f"keras/{base}/{option}",
            f"Keras's `{base}` with `{option}`.",
            lambda base=base, a=arguments: keras_own(base, **a),
        )


class ProcessesRows(keras.Model):
    """Changes each gradient in its training step by `process`."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            value = self.compute_loss(x, y, self(x, training=True))
        variables = self.trainable_variables
        gradients = tape.gradient(value, variables)
        changed = list(map(self.process, gradients))
        self.optimizer.apply_gradients(zip(changed, variables, strict=True))
        return {"loss": value, **self.logs(gradients)}

    def process(self, gradient):
        return gradient

    def logs(self, gradients):
        return {}


class ClipsByNorm(ProcessesRows):
    def process(self, gradient):
        return tf.clip_by_norm(gradient, 0.05)


class ClipsByValue(ProcessesRows):
    def process(self, gradient):
        return tf.clip_by_value(gradient, -0.002, 0.002)


class Scales(ProcessesRows):
    def process(self, gradient):
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(
                0.5 * gradient.values, gradient.indices, gradient.dense_shape
            )
        return 0.5 * gradient


class NormInLogs(ProcessesRows):
    def logs(self, gradients):
        return {"norm": tf.linalg.global_norm(gradients)}


def repeated_ids(c, make, kind=keras.Model, sharding=None):
    """Trains a model of Keras's table, or of one of ours, whose ids repeat."""
    start = keras.initializers.Constant(c.normal(10, 4))
    layer = keras.layers.Embedding
    if sharding is not None and c.strategy is not None:
        layer = functools.partial(Embedding, sharding=sharding)
    with c.scope():
        x = keras.Input([6], dtype="int32")
        if c.tables:
            rows = c.embedding(10, 4)(x)
        else:
            rows = layer(10, 4, embeddings_initializer=start)(x)
        model = kind(x, c.dense(2)(keras.layers.Flatten()(rows)))
    ids = np.random.default_rng(2).integers(0, 10, [c.samples, 6])
    data = c.batched((ids.astype(np.int32), c.labels()))
    return c.train(model, data, "mse", optimizer=make, evaluate=False)


def with_repeated_ids(option, sharding):
    def run(c):
        make = functools.partial(keras_own, "SGD", **OPTIONS[option])
        return repeated_ids(c, make, sharding=sharding)

    whose = "Keras's table" if sharding is None else "a table on every rank"
    run.__doc__ = f"Keras's `SGD` with `{option}` and {whose}; ids repeat."
    return run


for owner, kind in (
    ("keras", keras.optimizers),
    ("own", tfdist_ext.optimizers),
):

    @program(f"optimizer/{owner}/clip_by_hand", tables=(False,))
    def clip_by_hand(c, kind=kind):
        """A step clips the gradient of Keras's table, whose ids repeat."""
        return repeated_ids(c, lambda: kind.SGD(0.1), ClipsByNorm)


def regularized(c, **how):
    """Trains a table with a regularizer."""
    with c.scope():
        x = keras.Input([6], dtype="int32")
        rows = c.embedding(10, 4, embeddings_regularizer="l2", **how)(x)
        model = keras.Model(x, c.dense(2)(keras.layers.Flatten()(rows)))
    data = c.batched((c.integers(10, c.samples, 6), c.labels()))
    return c.train(model, data, "mse", evaluate=False)


@program(
    "optimizer/regularizer/tables",
    WARNED,
    tables=(True,),
    says="`embeddings_regularizer` is applied to the rows that a batch",
    alone=WARNED,
)
def regularized_table(c):
    """`embeddings_regularizer` of a partitioned table."""
    return regularized(c)


@program("optimizer/regularizer/keras", tables=(False,))
def regularized_embedding(c):
    """`embeddings_regularizer` of Keras's table."""
    return regularized(c)


ONE_ROW = "one row per id"
for kind, what, says in (
    (ClipsByNorm, "is clipped by its norm", r"`tf.clip_by_norm` gets.*"),
    (ClipsByValue, "is clipped by value", r"Op M\w+imum \(optimizers.py:.*"),
    (NormInLogs, "has its norm logged", r"`tf.linalg.global_norm` gets.*"),
    (Scales, "is halved", None),
):
    for sharding in ("row", "data_parallel"):

        def rows_processed(c, kind=kind, sharding=sharding):
            make = functools.partial(keras_own, "SGD")
            return repeated_ids(c, make, kind, sharding)

        rows_processed.__doc__ = (
            f"The gradient of a {sharding} table, whose ids repeat, {what}."
        )
        verdict = EQUAL if says is None else WARNED
        program(
            f"optimizer/tables/{kind.__name__}/{sharding}",
            verdict,
            tables=(sharding == "row",),
            says="" if says is None else says + ONE_ROW,
            alone=verdict,
        )(rows_processed)


SQUARES = r"Optimizer %s of Keras 3 gets one row per id.*squares each"
for each in ("SGD_momentum", "Adam", "Adagrad", "RMSprop", "Ftrl", "Lion"):
    for version, sharding in itertools.product(BOTH, ("row", "data_parallel")):

        def with_table(c, each=each, sharding=sharding):
            make = functools.partial(keras_own, each)
            return repeated_ids(c, make, sharding=sharding)

        library = "keras" if version == 3 else "tf_keras"
        with_table.__doc__ = (
            f"`{each.replace('_', ' with ')}` of {library} and a {sharding} "
            "table, whose ids repeat."
        )
        linear = each in ("SGD_momentum", "Lion")
        verdict = EQUAL if linear or version == 2 else WARNED
        program(
            f"optimizer/{library}/tables/{each}/{sharding}",
            verdict,
            tables=(sharding == "row",),
            kerases=(version,),
            says=SQUARES % each,
            alone=verdict,
        )(with_table)
for option in ("clipnorm", "global_clipnorm", "clipvalue"):
    register(
        f"keras/tables/{option}",
        f"Keras's `SGD` with `{option}` and a partitioned table.",
        lambda option=option: keras_own("SGD", **OPTIONS[option]),
        REFUSED,
        tables=(True,),
        says=CLIPPED,
        alone=REFUSED,
    )
    program(f"optimizer/keras/embedding/{option}", tables=(False,))(
        with_repeated_ids(option, None)
    )
    program(
        f"optimizer/keras/replicated/{option}",
        REFUSED,
        tables=(False,),
        says=CLIPPED,
        alone=REFUSED,
    )(with_repeated_ids(option, "data_parallel"))
    register(
        f"own/{option}",
        f"This package's `SGD` with `{option}`.",
        lambda option=option: tfdist_ext.optimizers.SGD(0.1, **OPTIONS[option]),
        tables=(False, True),
    )
for each in ("SGD", "Adagrad"):
    register(
        f"own/{each}",
        f"This package's `{each}`, Keras's in one process.",
        lambda each=each: getattr(tfdist_ext.optimizers, each)(0.1),
        tables=(False, True),
    )
register(
    "own/SGD_momentum",
    "This package's `SGD` with momentum.",
    lambda: tfdist_ext.optimizers.SGD(0.05, momentum=0.9),
)
register(
    "own/Adam", "This package's `Adam`.", lambda: tfdist_ext.optimizers.Adam()
)


@program("optimizer/accumulation", kerases=(3,))
def accumulation(c):
    """`gradient_accumulation_steps` of Keras 3."""
    return trained(c, lambda: keras_own("SGD", gradient_accumulation_steps=2))


def loss_scaled(make):
    return lambda: keras.mixed_precision.LossScaleOptimizer(make())


@program("optimizer/loss_scale", tables=(False,))
def loss_scale(c):
    """A dynamic loss scale around `SGD`."""
    return trained(c, loss_scaled(lambda: keras_own("SGD")))


@program("optimizer/loss_scale_clipnorm", tables=(False,))
def loss_scale_clipnorm(c):
    """A dynamic loss scale around `Adam` with `global_clipnorm`."""
    make = loss_scaled(lambda: keras_own("Adam", global_clipnorm=0.1))
    return trained(c, make)


SCHEDULES = {
    "ExponentialDecay": {
        "initial_learning_rate": 0.2,
        "decay_steps": 2,
        "decay_rate": 0.5,
    },
    "CosineDecay": {"initial_learning_rate": 0.2, "decay_steps": 6},
    "PiecewiseConstantDecay": {
        "boundaries": [1, 3],
        "values": [0.2, 0.1, 0.05],
    },
    "PolynomialDecay": {"initial_learning_rate": 0.2, "decay_steps": 6},
    "InverseTimeDecay": {
        "initial_learning_rate": 0.2,
        "decay_steps": 2,
        "decay_rate": 0.5,
    },
}
for each, arguments in SCHEDULES.items():
    register(
        f"schedule/{each}",
        f"The schedule `{each}`.",
        lambda each=each, a=arguments: keras.optimizers.SGD(
            getattr(keras.optimizers.schedules, each)(**a)
        ),
        tables=(False, True),
    )


@program("optimizer/own_schedule")
def own_schedule(c):
    """A schedule written by the user."""

    class Warmup(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return 0.2 * tf.minimum(1.0, (tf.cast(step, tf.float32) + 1) / 4)

        def get_config(self):
            return {}

    return trained(c, lambda: keras.optimizers.SGD(Warmup()))


@program("optimizer/frozen_layers")
def frozen_layers(c):
    """Some layers are not trained."""
    model = c.model()
    model.layers[-1].trainable = False
    return c.train(model, c.data(), "mse", metrics=lambda: ["mae"])


@program("optimizer/user_subclass", tables=(False,))
def user_subclass(c):
    """A subclass of `SGD` that changes the gradients."""

    class Own(keras.optimizers.SGD):
        def apply_gradients(self, pairs, **how):
            pairs = [(tf.sign(g) * 0.1, v) for g, v in pairs]
            return super().apply_gradients(pairs, **how)

        def apply(self, gradients, variables=None):
            changed = [tf.sign(g) * 0.1 for g in gradients]
            return super().apply(changed, variables)

    return trained(c, lambda: Own(0.1))


@program("optimizer/user_norm", kerases=(3,), tables=(False,))
def user_norm(c):
    """An optimizer whose update uses the norm of each gradient."""

    class Own(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            norm = tf.norm(gradient) + 1e-6
            super().update_step(gradient / norm, variable, learning_rate)

    return trained(c, lambda: Own(0.1))


@program("optimizer/constraints", tables=(False,))
def constraints(c):
    """Kernels with constraints."""
    model = c.model(kernel_constraint=keras.constraints.MaxNorm(0.5))
    return c.train(model, c.data(), "mse")
