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

import pathlib
import statistics
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


class StepTimes(keras.callbacks.Callback):  # type: ignore[name-defined]
    """Milliseconds of steps, from the end of one to the end of the next.

    Args:
        saved: the callback that saves; None for none.

    Attributes:
        starts: of steps that start a save.
        others: of all other steps but the first.
    """

    def __init__(self, saved: Resume | None) -> None:
        super().__init__()
        self.starts: list[float] = []
        self.others: list[float] = []
        self._saved = saved
        self._waited = self._last = 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        waited = self._saved.seconds if self._saved is not None else 0.0
        now = time.monotonic()
        if self._last:
            started = waited > self._waited
            of_kind = self.starts if started else self.others
            of_kind.append(1e3 * (now - self._last))
        self._last, self._waited = now, waited


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
        starts = statistics.median(times.starts) if times.starts else 0.0
        others = statistics.median(times.others)
        return f"{seconds:.2f}", f"{starts:.1f}", f"{others:.1f}"

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
