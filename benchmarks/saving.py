# SPDX-License-Identifier: Apache-2.0
"""What checkpoints of `callbacks.Resume` cost `fit`; started on every rank.

    tfdist-run -n 2 -m benchmarks.saving [ROWS]

Trains one table with Adagrad without the callback, with it, and with a
checkpoint every 50 steps, in turns; prints the seconds of 150 steps, those
that were waited for copies, and those of a write that all wait for.
"""

from __future__ import annotations

import pathlib
import sys
import tempfile
import time
from typing import Any

import numpy as np
import tensorflow as tf

import tfdist_ext
from tfdist_ext.callbacks import Resume
from tfdist_ext.comm.exchanges import text_of_first_rank

keras = tf.keras
DIM, BATCH, HOTNESS, STEPS, TURNS = 32, 4096, 16, 150, 3


def make_model(strategy: Any, rows: int) -> Any:
    """One table and two dense layers, compiled."""
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input([HOTNESS], dtype="int64"),
                tfdist_ext.layers.FullSparse(DIM, rows, sharding="row"),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dense(1),
            ]
        )
        model.compile(tfdist_ext.optimizers.Adagrad(0.05), "mse")
    return model


def make_data(rows: int, batch: int = BATCH) -> tf.data.Dataset:
    """Twenty batches of random ids and labels, again and again."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, rows, [batch * 20, HOTNESS])
    labels = rng.normal(size=[batch * 20, 1]).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((ids, labels))
    return data.batch(batch).repeat()


def main() -> None:
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 2_000_000
    keras.utils.set_random_seed(1)
    strategy = tfdist_ext.HybridParallelStrategy()
    collectives = strategy.collectives
    model, data = make_model(strategy, rows), make_data(rows)

    def train(*callbacks: Any) -> float:
        start = time.monotonic()
        model.fit(
            data, steps_per_epoch=STEPS, verbose=0, callbacks=list(callbacks)
        )
        return time.monotonic() - start

    def show(*cells: Any) -> None:
        if strategy.rank == 0:
            print(*(f"{cell:>14}" for cell in cells), flush=True)

    with tempfile.TemporaryDirectory() as own:
        folder = text_of_first_rank(own, collectives, "folder")
        train()
        show("", "seconds", "saves", "of copies")
        for turn in range(TURNS):
            show("without", f"{train():.2f}", 0, "")
            for every in (STEPS, 50):
                saved = Resume(f"{folder}/{turn}-{every}", every=every)
                seconds = train(saved)
                saves = -(-STEPS // every)
                show("with", f"{seconds:.2f}", saves, f"{saved.seconds:.3f}")
        start = time.monotonic()
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        path = pathlib.Path(checkpoint.write(f"{folder}/waited/ckpt"))
        seconds = time.monotonic() - start
        size = sum(file.stat().st_size for file in path.parent.iterdir())
        show("Checkpoint", f"{seconds:.2f}", 1, f"{size / 1e6:.0f} MB")
        if collectives is not None:
            collectives.barrier("end")


if __name__ == "__main__":
    main()
