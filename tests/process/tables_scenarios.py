# SPDX-License-Identifier: Apache-2.0
"""Saves and restores tables of every placement, on any number of ranks.

For an optimizer, a function builds the model anew and
  save: trains, saves a checkpoint, notes tables and slots in
    FOLDER/<optimizer>.npz, trains on and notes the tables again;
  restore: restores the checkpoint, must find the same bit for bit and train
    on to the same;
  moved: restores it with every table on other ranks;
  write_files: restores the checkpoint and writes it as Keras files;
  read_files: loads these files and must find the same;
  tiny: saves and restores a layer that has tables of a few rows only.
"""

import numpy as np
import tensorflow as tf

import tfdist_ext
from tfdist_ext.layers import DistributedEmbedding
from tfdist_ext.layers import FeatureConfig
from tfdist_ext.layers import TableConfig
from tfdist_ext.tables.placement import TablePlacement

keras = tf.keras
DIM, BATCH, HOTNESS = 6, 12, 3
# Every table has its own number of rows, by which files are searched.
ROWS = {
    "whole": 41,
    "grid": 53,
    "rows": 67,
    "columns": 29,
    "copied": 31,
    "tiny": 3,  # fewer than 4 ranks
    "tiny_whole": 2,
    "rounded": 43,
}
OPTIMIZERS = ("row_wise", "own")
# With "own" these have RowWiseAdagrad for themselves, the others Adagrad.
OWN = ("rows", "copied", "tiny_whole")


