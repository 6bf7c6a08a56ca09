# SPDX-License-Identifier: Apache-2.0
"""What delta checkpoints hold and cost at a workload's size; on every rank.

    tfdist-run -n 2 -m benchmarks.delta_saving [WORKLOAD [BATCH]]

Trains the first table of the workload with Adagrad, makes a full checkpoint,
then deltas since it after more and more steps. Prints the share of rows
touched since, the seconds that training waits, those until all is on the disk,
the megabytes, and the seconds to read it again.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from typing import Any

import numpy as np
import tensorflow as tf

import tfdist_ext
from benchmarks import workloads
from tfdist_ext.comm.exchanges import text_of_first_rank
from tfdist_ext.patching import Need
from tfdist_ext.patching import hold
from tfdist_ext.saving import saver
from tfdist_ext.saving.changed_rows import ChangedRows
from tfdist_ext.saving.changed_rows import Marks
from tfdist_ext.saving.saver import BackgroundWrite

keras = tf.keras
STEPS = (10, 40, 150)


def make_model(strategy: Any, table: workloads.Table) -> Any:
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input([table.hotness], dtype="int64"),
                tfdist_ext.layers.FullSparse(
                    table.width, table.rows, sharding="row"
                ),
                keras.layers.Dense(1),
            ]
        )
        model.compile(tfdist_ext.optimizers.Adagrad(0.05), "mse")
    return model


class Saved:
    """Checkpoints of a model that are made as `Resume` does.

    Args:
        strategy: of the model.
        model: that is trained.
        folder: for them.
    """

    def __init__(self, strategy: Any, model: Any, folder: str) -> None:
        hold(Need.CHECKPOINTS, self)
        self._strategy, self._folder = strategy, folder
        model.optimizer.build(model.trainable_variables)
        self._checkpoint = tf.train.Checkpoint(
            model=model, optimizer=model.optimizer
        )
        self._full = f"{folder}/full"
        self._marks: Marks | None = None

    def save(self, steps: int, touched: str) -> None:
        """Makes a full one, or a delta if there is one; prints what it is."""
        is_full = self._marks is None
        path = self._full if is_full else f"{self._folder}/since-{steps}"
        changed = ChangedRows(self._marks)
        start = time.monotonic()
        write = BackgroundWrite(
            self._checkpoint,
            path,
            self._strategy.collectives,
            lambda: None,
            changed,
        )
        while (failure := write.advance(self._phases(write))) is None:
            write.join(1.0)
        assert not failure, failure
        placed = time.monotonic() - start
        if is_full:
            self._marks = changed.now
        start = time.monotonic()
        with saver.relative_to(None if is_full else self._full):
            self._checkpoint.read(path)
        read = time.monotonic() - start
        size = sum(map(os.path.getsize, tf.io.gfile.glob(f"{path}.*")))
        show(
            self._strategy,
            *("full" if is_full else "delta", steps, touched),
            *(f"{write.seconds:.3f}", f"{placed:.2f}"),
            *(f"{size / 1e6:.1f}", f"{read:.2f}"),
        )

    def _phases(self, write: BackgroundWrite) -> list[int]:
        mine = tf.constant([int(write.phase)], tf.int64)
        collectives = self._strategy.collectives
        if collectives is not None:
            mine = collectives.all_gather(mine, "benchmark/phases")
        phases: list[int] = mine.numpy().tolist()
        return phases


def show(strategy: Any, *cells: Any) -> None:
    if strategy.rank == 0:
        print(*(f"{cell:>8}" for cell in cells), flush=True)


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "ads"
    batch = int(sys.argv[2]) if len(sys.argv) > 2 else 256
    workload = workloads.WORKLOADS[name]
    table = workload.tables[0]
    keras.utils.set_random_seed(1)
    strategy = tfdist_ext.HybridParallelStrategy()
    model = make_model(strategy, table)
    batches = [
        workloads.make_batch(workload, batch, step, 0)
        for step in range(max(STEPS))
    ]
    seen = np.zeros(table.rows, bool)
    with tempfile.TemporaryDirectory() as own:
        folder = text_of_first_rank(own, strategy.collectives, "folder")
        saved = Saved(strategy, model, folder)
        show(strategy, "", "steps", "rows", "waits", "placed", "MB", "read")
        saved.save(0, "")
        done = 0
        for steps in STEPS:
            ids = np.concatenate([b.ids[0] for b in batches[done:steps]])
            labels = np.concatenate([b.labels for b in batches[done:steps]])
            data = tf.data.Dataset.from_tensor_slices((ids, labels))
            model.fit(data.batch(batch), verbose=0)
            seen[ids] = True
            done = steps
            saved.save(steps, f"{seen.mean():.2%}")
        if strategy.collectives is not None:
            strategy.collectives.barrier("end")


if __name__ == "__main__":
    main()
