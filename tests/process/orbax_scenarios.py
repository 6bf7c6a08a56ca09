# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of Keras's OrbaxCheckpoint, at other ranks and in stock Keras."""

import contextlib
import os
import pathlib

import keras
import numpy as np
import pytest
import safetensors_scenarios
import tensorflow as tf
from files_models import refused

import tfdist_ext
from tfdist_ext.layers import DistributedEmbedding
from tfdist_ext.layers import Embedding
from tfdist_ext.layers import FeatureConfig
from tfdist_ext.layers import TableConfig

ITEMS, USERS = 41, 23
OWN = tfdist_ext.optimizers
OPTIMIZERS = {
    "own": lambda: OWN.Adagrad(0.1),
    "keras": lambda: keras.optimizers.Adam(0.1),
    "split": lambda: OWN.Split(keras.optimizers.Lamb(0.1), OWN.Adam(0.1)),
    "same": lambda: OWN.Split(keras.optimizers.Adam(0.1), OWN.Adam(0.2)),
}


def data(samples=32, batch=8):
    rng = np.random.default_rng(3)
    ids = {
        "item": rng.integers(0, ITEMS, [samples, 3]),
        "user": rng.integers(0, USERS, [samples, 1]),
    }
    labels = rng.random([samples, 1]).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((ids, labels)).batch(batch)


def make_model(strategy, optimizer="own", sharding="row", seed=1, stock=False):
    """A model whose tables are partitioned, or those of stock Keras."""

    def table(rows, dim, name, **arguments):
        arguments["embeddings_initializer"] = keras.initializers.RandomUniform(
            seed=seed
        )
        if stock:
            return keras.layers.Embedding(rows, dim, name=name, **arguments)
        return Embedding(rows, dim, name=name, sharding=sharding, **arguments)

    with strategy.scope() if strategy else contextlib.nullcontext():
        item = keras.Input([3], dtype="int64", name="item")
        user = keras.Input([1], dtype="int64", name="user")
        rows = keras.layers.Concatenate(name="rows")(
            [
                keras.layers.Flatten(name="f1")(table(ITEMS, 4, "items")(item)),
                keras.layers.Flatten(name="f2")(table(USERS, 6, "users")(user)),
            ]
        )
        rows = keras.layers.Dropout(0.1, seed=4, name="drop")(rows)
        outputs = keras.layers.Dense(1, name="top")(rows)
        model = keras.Model({"item": item, "user": user}, outputs, name="model")
        model.compile(OPTIMIZERS[optimizer](), "mse", metrics=["mae"])
    return model


def state(strategy, model):
    """Whole tables and slots by the ends of their paths."""

    def whole(variable):
        return np.array(
            strategy.gather_table(variable) if strategy else variable
        )

    found = {each.path: whole(each) for each in model.weights}
    for variable in model.optimizer.variables:
        # Keras numbers optimizers.
        name, _, slot = variable.path.partition("/")
        key = f"{name.rstrip('_0123456789')} {slot}"
        # Both parts of an optimizer may have one name.
        found[f"{key} again" if key in found else key] = whole(variable)
    return found


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, name)


def goes_on(strategy, model):
    """The ranks can exchange and train after an error."""
    total = strategy.reduce("SUM", tf.constant(1.0), axis=None)
    assert float(total) == strategy.world_size
    model.fit(data(), epochs=1, verbose=0)


def write(strategy, folder, optimizer="own"):
    """Writes by `fit`; returns what the last checkpoint must have."""
    folder = pathlib.Path(folder)
    model = make_model(strategy, optimizer)
    saved = keras.callbacks.OrbaxCheckpoint(str(folder / "run"), max_to_keep=2)
    model.fit(data(), epochs=3, verbose=0, callbacks=[saved])
    saved.wait_until_finished()
    names = {p.name for p in (folder / "run").iterdir()}
    assert names == {"1", "2"}, names
    return state(strategy, model)


def read(strategy, folder, expected, optimizer="own"):
    """Into another placement and into a model of its config; goes on."""
    folder = str(pathlib.Path(folder) / "run")
    model = make_model(strategy, optimizer, sharding="column", seed=9)
    before = state(strategy, model)
    assert not np.array_equal(
        before["items/embeddings"], expected["items/embeddings"]
    )
    model.load_weights(folder)
    assert_equal(state(strategy, model), expected)
    with strategy.scope():
        loaded = keras.saving.load_model(folder)
    assert_equal(state(strategy, loaded), expected)
    losses = [
        each.fit(data(), epochs=1, verbose=0).history["loss"]
        for each in (model, loaded)
    ]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    again = make_model(strategy, optimizer, seed=9)
    keras.saving.load_weights(again, folder)
    assert_equal(state(strategy, again), expected)