def placements(ranks, moved):
    """Of every table: on the first ranks, or on others cut otherwise."""
    last = ranks - 1
    backwards = tuple(reversed(range(ranks)))
    half = max(1, ranks // 2)
    if moved:
        columns = TablePlacement(1, ranks, backwards)
        return {
            "whole": TablePlacement.row_wise(ranks),
            "grid": TablePlacement(ranks // half, half, backwards),
            "rows": columns,
            "columns": TablePlacement.table_wise(last, True),
            "copied": TablePlacement(half, 1, backwards[:half]),
            "tiny": columns,
            "tiny_whole": TablePlacement.data_parallel(),
            "rounded": TablePlacement(1, half, backwards[:half]),
        }
    return {
        "whole": TablePlacement.table_wise(last),
        "grid": TablePlacement.grid(half, ranks // half),
        "rows": TablePlacement(ranks, 1, backwards),
        "columns": TablePlacement.column_wise(ranks, deduplicate=True),
        "copied": TablePlacement.data_parallel(),
        "tiny": TablePlacement.row_wise(ranks),
        "tiny_whole": TablePlacement.table_wise(min(1, last)),
        "rounded": TablePlacement.row_wise(ranks),
    }


def data(first, steps):
    rng = np.random.default_rng(5)
    part = slice(first * BATCH, (first + steps) * BATCH)
    ids = {
        name: rng.integers(0, rows, [200, HOTNESS])[part]
        for name, rows in ROWS.items()
    }
    labels = rng.normal(size=[200, 1]).astype(np.float32)[part]
    return tf.data.Dataset.from_tensor_slices((ids, labels)).batch(BATCH)


def make_layer(optimizer, places):
    """The tables, and one feature of each."""
    features = {}
    for i, (name, rows) in enumerate(ROWS.items()):
        own = optimizer == "own" and name in OWN
        table = TableConfig(
            name,
            rows,
            DIM,
            keras.initializers.RandomNormal(0.0, 0.5, seed=i),
            "rowwiseadagrad" if own else None,
            "sum",
            places[name],
            dtype="bfloat16" if name == "rounded" else "float32",
        )
        features[name] = FeatureConfig(
            name, table, (None, HOTNESS), (None, DIM)
        )
    return DistributedEmbedding(features, name="embedding")


def make_model(strategy, optimizer, moved=False):
    ours = tfdist_ext.optimizers
    kind = ours.RowWiseAdagrad if optimizer == "row_wise" else ours.Adagrad
    with strategy.scope():
        inputs = {
            name: keras.Input([HOTNESS], dtype="int64", name=name)
            for name in ROWS
        }
        layer = make_layer(optimizer, placements(strategy.world_size, moved))
        joined = keras.layers.Concatenate()(
            [tf.nest.flatten(layer(inputs))[i] for i in range(len(ROWS))]
        )
        model = keras.Model(inputs, keras.layers.Dense(1, name="top")(joined))
        model.compile(kind(0.1, stochastic_rounding=False), "mse")
        model.optimizer.build(model.trainable_variables)
    return model


def state(strategy, model):
    """Tables, slots and dense weights as whole arrays."""
    layer = model.get_layer("embedding")
    values = {
        f"table/{name}": tf.cast(table, tf.float32).numpy()
        for name, table in layer.get_embedding_tables().items()
    }
    own = getattr(model.optimizer, "table_optimizers", ())
    for i, optimizer in enumerate([model.optimizer, *own]):
        for k, variable in enumerate(optimizer.variables):
            values[f"slot/{i}/{k}"] = strategy.gather_table(variable)
    for i, variable in enumerate(model.get_layer("top").weights):
        values[f"dense/{i}"] = np.array(variable)
    return values


def check(strategy, model, noted):
    found = state(strategy, model)
    assert set(found) == {key[2:] for key in noted if key[:2] == "a/"}
    for name, value in found.items():
        np.testing.assert_array_equal(value, noted[f"a/{name}"], name)


def save(strategy, folder, optimizer):
    model = make_model(strategy, optimizer)
    model.fit(data(0, 4), verbose=0)
    noted = {f"a/{k}": v for k, v in state(strategy, model).items()}
    saver = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    saver.write(str(folder / optimizer))
    model.fit(data(4, 3), verbose=0)
    noted |= {f"b/{k}": v for k, v in state(strategy, model).items()}
    if strategy.rank == 0:
        np.savez(folder / f"{optimizer}.npz", **noted)


def read(strategy, folder, optimizer, moved=False):
    model = make_model(strategy, optimizer, moved)
    saver = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    status = saver.read(str(folder / optimizer))
    status.assert_existing_objects_matched()
    return model


def restore(strategy, folder, optimizer):
    noted = np.load(folder / f"{optimizer}.npz")
    model = read(strategy, folder, optimizer)
    check(strategy, model, noted)
    model.fit(data(4, 3), verbose=0)
    for name, value in state(strategy, model).items():
        # Sums in another order may round a bfloat16 weight the other way,
        # which changes the rest a little.
        tolerance = 2e-2 if value.shape[:1] == (ROWS["rounded"],) else 1e-3
        np.testing.assert_allclose(
            value, noted[f"b/{name}"], tolerance, tolerance / 5, err_msg=name
        )


def moved(strategy, folder, optimizer):
    noted = np.load(folder / f"{optimizer}.npz")
    check(strategy, read(strategy, folder, optimizer, moved=True), noted)


def write_files(strategy, folder, optimizer):
    model = read(strategy, folder, optimizer)
    model.save(str(folder / f"{optimizer}.keras"))
    model.save_weights(str(folder / f"{optimizer}.weights.h5"))


def read_files(strategy, folder, optimizer):
    noted = np.load(folder / f"{optimizer}.npz")
    model = make_model(strategy, optimizer, moved=True)
    model.load_weights(str(folder / f"{optimizer}.weights.h5"))
    check(strategy, model, noted)
    with strategy.scope():
        model = keras.models.load_model(str(folder / f"{optimizer}.keras"))
    check(strategy, model, noted)


def tiny_layer(value, ranks):
    table = TableConfig(
        "t",
        3,
        DIM,
        keras.initializers.Constant(value),
        placement=TablePlacement.row_wise(ranks),
    )
    return DistributedEmbedding(FeatureConfig("f", table, (None,), (None, DIM)))


def tiny(strategy, folder, optimizer):
    path = str(folder / f"tiny_{optimizer}")
    with strategy.scope():
        layer, built, unbuilt = (
            tiny_layer(value, strategy.world_size) for value in (0.25, 0.5, 1.0)
        )
        layer.build()
        built.build()
        tf.train.Checkpoint(layer).write(path)
        tf.train.Checkpoint(built).read(path).assert_consumed()
        status = tf.train.Checkpoint(unbuilt).read(path)
        unbuilt.build()
        status.assert_consumed()
    for restored in (built, unbuilt):
        (table,) = restored.get_embedding_tables().values()
        np.testing.assert_array_equal(table, np.full([3, DIM], 0.25))
