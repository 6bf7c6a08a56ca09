# SPDX-License-Identifier: Apache-2.0
"""Runs whose checkpoints have what has changed since a full one."""

import os
import time
import warnings

import numpy as np
import tensorflow as tf
from checkpoint_scenarios import pieces
from resume_scenarios import SIGNALS
from resume_scenarios import At
from resume_scenarios import barrier
from resume_scenarios import beating_in_every_step
from resume_scenarios import notice
from resume_scenarios import tear

import tfdist_ext
from tfdist_ext import marks
from tfdist_ext.callbacks import Resume
from tfdist_ext.callbacks import update_watch
from tfdist_ext.layers import DistributedEmbedding
from tfdist_ext.layers import DynamicVocabulary
from tfdist_ext.layers import FeatureConfig
from tfdist_ext.layers import TableConfig
from tfdist_ext.saving import checkpoint_files

keras = tf.keras
BATCH, STEPS, EPOCHS, ROWS, DIM = 8, 6, 3, 1200, 4
PLACEMENTS = {"rows": "row", "columns": "column", "whole": "data_parallel"}


def make_model(strategy):
    """Tables of every placement, one of which grows."""

    def feature(name, **options):
        table = TableConfig(
            name,
            embedding_dim=DIM,
            initializer=keras.initializers.RandomNormal(0, 0.3, seed=3),
            combiner="sum",
            **options,
        )
        return FeatureConfig(name, table, (None, 3), (None, DIM))

    features = {
        name: feature(name, vocabulary_size=ROWS, placement=placement)
        for name, placement in PLACEMENTS.items()
    }
    features["grows"] = feature(
        "grows", vocabulary=DynamicVocabulary(ROWS, 2, evict="lru")
    )
    with strategy.scope():
        inputs = {
            name: keras.Input([3], dtype="int64", name=name)
            for name in features
        }
        layer = DistributedEmbedding(features, name="embedding")
        joined = keras.layers.Concatenate()(list(layer(inputs).values()))
        model = keras.Model(inputs, keras.layers.Dense(1)(joined))
        model.compile(tfdist_ext.optimizers.Adagrad(0.1), "mse")
    return model


class Slow(keras.callbacks.Callback):
    """Leaves time for the threads that write; notes what was restored."""

    def __init__(self, strategy):
        super().__init__()
        self.strategy, self.restored = strategy, None

    def on_train_begin(self, logs=None):
        self.restored = state(self.strategy, self.model)

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.03)


def run(strategy, directory, *callbacks):
    keras.backend.clear_session()
    keras.utils.set_random_seed(5)
    rng = np.random.default_rng(0)
    ids = {
        name: rng.integers(0, 150, [BATCH * STEPS, 3])
        for name in (*PLACEMENTS, "grows")
    }
    labels = rng.normal(size=[BATCH * STEPS, 1]).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((ids, labels)).batch(BATCH)
    model, slow = make_model(strategy), Slow(strategy)
    saved = [
        Resume(folder, every=2, signals=SIGNALS, deltas=5)
        for folder in [directory]
        if folder
    ]
    ended = None
    with beating_in_every_step():
        try:
            callbacks = [*saved, slow, *callbacks]
            model.fit(data, epochs=EPOCHS, verbose=0, callbacks=callbacks)
        except SystemExit as end:
            ended = end.code
    return state(strategy, model), slow.restored, ended


def state(strategy, model):
    """Tables, slots, keys and dense weights, whole."""
    tables = model.get_layer("embedding").table_variables()
    slots = update_watch.variables_of_optimizer(model.optimizer)
    found = [strategy.gather_table(each) for each in (*tables, *slots)]
    (keys,) = filter(None, map(marks.keys_of, tables))
    keys = keys.all_keys()
    found += [keys[name] for name in sorted(keys)]
    return [*found, *map(np.array, model.layers[-1].get_weights())]


def begin(strategy, folder):
    """Trains whole, then half of it; says what that had and what it wrote."""
    straight, _, _ = run(strategy, None)
    directory = str(folder / "run")
    stopped, _, ended = run(strategy, directory, At(strategy, 0, 1, notice))
    assert ended == 143
    newest, *_ = checkpoint_files.found_in(directory)
    full = newest.full
    assert full.step < STEPS < newest.step < 2 * STEPS, newest
    last = full.path(directory)
    assert tf.train.latest_checkpoint(directory) == last  # as others read it
    small, large = size_of(newest.path(directory)), size_of(last)
    assert small < 0.6 * large, (small, large)  # keys are whole
    return stopped, straight


def size_of(path):
    return sum(map(os.path.getsize, tf.io.gfile.glob(f"{path}.data-*")))


def end(strategy, folder, stopped, straight):
    """Ends what `begin` has begun at another number of ranks."""
    found, restored, _ = run(strategy, str(folder / "run"))
    for mine, theirs in zip(restored, stopped, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    for mine, theirs in zip(found, straight, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


def begin_in_pieces(strategy, folder):
    with pieces(2048):
        return begin(strategy, folder)


def end_in_pieces(strategy, folder, stopped, straight):
    with pieces(2048):
        end(strategy, folder, stopped, straight)


def falls_back(strategy, folder):
    """Over a torn delta, and over one of another full checkpoint."""
    stopped, straight = begin(strategy, folder)
    directory = str(folder / "run")
    newest, before, *_ = checkpoint_files.found_in(directory)
    barrier(strategy)
    if strategy.rank == 0:
        tear(newest.path(directory))
    barrier(strategy)
    with warnings.catch_warnings(record=True) as w:
        warnings.simplefilter("always")
        found, restored, _ = run(strategy, directory)
    assert any(f"{newest.name}' cannot be read" in str(e.message) for e in w)
    assert not all(map(np.array_equal, restored, stopped))
    for mine, theirs in zip(found, straight, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    left = checkpoint_files.found_in(directory)
    last, full, other = (each for each in left if each.since is None)
    assert last == checkpoint_files.Checkpoint(EPOCHS * STEPS), (
        left
    )  # the last is full
    assert full.step > before.step  # as the first of a run that goes on
    assert left[1].full == full
    barrier(strategy)
    if strategy.rank == 0:
        # Another full one of the same step, as of a run that is not this.
        for path in tf.io.gfile.glob(f"{last.path(directory)}.*"):
            os.remove(path)
        copy(other.path(directory), full.path(directory))
    barrier(strategy)
    with warnings.catch_warnings(record=True) as w:
        warnings.simplefilter("always")
        run(strategy, directory)
    why = f"a delta to an earlier '{full.path(directory)}'"
    assert any(why in str(each.message) for each in w)


def copy(source, target):
    for path in tf.io.gfile.glob(f"{source}.*"):
        tf.io.gfile.copy(path, target + path.removeprefix(source), True)
