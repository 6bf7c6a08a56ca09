# SPDX-License-Identifier: Apache-2.0
"""What the endpoints of ranks serve while they train."""

import urllib.request

import numpy as np
import tensorflow as tf

import tfdist_ext
from tfdist_ext.callbacks import Prometheus
from tfdist_ext.layers import FullSparse

keras = tf.keras
KERAS_3 = hasattr(keras, "ops")


def scraped(port):
    """The text that Prometheus would read."""
    address = f"http://127.0.0.1:{port}/metrics"
    with urllib.request.urlopen(address, timeout=20) as answer:
        return answer.read().decode()


def fit(strategy, callbacks, epochs=2, together=1):
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 50, [32, 3])
    labels = rng.integers(0, 2, [32, 1]).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((ids, labels)).batch(8)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input([3], dtype="int64"),
                FullSparse(4, 50, sharding="row"),
                keras.layers.Dense(1, activation="sigmoid"),
            ]
        )
        arguments = {"jit_compile": False} if KERAS_3 else {}
        model.compile(
            tfdist_ext.optimizers.Adagrad(0.25),
            "binary_crossentropy",
            metrics=["accuracy"],
            steps_per_execution=together,
            **arguments,
        )
    return model.fit(
        data,
        validation_data=data,
        epochs=epochs,
        callbacks=callbacks,
        verbose=0,
    )


def served(strategy, folder, base):
    """The text of this rank after `fit`, its port, and its own counts."""
    inside = []

    class Within(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            inside.append(scraped(exporter.port))

    exporter = Prometheus(base)
    try:
        history = fit(strategy, [exporter, Within()], together=2)
        text = scraped(exporter.port)
    finally:
        exporter.close()
    numbers = strategy.statistics()  # empty in one process
    kept = {name: numbers.get(name) for name in ("bytes_sent", "labels")}
    losses = {name: values[-1] for name, values in history.history.items()}
    return text, exporter.port, losses, kept, len(inside)


def one_port_is_taken(strategy, folder, base):
    """An error on both ranks, which names the port; training may go on."""
    first = Prometheus(base)
    try:
        fit(strategy, [first], epochs=1)
        second = Prometheus(base)
        try:
            fit(strategy, [second], epochs=1)
        except (OSError, tf.errors.OpError) as error:
            return str(error)
        raise AssertionError("two endpoints on one port")
    finally:
        first.close()
