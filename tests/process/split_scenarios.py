# SPDX-License-Identifier: Apache-2.0
"""`optimizers.Split`, against one process and through files."""

import pathlib

import numpy as np
import optimizer_scenarios as models
import tensorflow as tf

from tfdist_ext.optimizers import Adagrad
from tfdist_ext.optimizers import Adam
from tfdist_ext.optimizers import Split

keras = tf.keras
KERAS_3 = hasattr(keras, "ops")
# tf_keras has the first one only.
KINDS = ("Adafactor", "Lamb", "Muon")[: None if KERAS_3 else 1]


def tables():
    return [models.Partitioned("sgd"), models.Partitioned(None)]


def compare(strategy, make_optimizer):
    models.as_one_process(strategy, tables, make_optimizer)


def split_optimizers(strategy, folder):
    """Those that cannot train a part of a table train dense layers."""
    for name in KINDS:
        kind = getattr(keras.optimizers, name)
        compare(strategy, lambda k=kind: Split(k(0.02), Adagrad(0.1)))


def split_options(strategy, folder):
    """Each optimizer clips, decays and averages what it trains."""
    kind = getattr(keras.optimizers, KINDS[-1])
    for of_dense, of_tables in (
        ({"clipnorm": 0.01}, {"global_clipnorm": 0.02}),
        ({"global_clipnorm": 0.01, "weight_decay": 0.5}, {"clipvalue": 0.001}),
        ({"use_ema": True, "ema_overwrite_frequency": 3}, {}),
    ):
        compare(
            strategy,
            lambda a=of_dense, b=of_tables: Split(kind(0.02, **a), Adam(**b)),
        )
    schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)
    compare(strategy, lambda: Split(kind(schedule), Adagrad(schedule)))


def split_steps_together(strategy, folder):
    """Gradients of several steps, and a scaled loss."""
    kind = keras.optimizers.Lamb
    steps = {"gradient_accumulation_steps": 2}
    # A table's own optimizer is refused with it.
    models.as_one_process(
        strategy,
        lambda: [models.Partitioned(None)],
        lambda: Split(kind(0.02, **steps), Adagrad(0.1, **steps)),
    )
    compare(
        strategy,
        lambda: Split(kind(0.02), Adagrad(0.1), loss_scale_factor=64.0),
    )


def make_model(strategy, rate=0.02):
    with strategy.scope():
        model = models.Model(tables())
        kind = getattr(keras.optimizers, KINDS[-1])
        arguments = {"jit_compile": False} if KERAS_3 else {}
        optimizer = Split(kind(rate), Adagrad(0.1))
        model.compile(optimizer, "mse", **arguments)
        model(tf.zeros([2, 3], tf.int64))
        optimizer.build(model.trainable_variables)
    return model


def values(model):
    """Rows and slots of this rank, and dense weights."""
    found = [*model.variables, *model.optimizer.variables]
    return [np.array(each.numpy()) for each in found]


def split_files(strategy, folder):
    """Both optimizers continue from every kind of file."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, models.SMALL, [16, 3])
    labels = rng.normal(size=[16, 1]).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((ids, labels)).batch(8)
    first = make_model(strategy)
    first.fit(data, epochs=2, verbose=0)
    folder = pathlib.Path(folder)
    path = str(folder / "split.weights.h5")
    first.save_weights(path) if KERAS_3 else None
    saved = tf.train.Checkpoint(model=first, optimizer=first.optimizer)
    saved.write(str(folder / "split"))
    expected = values(first)
    first.fit(data, epochs=1, verbose=0)
    later = values(first)
    for form in ("weights", "checkpoint")[0 if KERAS_3 else 1 :]:
        again = make_model(strategy)
        if form == "weights":
            again.load_weights(path)
        else:
            tf.train.Checkpoint(model=again, optimizer=again.optimizer).read(
                str(folder / "split")
            ).assert_consumed()
        for i, (a, b) in enumerate(zip(values(again), expected, strict=True)):
            np.testing.assert_array_equal(a, b, f"{form}, variable {i}")
        again.fit(data, epochs=1, verbose=0)
        for i, (a, b) in enumerate(zip(values(again), later, strict=True)):
            np.testing.assert_allclose(a, b, 1e-5, 1e-6, err_msg=f"{form} {i}")


def split_loop(strategy, folder):
    """`apply_gradients` in a step of one's own is a step of `fit`."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, models.SMALL, [16, 3])
    labels = rng.normal(size=[16, 1]).astype(np.float32)
    fitted, looped = make_model(strategy), make_model(strategy)
    looped.set_weights(fitted.get_weights())
    fitted.fit(ids, labels, batch_size=16, epochs=3, shuffle=False, verbose=0)
    data = tf.data.Dataset.from_tensor_slices((ids, labels)).batch(16)

    @tf.function
    def step(batch):
        def on_rank(x, y):
            with tf.GradientTape() as tape:
                square = tf.reduce_sum((looped(x, training=True) - y) ** 2)
                loss = square / 16.0
            weights = looped.trainable_variables
            gradients = tape.gradient(loss, weights)
            looped.optimizer.apply_gradients(
                zip(gradients, weights, strict=True)
            )

        strategy.run(on_rank, args=batch)

    for _ in range(3):
        for batch in strategy.experimental_distribute_dataset(data):
            step(batch)
    for i, (a, b) in enumerate(
        zip(values(looped), values(fitted), strict=True)
    ):
        np.testing.assert_allclose(a, b, 1e-4, 1e-6, err_msg=f"variable {i}")
    assert int(looped.optimizer.tables.iterations) == 3
    assert int(looped.optimizer.dense.iterations) == 3
