# SPDX-License-Identifier: Apache-2.0
"""A rank of the job that `benchmarks.restart` kills and measures.

Usage: restart_rank.py FOLDER, in which job.json says what to train. Notes the
time of each event in FOLDER/events-START-RANK and leaves FOLDER/digest-RANK,
a digest of its weights.
"""

import hashlib
import json
import os
import pathlib
import sys
import time
from typing import Any

import numpy as np
import tensorflow as tf

import tfdist_ext
from benchmarks import saving
from tfdist_ext.callbacks import Resume

keras = tf.keras
BATCH = 2048  # samples of all ranks


def started() -> float:
    """When this process was made, by the clock of `time.monotonic`."""
    fields = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2]
    since_boot = int(fields.split()[19]) / os.sysconf("SC_CLK_TCK")
    booted = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    return since_boot - booted


class Events:
    """The file in which a rank notes what it does.

    Args:
        folder: of the job.
        rank: of this process.
    """

    def __init__(self, folder: pathlib.Path, rank: int) -> None:
        start = os.environ.get("TFDIST_RESTART", "0")
        self._file = (folder / f"events-{start}-{rank}").open("w", 1)

    def note(self, event: str, wall: float | None = None, **more: Any) -> None:
        """Writes a line: the event, its time, and processor seconds so far."""
        wall = time.monotonic() if wall is None else wall
        line = {"event": event, "wall": wall, "cpu": time.process_time()}
        self._file.write(json.dumps({**line, **more}) + "\n")


class Noted(keras.callbacks.Callback):  # type: ignore[name-defined]
    """Notes the end of restoring, and of each step with its number."""

    def __init__(self, events: Events) -> None:
        super().__init__()
        self._events = events

    def on_train_begin(self, logs: Any = None) -> None:
        step = int(self.model.optimizer.iterations.numpy())
        self._events.note("restored", step=step)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        step = int(self.model.optimizer.iterations.numpy())
        self._events.note("step", step=step)


def load(seconds: float) -> None:
    """What a program may load before `fit`: parses text, on one core."""
    text = " ".join(map(str, range(10_000)))
    begun = time.process_time()
    while time.process_time() - begun < seconds:
        np.array(text.split(), np.int64)


def digest_of(model: Any) -> str:
    """Of what this rank holds: its shard, its slots and the dense weights."""
    found = hashlib.sha256()
    for variable in (*model.variables, *model.optimizer.variables):
        value = variable.value if hasattr(variable, "value") else variable
        found.update(np.asarray(value).tobytes())
    return found.hexdigest()


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    job = json.loads((folder / "job.json").read_text())
    imported = time.monotonic()
    cpu = time.process_time()
    keras.utils.set_random_seed(1)
    strategy = tfdist_ext.HybridParallelStrategy()
    events = Events(folder, strategy.rank)
    events.note("started", started(), pid=os.getpid())
    events.note("imported", imported, cpu=cpu)
    events.note("met")
    load(job["load_seconds"])
    events.note("loaded")
    model = saving.make_model(strategy, job["rows"])
    data = saving.make_data(job["rows"], BATCH)
    events.note("built")
    try:
        model.fit(
            data,
            steps_per_epoch=job["steps"],
            verbose=0,
            callbacks=[
                Resume(folder / "run", every=job["every"]),
                Noted(events),
            ],
        )
    except tf.errors.OpError:
        events.note("noticed")
        raise
    (folder / f"digest-{strategy.rank}").write_text(digest_of(model))


if __name__ == "__main__":
    main()
