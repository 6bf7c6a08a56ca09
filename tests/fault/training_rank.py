# SPDX-License-Identifier: Apache-2.0
"""A rank in the middle of `fit`, with TF_CONFIG; notes how it ends.

Usage: training_rank.py FOLDER TIMEOUT WHAT

WHAT is the name of a function here: `fit`, or `search`.
"""

import json
import os
import pathlib
import sys
import time

import numpy as np
import tensorflow as tf

import tfdist_ext

keras = tf.keras


class Ready(keras.callbacks.Callback):
    """Notes that training goes on."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def on_train_batch_end(self, batch, logs=None):
        if batch == 20:
            self.path.touch()


def fit(strategy, ready):
    """Trains for ever."""
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input([3], dtype="int64"),
                tfdist_ext.layers.FullSparse(4, 100, sharding="row"),
                keras.layers.Dense(1),
            ]
        )
        model.compile(tfdist_ext.optimizers.SGD(0.1), "mse")
    data = tf.data.Dataset.from_tensors(
        (np.arange(24).reshape(8, 3), np.ones([8, 1], np.float32))
    ).repeat()
    model.fit(data, steps_per_epoch=10**7, verbose=0, callbacks=[Ready(ready)])


def search(strategy, ready):
    """Searches, and takes losses over the candidates of all, for ever."""
    with strategy.scope():
        table = tfdist_ext.layers.Embedding(100, 4, sharding="row_wise")
        table.build(None)
        index = tfdist_ext.layers.ShardedTopK(k=3).index(table)
        task = tfdist_ext.losses.Retrieval()
    queries = tf.ones([5, 4])

    @tf.function
    def step():
        return strategy.run(lambda: task(queries, queries))

    for number in range(10**7):
        index(queries)
        step()
        if number == 20:
            ready.touch()


def main():
    folder, timeout = pathlib.Path(sys.argv[1]), float(sys.argv[2])
    strategy = tfdist_ext.HybridParallelStrategy(timeout=timeout)
    result = {"class": "none"}
    try:
        run = {"fit": fit, "search": search}[sys.argv[3]]
        run(strategy, folder / f"ready.{strategy.rank}")
    except tf.errors.OpError as error:
        result = {"class": type(error).__name__, "message": str(error)}
    result["time"] = time.time()
    temporary = folder / f"writing.{strategy.rank}"
    temporary.write_text(json.dumps(result))
    os.replace(temporary, folder / f"result.{strategy.rank}")
    sys.exit(3)


if __name__ == "__main__":
    main()
