# SPDX-License-Identifier: Apache-2.0
"""What checkpoints of `callbacks.Resume` cost `fit`; started on every rank.

    tfdist-run -n 2 -m benchmarks.saving [ROWS]

Trains one table with Adagrad without the callback, with it, and with a
checkpoint every 50 steps, in turns. Prints the seconds of 150 steps, the
seconds that training waited for saves (to start them, and for the last one),
and the median milliseconds of a step that starts a save and of the others. The
last line is a write that all ranks wait for.
"""

from __future__ import annotations

import itertools
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

import numpy as np
import tensorflow as tf

import tfdist_ext
from benchmarks.loops import StepTimer
from tfdist_ext.callbacks import Resume
from tfdist_ext.comm.exchanges import text_of_first_rank

keras = tf.keras
DIM, BATCH, HOTNESS, STEPS, TURNS = 32, 4096, 16, 150, 3


class StepTimes(StepTimer):
    """Seconds of steps, and whether each has started a save.

    Args:
        saved: the callback that saves; None for none.
    """

    def __init__(self, saved: Resume | None) -> None:
        super().__init__()
        self._saved = saved
        self._waited = [0.0]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_end(batch, logs)
        self._waited.append(self._saved.seconds if self._saved else 0.0)

    def median(self, started: bool) -> str:
        """Median milliseconds of steps that have, or have not; "" for none."""
        waits = itertools.pairwise(self._waited)
        found = [
            1e3 * seconds
            for seconds, (before, after) in zip(
                self.seconds, waits, strict=True
            )
            if (after > before) == started
        ]
        return f"{statistics.median(found):.1f}" if found else ""


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

    def train(saved: Resume | None = None) -> tuple[str, str, str]:
        times = StepTimes(saved)
        callbacks = [times] if saved is None else [saved, times]
        start = time.monotonic()
        model.fit(data, steps_per_epoch=STEPS, verbose=0, callbacks=callbacks)
        seconds = time.monotonic() - start
        return f"{seconds:.2f}", times.median(True), times.median(False)

    def show(*cells: Any) -> None:
        if strategy.rank == 0:
            print(*(f"{cell:>14}" for cell in cells), flush=True)

    with tempfile.TemporaryDirectory() as own:
        folder = text_of_first_rank(own, collectives, "folder")
        train()
        show("", "saves", "seconds", "waited", "ms start", "ms others")
        for turn in range(TURNS):
            seconds, _, others = train()
            show("without", 0, seconds, "", "", others)
            for every in (STEPS, 50):
                saved = Resume(f"{folder}/{turn}-{every}", every=every)
                seconds, starts, others = train(saved)
                saves, waited = -(-STEPS // every), f"{saved.seconds:.2f}"
                show("with", saves, seconds, waited, starts, others)
        start = time.monotonic()
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        path = pathlib.Path(checkpoint.write(f"{folder}/waited/ckpt"))
        seconds = time.monotonic() - start
        size = sum(file.stat().st_size for file in path.parent.iterdir())
        show("Checkpoint", 1, f"{seconds:.2f}", f"{size / 1e6:.0f} MB")
        if collectives is not None:
            collectives.barrier("end")


if __name__ == "__main__":
    main()
