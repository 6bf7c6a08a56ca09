# SPDX-License-Identifier: Apache-2.0
"""Every way of Keras 3 to save and to load, on two or more ranks."""

import io

import keras
import numpy as np
import tensorflow as tf

# Names taken before there is a strategy, as programs do.
from files_models import assert_equal
from files_models import names_in
from files_models import state
from files_models import trained
from files_models import weights
from fit_models import make_model
from keras.models import save_model

import tfdist_ext


def whole_models(strategy, folder):
    """Every function that writes a model, read at all ranks and in one."""
    model = trained(strategy)
    expected = state(strategy, model)
    opened = io.BytesIO()
    ways = {
        "method.keras": model.save,
        "function.keras": lambda path: save_model(model, path),
        "saving.keras": lambda path: keras.saving.save_model(model, str(path)),
        "new/folder": lambda path: model.save(path, zipped=False),
    }
    for name, save in ways.items():
        save(folder / name)
        with strategy.scope():
            loaded = keras.saving.load_model(folder / name)
        assert_equal(state(strategy, loaded), expected)
        alone = keras.models.load_model(folder / name)  # outside of the scope
        assert_equal(
            [np.array(v) for v in (*alone.optimizer.variables, *alone.weights)],
            expected[: len(alone.optimizer.variables) + len(alone.weights)],
        )
    model.save(opened, zipped=False)
    assert bool(opened.getvalue()) == (strategy.rank == 0)
    if strategy.rank == 0:
        (folder / "opened.keras").write_bytes(opened.getvalue())
    strategy.collectives.barrier("written")
    with strategy.scope():
        loaded = keras.models.load_model(folder / "opened.keras")
    assert_equal(state(strategy, loaded), expected)
    assert not list(folder.rglob(".writing-*"))


def weights_only(strategy, folder):
    """Weights in one file, in parts, over what was there, and skipped."""
    model = trained(strategy)
    expected = weights(strategy, model)
    ways = {
        "one.weights.h5": model.save_weights,
        "free.weights.h5": lambda p: keras.saving.save_weights(model, p),
        "parts.weights.json": lambda p: model.save_weights(
            p, max_shard_size=7e-7
        ),
    }
    for name, save in ways.items():
        for _ in range(2):
            save(folder / name)
        loaded = make_model(strategy)
        keras.saving.load_weights(loaded, folder / name)
        assert_equal(weights(strategy, loaded), expected)
    assert names_in(folder) == {
        "one.weights.h5",
        "free.weights.h5",
        "parts.weights.json",
        "parts_00000.weights.h5",
        "parts_00001.weights.h5",
    }
    with strategy.scope():
        other = keras.Sequential(
            [
                keras.Input([3], dtype="int64"),
                tfdist_ext.layers.FullSparse(4, 41, sharding="row"),
                keras.layers.Dense(1),
            ]
        )
    before = strategy.gather_table(other.layers[0])
    other.load_weights(folder / "one.weights.h5", skip_mismatch=True)
    np.testing.assert_array_equal(
        strategy.gather_table(other.layers[0]), before
    )
    assert_equal(weights(strategy, other)[2:], expected[2:])


def without_tables(strategy, folder):
    """Models of the strategy without tables are written once as well."""
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input([3]),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(1),
            ]
        )
        model.compile("adam", "mse")
    expected = weights(strategy, model)
    for name, save in {
        "m.keras": model.save,
        "m.weights.h5": model.save_weights,
        "new/m.h5": model.save,
        "new/folder": lambda p: model.save(p, zipped=False),
        "e": model.export,
        "s": lambda p: tf.saved_model.save(model, str(p)),
        "e.tflite": lambda p: model.export(p, format="litert"),
    }.items():
        for _ in range(2):
            save(folder / name)
        if name in ("e", "s"):
            tf.saved_model.load(str(folder / name))
        elif name == "m.weights.h5":
            model.load_weights(folder / name)
            assert_equal(weights(strategy, model), expected)
        elif name != "e.tflite":
            loaded = keras.models.load_model(folder / name, compile=False)
            assert_equal(weights(strategy, loaded), expected)
    assert not list(folder.rglob(".writing-*"))
