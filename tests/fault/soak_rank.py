# SPDX-License-Identifier: Apache-2.0
"""A rank of a job that is disturbed and must come to the same weights.

Usage: soak_rank.py FOLDER STEPS SECONDS EVERY

Trains STEPS steps of at least SECONDS each, until a file `hurry` is there, and
saves after EVERY. Heeds files `full-R` (rank R cannot write more than a few
bytes to a file), `slow-R` (what rank R writes takes two seconds), `cut-R`
(rank R loses its connections, once), `files-R` (rank R starts with too few
files to open, once) and `hold` (the ranks after 0 start later).
Rank 0 leaves the address of its listener, and at the end the weights.
"""

import contextlib
import json
import os
import pathlib
import resource
import socket
import sys
import threading
import time

import numpy as np
import tensorflow as tf

import tfdist_ext
from tfdist_ext.callbacks import Resume
from tfdist_ext.saving import checkpoint_writing

keras = tf.keras
ROWS, BATCH, EPOCH = 2000, 8, 20
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
    write = checkpoint_writing.Parts.write

    def slow(parts):
        if (folder / f"slow-{rank}").exists():
            time.sleep(2)
        write(parts)

    checkpoint_writing.Parts.write = slow


def be_cut(folder, rank):
    """Ends all connections of this process, when the file says so."""
    file = folder / f"cut-{rank}"
    while not file.exists():
        time.sleep(0.05)
    file.unlink(missing_ok=True)
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket"):
                continue
            with socket.socket(fileno=os.dup(int(number))) as connection:
                if connection.family == socket.AF_INET:
                    connection.shutdown(socket.SHUT_RDWR)


def main():
    folder, steps = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    keras.utils.set_random_seed(1)
    config = json.loads(os.environ["TF_CONFIG"])
    if config["task"]["index"] == 0:
        listener = json.dumps(config["cluster"]["worker"][0])
        (folder / "listener").write_text(listener)
    else:
        while (folder / "hold").exists():
            time.sleep(0.05)
    few = folder / f"files-{config['task']['index']}"
    if few.exists():
        few.unlink()
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used, used))
    strategy = tfdist_ext.HybridParallelStrategy(timeout=3)
    rank = strategy.rank
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    slow_down(folder, rank)
    threading.Thread(target=be_cut, args=(folder, rank), daemon=True).start()
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
            Resume(folder / "run", every=int(sys.argv[4]), deltas=3),
            Disturbed(folder, rank, float(sys.argv[3])),
        ],
    )
    table = strategy.gather_table(model.layers[0])
    if rank == 0:
        dense = [np.asarray(w) for w in model.layers[-1].get_weights()]
        np.savez(folder / "weights.npz", table, *dense)


if __name__ == "__main__":
    main()