def stock_reads(strategy, folder, expected):
    """In a process without a strategy, as layers of Keras."""
    assert strategy is None
    model = make_model(None, "keras", seed=9, stock=True)
    model.optimizer.build(model.trainable_variables)
    model.load_weights(str(pathlib.Path(folder) / "run"))
    assert_equal(state(None, model), expected)


def stock_writes(strategy, folder):
    """A stock model's checkpoint, with the optimizer of `stock_reads`."""
    assert strategy is None
    model = make_model(None, "keras", stock=True)
    saved = keras.callbacks.OrbaxCheckpoint(str(pathlib.Path(folder) / "run"))
    model.fit(data(), epochs=1, verbose=0, callbacks=[saved])
    return state(None, model)


def read_of_stock(strategy, folder, expected):
    """Ranks read their parts of tables of stock Keras."""
    model = make_model(strategy, "keras", seed=9)
    model.load_weights(str(pathlib.Path(folder) / "run"))
    assert_equal(state(strategy, model), expected)


def write_vocabularies(strategy, folder):
    model = safetensors_scenarios.make_model(strategy)
    inputs = safetensors_scenarios.inputs()
    dataset = tf.data.Dataset.from_tensor_slices((inputs, tf.ones([16, 1])))
    saved = keras.callbacks.OrbaxCheckpoint(
        str(pathlib.Path(folder) / "run"), save_weights_only=True
    )
    model.fit(dataset.batch(8), epochs=2, verbose=0, callbacks=[saved])
    return safetensors_scenarios.state(strategy, model)


def read_vocabularies(strategy, folder, expected):
    """Keys, texts and tables of every dtype, under other placements."""
    folder = str(pathlib.Path(folder) / "run")
    model = safetensors_scenarios.make_model(strategy, other=True, seed=50)
    model.load_weights(folder)
    found = safetensors_scenarios.state(strategy, model)
    assert_equal(found, expected)


def own_optimizer_of_a_table(strategy, folder):
    """Slots of `TableConfig.optimizer` are in the checkpoint."""

    def make(seed):
        with strategy.scope():
            table = TableConfig(
                "t",
                vocabulary_size=ITEMS,
                embedding_dim=4,
                initializer=keras.initializers.RandomUniform(seed=seed),
                optimizer=OWN.Adam(0.1),
            )
            feature = FeatureConfig("item", table, (None, 3), (None, 4))
            inputs = {"item": keras.Input([3], dtype="int64", name="item")}
            rows = DistributedEmbedding({"item": feature}, name="e")(inputs)
            outputs = keras.layers.Dense(1, name="top")(rows["item"])
            model = keras.Model(inputs, outputs, name="model")
            model.compile(OWN.Adagrad(0.1), "mse")
            model.optimizer.build(model.trainable_variables)
        return model

    def slots(model):
        return [
            strategy.gather_table(variable)
            for own in model.optimizer.table_optimizers
            for variable in own.variables
        ]

    model = make(1)
    saved = keras.callbacks.OrbaxCheckpoint(str(folder / "run"))
    dataset = data().map(lambda x, y: ({"item": x["item"]}, y))
    model.fit(dataset, epochs=1, verbose=0, callbacks=[saved])
    expected = slots(model)
    assert any(each.shape == (ITEMS, 4) and each.any() for each in expected)
    other = make(2)
    other.load_weights(str(folder / "run"))
    for found, value in zip(slots(other), expected, strict=True):
        np.testing.assert_array_equal(found, value)
    assert_equal(state(strategy, other), state(strategy, model))


