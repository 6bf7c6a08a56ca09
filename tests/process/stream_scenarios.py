# SPDX-License-Identifier: Apache-2.0
"""Streams whose training is ended anywhere, and goes on elsewhere."""

import pathlib
import threading
import time

import numpy as np
import tensorflow as tf
from resume_scenarios import SIGNALS
from resume_scenarios import barrier
from resume_scenarios import beating_in_every_step
from stream_models import counts
from stream_models import make_counter
from stream_models import parse
from stream_models import write_files

from tfdist_ext.callbacks import Resume
from tfdist_ext.data import PositionedDataset

keras = tf.keras
RECORDS, BATCH = 200, 7


class FailsAfter(keras.callbacks.Callback):
    """Fails on one rank after some batches."""

    def __init__(self, strategy, steps):
        super().__init__()
        self.mine = strategy.rank == strategy.world_size - 1
        self.left = steps

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.01)  # for the threads that write
        self.left -= 1
        if self.mine and self.left == 0:
            raise RuntimeError("stop here")


def train(strategy, folder, stream, *callbacks, **options):
    """Trains a model that counts, as a program does that is started again."""
    model = make_counter(strategy, RECORDS)
    saved = Resume(folder / "run", every=3, signals=SIGNALS)
    data = stream.batches(BATCH, **options).map(parse).prefetch(2)
    with beating_in_every_step():
        model.fit(data, verbose=0, callbacks=[saved, *callbacks])
    return model


def begin(strategy, folder, file_format, steps):
    """Trains a part of what is there, and fails."""
    data = folder / "data"
    if strategy.rank == 0 and not data.exists():
        data.mkdir()
        rest = write_files(data, file_format, RECORDS)
        (folder / "rest").mkdir()
        for path, tail in rest.items():
            (folder / "rest" / path.name).write_bytes(tail)
    barrier(strategy)
    stream = PositionedDataset.from_files(data)
    try:
        train(strategy, folder, stream, FailsAfter(strategy, steps))
        raise AssertionError("did not fail")
    except (RuntimeError, tf.errors.AbortedError) as error:
        assert "stop here" in str(error), error
    barrier(strategy)


def end(strategy, folder):
    """Trains the rest, which is appended meanwhile."""
    stream = PositionedDataset.from_files(folder / "data")
    writer = threading.Thread(target=append, args=[folder])
    if strategy.rank == 0:
        writer.start()
    model = train(strategy, folder, stream, wait=4.0, linger=0.2)
    if strategy.rank == 0:
        writer.join()
    np.testing.assert_allclose(counts(strategy, model), 1, atol=1e-5)
    # Nothing is left.
    rest = list(stream.batches(BATCH))
    assert not rest, rest


def append(folder: pathlib.Path):
    """Appends the rest of the files by pieces that end within records."""
    for path in sorted((folder / "rest").iterdir()):
        tail = path.read_bytes()
        with (folder / "data" / path.name).open("ab") as file:
            for first in range(0, len(tail), 101):
                file.write(tail[first : first + 101])
                file.flush()
                time.sleep(0.05)
