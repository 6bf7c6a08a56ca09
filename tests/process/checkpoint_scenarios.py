# SPDX-License-Identifier: Apache-2.0
"""Saves and restores trained models, on any number of ranks.

`save` trains, saves a path, notes tables and slots, trains on and notes them
again in PATH.npz. `restore` builds the model anew with its own placement,
restores, and must find the same, before and after training on.
"""

import contextlib
from unittest import mock

import numpy as np
import tensorflow as tf

import tfdist_ext
from tfdist_ext.embedding import checkpoint_slices
from tfdist_ext.layers import FullSparse
from tfdist_ext.saving.checkpoint_index import Index
from tfdist_ext.tables.placement import TablePlacement

keras = tf.keras
ROWS, UNITS, BATCH = 53, 6, 12
WEIGHTS = ".weights.h5" if hasattr(keras, "ops") else ""


def pieces(size):
    """Tables of more than `size` bytes are written and read in pieces."""
    return mock.patch.object(checkpoint_slices, "PIECE", size)


@contextlib.contextmanager
def counted_pieces():
    """Whether files have the pieces that are read as they are, or None."""
    found = []
    stored = Index.stored

    def counting(self, *args):
        found.append(stored(self, *args))
        return found[-1]

    with mock.patch.object(Index, "stored", counting):
        yield found


def data(first, steps):
    rng = np.random.default_rng(7)
    ids = rng.integers(0, ROWS, [200, 4])
    labels = rng.normal(size=[200, 1]).astype(np.float32)
    start = first * BATCH
    part = slice(start, start + steps * BATCH)
    return tf.data.Dataset.from_tensor_slices((ids[part], labels[part])).batch(
        BATCH
    )


def make_model(strategy, placement):
    if placement == "grid":
        placement = TablePlacement.grid(strategy.world_size // 2, 2)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input([4], dtype="int64"),
                FullSparse(
                    UNITS,
                    ROWS,
                    sharding=placement,
                    kernel_initializer="glorot_uniform",
                    name="sparse",
                ),
                keras.layers.Dense(1, name="dense"),
            ]
        )
        model.compile(tfdist_ext.optimizers.Adagrad(0.1), "mse")
        model.optimizer.build(model.trainable_variables)
    return model


def state(strategy, model):
    """Tables and slots as whole arrays, dense weights, iterations."""
    values = {}
    for i, variable in enumerate(model.optimizer.variables):
        values[f"optimizer/{i}"] = strategy.gather_table(variable)
    values["kernel"] = strategy.gather_table(model.get_layer("sparse"))
    for i, variable in enumerate(model.get_layer("dense").weights):
        values[f"dense/{i}"] = np.array(variable)
    return values


def save(strategy, path, placement, form):
    model = make_model(strategy, placement)
    model.fit(data(0, 5), verbose=0)
    noted = {f"a/{k}": v for k, v in state(strategy, model).items()}
    write(model, str(path), form)
    model.fit(data(5, 3), verbose=0)
    noted |= {f"b/{k}": v for k, v in state(strategy, model).items()}
    if strategy.rank == 0:
        np.savez(f"{path}.npz", **noted)


def write(model, path, form):
    if form == "checkpoint":
        saver = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        saver.write(path)
    elif form == "pieces":
        with pieces(96):
            write(model, path, "checkpoint")
    elif form == "weights":
        model.save_weights(path + WEIGHTS)
    else:
        model.save(path + ".keras")


def restore(strategy, path, placement, form):
    noted = np.load(f"{path}.npz")
    model = read(strategy, str(path), placement, form)
    for name, value in state(strategy, model).items():
        np.testing.assert_array_equal(value, noted[f"a/{name}"], name)
    model.fit(data(5, 3), verbose=0)
    for name, value in state(strategy, model).items():
        np.testing.assert_allclose(
            value, noted[f"b/{name}"], rtol=1e-5, atol=1e-6, err_msg=name
        )


def read(strategy, path, placement, form):
    model = make_model(strategy, placement)
    if form == "checkpoint":
        saver = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        status = saver.read(path)
        status.assert_existing_objects_matched()
    elif form == "pieces":
        with pieces(96):
            return read(strategy, path, placement, "checkpoint")
    elif form == "same_pieces":
        with pieces(96), counted_pieces() as found:
            model = read(strategy, path, placement, "checkpoint")
        assert found and None not in found
    elif form == "weights":
        model.load_weights(path + WEIGHTS)
    else:
        with strategy.scope():
            model = keras.models.load_model(path + ".keras")
    return model