def options(strategy, folder):
    """By batches, only the best, in the foreground, only the weights."""
    model = make_model(strategy)
    make = keras.callbacks.OrbaxCheckpoint
    callbacks = {
        "batches": make(folder / "batches", save_freq=3, max_to_keep=None),
        "best": make(
            folder / "best",
            monitor="mae",
            save_best_only=True,
            mode="max",
            initial_value_threshold=1e9,
        ),
        "weights": make(
            folder / "weights", save_weights_only=True, save_on_background=False
        ),
    }
    model.fit(data(), epochs=2, verbose=0, callbacks=[*callbacks.values()])
    found = {
        name: sorted(p.name for p in (folder / name).iterdir())
        for name in callbacks
    }
    assert found == {"batches": ["3", "6"], "best": [], "weights": ["1"]}
    assert callbacks["batches"].save_on_background
    expected = state(strategy, model)
    other = make_model(strategy, seed=9)
    other.load_weights(folder / "weights")
    for name, value in state(strategy, other).items():
        if not name.startswith("adagrad "):
            np.testing.assert_array_equal(value, expected[name], name)
    with refused(Exception, "model configuration"), strategy.scope():
        keras.saving.load_model(folder / "weights")
    goes_on(strategy, model)


def failures(strategy, folder):
    """What rank 0 cannot write, or one rank cannot read, fails on all."""
    model = make_model(strategy)
    saved = keras.callbacks.OrbaxCheckpoint(folder / "run", max_to_keep=None)
    model.fit(data(), epochs=1, verbose=0, callbacks=[saved])
    before = state(strategy, model)
    # Step 0 is there already.
    saved = keras.callbacks.OrbaxCheckpoint(folder / "run", max_to_keep=None)
    with refused(Exception, "already exists"):
        model.fit(data(), epochs=1, verbose=0, callbacks=[saved])
    again = make_model(strategy, seed=9)
    untouched = state(strategy, again)
    if strategy.rank == strategy.world_size - 1:
        with pytest.MonkeyPatch.context() as patch:
            import orbax.checkpoint

            def fail(*args, **kwargs):
                raise OSError("disk is broken")

            patch.setattr(orbax.checkpoint.v1, "load_checkpointables", fail)
            with refused(Exception, "disk is broken"):
                again.load_weights(folder / "run")
    else:
        with refused(Exception, "disk is broken"):
            again.load_weights(folder / "run")
    assert_equal(state(strategy, again), untouched)
    again.load_weights(folder / "run")
    assert_equal(state(strategy, again), before)
    goes_on(strategy, again)


def other_models(strategy, folder):
    """Names and shapes that differ are errors; Keras would skip them."""
    model = make_model(strategy)
    saved = keras.callbacks.OrbaxCheckpoint(folder / "run")
    model.fit(data(), epochs=1, verbose=0, callbacks=[saved])
    for name, rows, text in (
        ("other", ITEMS, "['other/embeddings'] (1)"),
        ("items", ITEMS + 1, f"({ITEMS}, 4) in the Orbax checkpoint"),
    ):
        with strategy.scope():
            layers = [
                keras.Input([3], dtype="int64"),
                Embedding(rows, 4, name=name, sharding="row"),
            ]
            other = keras.Sequential(layers, name="model")
        before = strategy.gather_table(other.layers[0])
        with refused(Exception, "Orbax checkpoint"):
            other.load_weights(folder / "run")
        after = strategy.gather_table(other.layers[0])
        np.testing.assert_array_equal(before, after, text)
    goes_on(strategy, model)


def numbered_names(strategy, folder):
    """A Sequential model, whose name Keras numbers, with seeds."""

    def make(seed):
        with strategy.scope():
            model = keras.Sequential(
                [
                    keras.Input([3], dtype="int64"),
                    Embedding(
                        ITEMS,
                        4,
                        name="items",
                        sharding="row",
                        embeddings_initializer=keras.initializers.RandomUniform(
                            seed=seed
                        ),
                    ),
                    keras.layers.Flatten(),
                    keras.layers.Dropout(0.2),
                    keras.layers.Dense(1, name="top"),
                ]
            )
            model.compile(OWN.Adagrad(0.1), "mse")
        return model

    def values(model):
        found = [*model.variables, *model.optimizer.variables]
        return [strategy.gather_table(each) for each in found]

    model = make(1)
    saved = keras.callbacks.OrbaxCheckpoint(os.fspath(folder / "run"))
    dataset = data().map(lambda x, y: (x["item"], y))
    model.fit(dataset, epochs=1, verbose=0, callbacks=[saved])
    other = make(2)
    assert other.name != model.name
    other.load_weights(folder / "run")
    with strategy.scope():
        loaded = keras.saving.load_model(folder / "run")
    for each in (other, loaded):
        for found, value in zip(values(each), values(model), strict=True):
            np.testing.assert_array_equal(found, value)
