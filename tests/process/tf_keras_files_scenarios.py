# SPDX-License-Identifier: Apache-2.0
"""Every way of tf_keras to save and to load, on two or more ranks.

Its TensorFlow format is tried by checkpoint_scenarios.py.
"""

import contextlib

import numpy as np
import tensorflow as tf

# Names taken before there is a strategy, as programs do.
from files_models import assert_equal
from files_models import goes_on
from files_models import names_in
from files_models import refused
from files_models import state
from files_models import trained
from files_models import weights
from fit_models import data
from fit_models import make_model
from tf_keras.models import save_model

keras = tf.keras


def refusals(strategy, folder):
    """What cannot hold whole tables is refused before it is written."""
    model = trained(strategy)
    for path, save in {
        "m": model.save,
        "m.h5": model.save,
        "m.keras": model.save,
        "m5": lambda p: model.save(p, save_format="h5"),
        "f": lambda p: save_model(model, p, save_format="tf"),
        "f.keras": lambda p: save_model(model, p),
        "w.h5": model.save_weights,
        "w.weights.h5": model.save_weights,
        "w5": lambda p: model.save_weights(p, save_format="h5"),
    }.items():
        with refused(ValueError, "partitioned tables", str(folder / path)):
            save(str(folder / path))
    with refused(ValueError, "partitioned tables", "TFLite"):
        tf.lite.TFLiteConverter.from_keras_model(model)
    assert not names_in(folder)
    goes_on(strategy, model)


class _One:
    """Stands for the strategy where there is none."""

    @staticmethod
    def scope():
        return contextlib.nullcontext()

    @staticmethod
    def gather_table(variable):
        return np.asarray(tf.convert_to_tensor(variable))


def files_of_one_process(strategy, folder):
    """What one process has saved is read in parts, slots included."""
    # On all ranks: layers made on one of them only have other names there.
    folder = folder / str(strategy.rank)
    folder.mkdir()
    alone = make_model(_One, sharding="replicated")
    alone.fit(data(), epochs=1, verbose=0)
    for name in ("a.keras", "a.h5"):
        alone.save(folder / name)
    alone.save_weights(folder / "b.weights.h5")
    expected = state(_One, alone)
    model = make_model(strategy)
    with strategy.scope():
        model.optimizer.build(model.trainable_variables)
    model.load_weights(str(folder / "b.weights.h5"))
    assert_equal(state(strategy, model), expected)
    with strategy.scope():
        loaded = keras.models.load_model(folder / "a.keras")
    assert_equal(state(strategy, loaded), expected)
    for arguments in ({}, {"by_name": True, "skip_mismatch": True}):
        with refused(Exception, "legacy format", "a.h5"):
            model.load_weights(str(folder / "a.h5"), **arguments)
    goes_on(strategy, model)


def plain_model(strategy):
    """A model without tables, with a variable that ranks sum on reading."""
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input([3]),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(1),
            ]
        )
        model.seen = keras.metrics.Sum()
        model.compile("adam", "mse", metrics=["mae"])
    return model


def without_tables(strategy, folder):
    """Such models are written once as well, and their sums stay sums."""
    rng = np.random.default_rng(0)
    dataset = tf.data.Dataset.from_tensor_slices(
        (rng.normal(size=[16, 3]), rng.normal(size=[16, 1]))
    ).batch(8)
    model = plain_model(strategy)
    model.fit(dataset, epochs=1, verbose=0)
    strategy.run(lambda: model.seen.update_state(4.0))
    total = 4.0 * strategy.world_size
    expected = weights(strategy, model)
    for name, save in {
        "m.h5": model.save,
        "m.keras": model.save,
        "m.weights.h5": model.save_weights,
        "w.h5": model.save_weights,
        "folder": model.save,
    }.items():
        save(str(folder / name))
        before = names_in(folder)
        with refused(FileExistsError, "overwrite=True", name):
            save(str(folder / name), overwrite=False)
        assert names_in(folder) == before
        if "w" in name:
            loaded = plain_model(strategy)
            loaded.load_weights(str(folder / name))
        else:
            with strategy.scope():
                loaded = keras.models.load_model(folder / name)
        assert_equal(weights(strategy, loaded), expected)
        if name == "m.weights.h5":
            assert float(loaded.seen.result()) == total
    assert not list(folder.rglob(".writing-*"))
