# SPDX-License-Identifier: Apache-2.0
"""Keras 3: callbacks that write files."""

import json

import keras
import numpy as np
from files_models import assert_equal
from files_models import names_in
from files_models import refused
from files_models import state
from fit_models import data
from fit_models import make_model


def callbacks(strategy, folder):
    """ModelCheckpoint with each of its options, and CSVLogger."""
    model = make_model(strategy)
    checkpoint = keras.callbacks.ModelCheckpoint
    log = folder / "log.csv"
    for _ in range(2):
        model.fit(
            data(),
            epochs=2,
            validation_data=data(seed=1),
            verbose=0,
            callbacks=[
                checkpoint(folder / "{epoch}" / "{val_loss:.0f}.keras"),
                checkpoint(
                    folder / "b{batch}.weights.h5",
                    save_freq=3,
                    save_weights_only=True,
                ),
                checkpoint(
                    folder / "best.keras",
                    save_best_only=True,
                    initial_value_threshold=0.0,
                ),
                keras.callbacks.CSVLogger(log, append=True),
            ],
        )
    found = names_in(folder)
    assert {name for name in found if "/" in name} == {"1/1.keras", "2/1.keras"}
    assert {"b3.weights.h5", "b6.weights.h5", "b1.weights.h5"} <= found
    assert not {name for name in found if "best" in name or "{" in name}
    # A header, and one line for every epoch of the two.
    assert len(log.read_text().splitlines()) == 5, log.read_text()
    with strategy.scope():
        last = keras.models.load_model(folder / "2" / "1.keras")
    assert_equal(state(strategy, last), state(strategy, model))


class Stop(keras.callbacks.Callback):
    """Ends training at the end of an epoch, as a crash would."""

    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            raise RuntimeError("stop here")


class Link(keras.callbacks.Callback):
    """Keeps a second name of a file from one epoch to the next."""

    def __init__(self, path):
        super().__init__()
        self.path = path
        self.second = path.with_suffix(".second")
        self.texts = []

    def on_epoch_begin(self, epoch, logs=None):
        if self.second.exists():
            self.texts.append(self.second.read_text())
            self.second.unlink()
        if self.path.exists():
            self.second.hardlink_to(self.path)


def progress_is_whole(strategy, folder):
    """A crash finds the old progress or the new: no file is overwritten."""
    folder = folder / str(strategy.rank)  # rank 0 alone has files in it
    backup = keras.callbacks.BackupAndRestore(folder)
    link = Link(folder / "training_metadata.json")
    model = make_model(strategy)
    model.fit(data(), epochs=4, verbose=0, callbacks=[backup, link])
    epochs = [json.loads(text)["epoch"] for text in link.texts]
    assert epochs == ([1, 2] if strategy.rank == 0 else []), epochs


def backups(strategy, folder):
    """Training goes on where the weights are, whatever file was written."""
    straight = make_model(strategy)
    straight.fit(data(), epochs=3, verbose=0)
    progress = folder / "training_metadata.json"
    for damage in ("progress is old", "file is cut"):
        model = make_model(strategy)
        backup = keras.callbacks.BackupAndRestore(
            folder, double_checkpoint=True
        )
        with refused(RuntimeError, "stop here"):
            model.fit(data(), epochs=3, verbose=0, callbacks=[backup, Stop(2)])
        strategy.collectives.barrier("stopped")
        if strategy.rank == 0 and damage == "progress is old":
            progress.write_text('{"epoch": 1, "batch": 0}')
        elif strategy.rank == 0:
            last = folder / "latest.weights.h5"
            last.write_bytes(last.read_bytes()[:1000])
        strategy.collectives.barrier("damaged")
        model = make_model(strategy)
        model.fit(data(), epochs=3, verbose=0, callbacks=[backup])
        assert not folder.exists() or not names_in(folder)
        for a, b in zip(
            state(strategy, model), state(strategy, straight), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
