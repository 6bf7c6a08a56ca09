# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are written while training changes the rows."""

import contextlib
import time
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from checkpoint_scenarios import pieces

import tfdist_ext
from tfdist_ext.callbacks import Resume
from tfdist_ext.layers import FullSparse
from tfdist_ext.saving import checkpoint_files

keras = tf.keras
ROWS, UNITS, STEPS, SAVED = 70, 6, 12, 3
OPTIMIZERS = {
    "adam": lambda: tfdist_ext.optimizers.Adam(0.05),
    "row-wise": lambda: tfdist_ext.optimizers.RowWiseAdagrad(0.05),
    "clipped": lambda: tfdist_ext.optimizers.Adagrad(0.05, clipnorm=0.1),
    "of Keras": lambda: keras.optimizers.Adam(0.05),
}
PLACEMENTS = ("row", "column", "table", "grid")


def make_model(strategy, make_optimizer):
    """A table for each placement."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        ids = keras.Input([4], dtype="int64")
        found = [
            FullSparse(UNITS, ROWS + i, sharding=placement)(ids)
            for i, placement in enumerate(PLACEMENTS)
        ]
        outputs = keras.layers.Dense(1)(keras.layers.Concatenate()(found))
        model = keras.Model(ids, outputs)
        model.compile(make_optimizer(), "mse")
        model.optimizer.build(model.trainable_variables)
    return model


def state(strategy, model):
    """Tables and slots as whole arrays, and dense weights."""
    variables = [*model.weights, *model.optimizer.variables]
    return [strategy.gather_table(v) for v in variables if v.shape.rank]


class Notes(keras.callbacks.Callback):
    """Notes the state that is saved, and how many steps end meanwhile."""

    def __init__(self, strategy, path):
        super().__init__()
        self.strategy, self.path = strategy, path
        self.during = 0

    def on_train_batch_end(self, batch, logs=None):
        if batch + 1 == SAVED:
            self.expected = state(self.strategy, self.model)
        written = tf.io.gfile.exists(f"{self.path}.index")
        self.during += batch >= SAVED and not written


class Fail(keras.callbacks.Callback):
    """Fails on one rank in the step that follows the start of a save."""

    def __init__(self, strategy):
        super().__init__()
        self.strategy = strategy

    def on_train_batch_end(self, batch, logs=None):
        if batch == SAVED and self.strategy.rank == 1:
            raise RuntimeError("stop here")


@contextlib.contextmanager
def slow_disk(seconds=0.03):
    write = tf.raw_ops.SaveV2

    def slow(**kwargs):
        time.sleep(seconds)
        return write(**kwargs)

    with mock.patch.object(tf.raw_ops, "SaveV2", slow):
        yield


def with_adam(strategy, folder):
    check_saved_step(strategy, folder, ["adam"])


def with_each_optimizer(strategy, folder):
    check_saved_step(strategy, folder, OPTIMIZERS)


def after_a_failure(strategy, folder):
    """A thread that writes when `fit` fails takes no part in the next one."""
    ids = np.random.default_rng(0).integers(0, ROWS, [16 * STEPS, 4])
    data = tf.data.Dataset.from_tensor_slices((ids, ids[:, :1] / ROWS))
    model = make_model(strategy, OPTIMIZERS["adam"])
    resume = Resume(str(folder), every=SAVED)
    callbacks = [resume, Fail(strategy)]
    failures = (RuntimeError, tf.errors.AbortedError)
    with pieces(512), slow_disk(0.3):
        with pytest.raises(failures, match="stop here"):
            model.fit(data.batch(16), verbose=0, callbacks=callbacks)
        assert not checkpoint_files.found_in(str(folder))
    with pieces(512):
        model.fit(data.batch(16), verbose=0, callbacks=[resume])
    (last, *_) = checkpoint_files.found_in(str(folder))
    assert last.step == STEPS


def check_saved_step(strategy, folder, optimizers):
    """The checkpoint has the rows of the step before which it was begun."""
    ids = np.random.default_rng(0).integers(0, ROWS, [16 * STEPS, 4])
    data = tf.data.Dataset.from_tensor_slices((ids, ids[:, :1] / ROWS))
    for name in optimizers:
        model = make_model(strategy, OPTIMIZERS[name])
        directory = str(folder / name)
        path = checkpoint_files.Checkpoint(SAVED).path(directory)
        notes = Notes(strategy, path)
        callbacks = [Resume(directory, every=SAVED), notes]
        with pieces(512), slow_disk():
            model.fit(data.batch(16), verbose=0, callbacks=callbacks)
        assert notes.during > 3, (name, notes.during)
        reader = tf.train.load_checkpoint(path)
        found = [
            reader.get_tensor(key)
            for key, shape in reader.get_variable_to_shape_map().items()
            if shape
        ]
        for value in notes.expected:
            same = [each for each in found if each.shape == value.shape]
            closest = min(np.abs(each - value).max() for each in same)
            assert closest == 0, (name, value.shape, closest)
        now = state(strategy, model)
        assert not any(map(np.array_equal, now, notes.expected)), name
