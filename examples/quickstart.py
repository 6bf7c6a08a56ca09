# SPDX-License-Identifier: Apache-2.0
"""Learns planted weights of sparse features; at any number of ranks.

python examples/quickstart.py
tfdist-run -n 2 examples/quickstart.py
"""

import numpy as np
import tensorflow as tf

import tfdist_ext

ROWS, SAMPLES, HOTNESS = 10_000, 100_000, 20

strategy = tfdist_ext.HybridParallelStrategy()  # Before any tensor.
tf.keras.utils.set_random_seed(0)

rng = np.random.default_rng(0)
truth = rng.normal(0.0, 0.7, ROWS)
ids = np.floor(ROWS ** rng.random((SAMPLES, HOTNESS))).astype(np.int64) - 1
clicks = truth[ids].sum(axis=1) > rng.logistic(size=SAMPLES)
data = tf.data.Dataset.from_tensor_slices((ids, clicks[:, None].astype("f4")))
data = data.shuffle(SAMPLES, seed=0).batch(1000)  # The batch of all ranks.

with strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.Input((HOTNESS,), dtype="int64"),
            tfdist_ext.layers.FullSparse(16, ROWS, activation="relu"),
            tf.keras.layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile(
        tfdist_ext.optimizers.Adagrad(0.1),
        loss="binary_crossentropy",
        metrics=["accuracy"],
    )
model.fit(data, epochs=5, shuffle=False, verbose=2)
