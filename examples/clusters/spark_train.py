# SPDX-License-Identifier: Apache-2.0
"""Trains in two tasks of Spark; its second job uses the same processes.

spark-submit examples/clusters/spark_train.py
"""

import functools
import sys

from pyspark.sql import SparkSession

import tfdist_ext.spark

RANKS = 2


def train(rows: int) -> list[float]:
    import numpy as np
    import tensorflow as tf

    ids = np.arange(4096).reshape(1024, 4) % rows
    labels = (ids[:, :1] % 2).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((ids, labels)).batch(128)
    with tfdist_ext.HybridParallelStrategy() as strategy:
        tf.keras.utils.set_random_seed(0)
        with strategy.scope():
            model = tf.keras.Sequential(
                [
                    tf.keras.Input((4,), dtype="int64"),
                    tfdist_ext.layers.FullSparse(8, rows),
                    tf.keras.layers.Dense(1),
                ]
            )
            model.compile(tfdist_ext.optimizers.Adagrad(0.1), "mse")
        history = model.fit(data, epochs=2, verbose=0).history["loss"]
        return [strategy.rank, strategy.world_size, *history]


if __name__ == "__main__":
    local = f"local[{RANKS}]"
    master = sys.argv[1] if len(sys.argv) > 1 else local
    session = SparkSession.builder.master(master).getOrCreate()
    for rows in (100, 200):
        job = functools.partial(train, rows)
        for rank, ranks, *losses in tfdist_ext.spark.run(job, RANKS):
            print(f"rows {rows}, rank {rank} of {ranks}: {losses}")
    session.stop()
