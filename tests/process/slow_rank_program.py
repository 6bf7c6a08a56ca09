# SPDX-License-Identifier: Apache-2.0
"""Trains with `fit` and with a loop of its own, where rank 1 is slow."""

import time

import numpy as np
import tensorflow as tf

import tfdist_ext

keras = tf.keras
STEPS = 50


def data() -> tf.data.Dataset:
    ones = np.ones([8, 4], np.float32)
    return tf.data.Dataset.from_tensors((ones, ones[:, :1])).repeat(STEPS)


def main() -> None:
    strategy = tfdist_ext.HybridParallelStrategy()

    def be_slow(batch: object, logs: object = None) -> None:
        if strategy.rank == 1:
            time.sleep(0.04)

    with strategy.scope():
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
        model.compile("sgd", "mse", steps_per_execution=2)
    slow = keras.callbacks.LambdaCallback(on_train_batch_begin=be_slow)
    model.fit(data(), verbose=0, callbacks=[slow])

    @tf.function
    def step(batch: tf.Tensor) -> None:
        total = strategy.run(lambda x, y: tf.reduce_sum(x - y), args=batch)
        strategy.reduce("sum", total, axis=None)

    for batch in strategy.experimental_distribute_dataset(data()):
        be_slow(batch)
        step(batch)
    if strategy.rank == 0:
        print("waited", strategy.statistics()["waited"])
    time.sleep(2.5)  # for a line of all steps


if __name__ == "__main__":
    main()
