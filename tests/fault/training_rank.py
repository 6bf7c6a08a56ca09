# SPDX-License-Identifier: Apache-2.0
"""A rank in the middle of `fit`, with TF_CONFIG; notes how it ends.

Usage: training_rank.py FOLDER TIMEOUT
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


def main():
    folder, timeout = pathlib.Path(sys.argv[1]), float(sys.argv[2])
    strategy = tfdist_ext.HybridParallelStrategy(timeout=timeout)
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
    result = {"class": "none"}
    try:
        model.fit(
            data,
            steps_per_epoch=10**7,
            verbose=0,
            callbacks=[Ready(folder / f"ready.{strategy.rank}")],
        )
    except tf.errors.OpError as error:
        result = {"class": type(error).__name__, "message": str(error)}
    result["time"] = time.time()
    temporary = folder / f"writing.{strategy.rank}"
    temporary.write_text(json.dumps(result))
    os.replace(temporary, folder / f"result.{strategy.rank}")
    sys.exit(3)


if __name__ == "__main__":
    main()
