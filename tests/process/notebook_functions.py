# SPDX-License-Identifier: Apache-2.0
"""Functions that `launch.notebook` calls on ranks."""

import os
import signal

import numpy as np
import tensorflow as tf

import tfdist_ext

keras = tf.keras


def train(epochs):
    """Losses of a small model, and the ranks that took part."""
    strategy = tfdist_ext.HybridParallelStrategy()
    ids = np.arange(32).reshape(16, 2)
    labels = (ids[:, :1] % 3).astype(np.float32)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input([2], dtype="int64"),
                tfdist_ext.layers.FullSparse(4, 40, sharding="row"),
                keras.layers.Dense(1),
            ]
        )
        arguments = {"jit_compile": False} if hasattr(keras, "ops") else {}
        model.compile(tfdist_ext.optimizers.SGD(0.1), "mse", **arguments)
    data = tf.data.Dataset.from_tensor_slices((ids, labels)).batch(8)
    history = model.fit(data, epochs=epochs, verbose=0).history
    ranks = strategy.gather(tf.constant([strategy.rank]), 0)
    print(f"rank {strategy.rank} prints é", flush=True)
    return history["loss"], ranks.numpy().tolist()


def fail_on_last(how):
    """The last rank fails in a step, while the others wait for it."""
    strategy = tfdist_ext.HybridParallelStrategy()
    if strategy.rank == strategy.world_size - 1:
        print("about to fail", flush=True)
        if how == "signal":
            os.kill(os.getpid(), signal.SIGKILL)
        raise LookupError("the last rank cannot do this")
    strategy.gather(tf.constant([strategy.rank]), 0)
