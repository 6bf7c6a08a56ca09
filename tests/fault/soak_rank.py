# SPDX-License-Identifier: Apache-2.0
"""A rank of a job that is disturbed and must come to the same weights.

Usage: soak_rank.py FOLDER STEPS SECONDS

Trains STEPS steps of at least SECONDS each, until a file `hurry` is there.
Heeds files `full-R` (rank R cannot write more than a few bytes to a file) and
`slow-R` (what rank R writes takes two seconds). Rank 0 leaves the weights.
"""

import os
import pathlib
import resource
import sys
import time

import numpy as np
import tensorflow as tf

import tfdist_ext
from tfdist_ext.callbacks import Resume
from tfdist_ext.checkpoints import writing

keras = tf.keras
ROWS, BATCH, EPOCH = 64, 8, 20
FULL = 64  # bytes


class Disturbed(keras.callbacks.Callback):
    """Takes its time, and suffers what the files say."""

    def __init__(self, folder, rank, seconds):
        super().__init__()
        self.folder, self.rank, self.seconds = folder, rank, seconds

    def on_train_batch_end(self, batch, logs=None):
        if not (self.folder / "hurry").exists():
            time.sleep(self.seconds)
        full = (self.folder / f"full-{self.rank}").exists()
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (FULL if full else most, most)
        )


def slow_down(folder, rank):
    write = writing.Parts.write

    def slow(parts):
        if (folder / f"slow-{rank}").exists():
            time.sleep(2)
        write(parts)

    writing.Parts.write = slow


def main():
    folder, steps = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    keras.utils.set_random_seed(1)
    strategy = tfdist_ext.HybridParallelStrategy(timeout=3)
    rank = strategy.rank
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    slow_down(folder, rank)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input([3], dtype="int64"),
                tfdist_ext.layers.FullSparse(4, ROWS, sharding="row"),
                keras.layers.Dropout(0.2),
                keras.layers.Dense(1),
            ]
        )
        model.compile(tfdist_ext.optimizers.Adagrad(0.1), "mse")
    rng = np.random.default_rng(0)
    samples = BATCH * EPOCH
    ids = rng.integers(0, ROWS, [samples, 3])
    labels = rng.normal(size=[samples, 1]).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((ids, labels))
    model.fit(
        data.shuffle(samples).batch(BATCH),
        epochs=steps // EPOCH,
        verbose=0,
        callbacks=[
            Resume(folder / "run", every=5),
            Disturbed(folder, rank, float(sys.argv[3])),
        ],
    )
    table = strategy.gather_table(model.layers[0])
    if rank == 0:
        dense = [np.asarray(w) for w in model.layers[-1].get_weights()]
        np.savez(folder / "weights.npz", table, *dense)


if __name__ == "__main__":
    main()
