# SPDX-License-Identifier: Apache-2.0
"""`BatchNormalization(synchronized=True)` is that of one process."""

import contextlib

import numpy as np
import tensorflow as tf

keras = tf.keras
KINDS = ("numbers", "masked")
ROWS, STEPS, BATCH = 65, 5, 16  # the last batch has one row


def samples(kind):
    """Numbers a thousand deviations off zero; sequences with a mask."""
    rng = np.random.default_rng(0)
    shape = (ROWS, 4) if kind == "numbers" else (ROWS, STEPS, 4)
    x = rng.normal(1000.0 if kind == "numbers" else 1.0, 1.0, shape)
    y = rng.normal(size=(ROWS, 1))
    if kind == "masked":
        lengths = rng.integers(1, STEPS + 1, ROWS)
        x[np.arange(STEPS) >= lengths[:, None]] = 0.0
    return x.astype(np.float32), y.astype(np.float32)


def make_model(kind, norm):
    shape = samples(kind)[0].shape[1:]
    start = keras.initializers.Constant(0.1)
    inputs = keras.Input(shape)
    x = inputs if kind == "numbers" else keras.layers.Masking()(inputs)
    x = keras.layers.BatchNormalization(momentum=0.5, **norm)(x)
    if kind == "masked":
        x = keras.layers.GlobalAveragePooling1D()(x)
    x = keras.layers.Dense(3, "tanh", kernel_initializer=start)(x)
    x = keras.layers.BatchNormalization(momentum=0.5, **norm)(x)
    model = keras.Model(inputs, keras.layers.Dense(1, name="out")(x))
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


def train(strategy, folder, kind):
    """What is trained and evaluated, plain in one process."""
    del folder
    scope, norm = contextlib.nullcontext(), {}
    if strategy:
        scope, norm = strategy.scope(), {"synchronized": True}
    with scope:
        model = make_model(kind, norm)
    x, y = samples(kind)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    history = model.fit(data, epochs=2, verbose=0).history["loss"]
    evaluated = model.evaluate(data, verbose=0)
    return [*model.get_weights(), np.array(history), np.array(evaluated)]
