# SPDX-License-Identifier: Apache-2.0
"""Whole tables are set and written at any number of ranks."""

import numpy as np
import pytest
import tensorflow as tf
from overlap_scenarios import make_layer

from tfdist_ext.embedding import whole_tables
from tfdist_ext.layers import DistributedEmbedding
from tfdist_ext.layers import FeatureConfig
from tfdist_ext.layers import FullSparse
from tfdist_ext.layers import TableConfig
from tfdist_ext.tables.placement import TablePlacement

keras = tf.keras
ROWS, DIM = 53, 6


def memory_map(strategy, folder, name):
    """A table in a file, which no rank reads at once."""
    path = folder / f"{name}.npy"
    if strategy.rank == 0:
        np.save(path, np.random.default_rng(1).normal(size=[ROWS, DIM]))
    strategy.reduce("SUM", tf.constant(1.0), axis=None)
    return np.load(path, mmap_mode="r")


def embedding(strategy, initializer="zeros", dtype="float32"):
    ranks = strategy.world_size
    placements = {
        "rows": TablePlacement.row_wise(ranks),
        "columns": TablePlacement.column_wise(ranks),
        "one": TablePlacement.table_wise(ranks - 1),
        "copied": TablePlacement.data_parallel(),
    }
    with strategy.scope():
        layer = DistributedEmbedding(
            {
                name: FeatureConfig(
                    name,
                    TableConfig(
                        name,
                        ROWS,
                        DIM,
                        initializer,
                        placement=placement,
                        dtype=dtype,
                    ),
                    (None,),
                    (None, DIM),
                )
                for name, placement in placements.items()
            }
        )
        layer.build()
    return layer


def check(layer, whole):
    for name, table in layer.get_embedding_tables().items():
        np.testing.assert_array_equal(table, np.float32(whole), name)


def whole_tables_in(strategy, folder):
    """By an initializer, by assignment and by the layer's methods."""
    whole = memory_map(strategy, folder, "whole")
    check(embedding(strategy, keras.initializers.Constant(whole)), whole)
    layer = embedding(strategy)
    layer.set_embedding_tables(
        dict.fromkeys(layer.get_embedding_tables(), whole)
    )
    check(layer, whole)
    layer.set_weights([np.asarray(whole) + 1] * 4)
    check(layer, whole + 1)
    layer.set_weights(layer.get_weights())
    check(layer, whole + 1)
    with pytest.raises(ValueError, match=r"has the tables.*Received: \['none'"):
        layer.set_embedding_tables({"none": whole})
    with pytest.raises(ValueError, match=r"\(53, 6\).*Constant of shape"):
        embedding(strategy, keras.initializers.Constant(whole[:5]))
    for sharding in ("row", "column"):
        layer, _ = make_layer(strategy, sharding, input_dim=ROWS)
        layer.kernel.assign(whole)
        np.testing.assert_array_equal(
            strategy.gather_table(layer), np.float32(whole)
        )
        layer.set_weights([whole * 2])
        np.testing.assert_array_equal(
            strategy.gather_table(layer), np.float32(whole * 2)
        )


def restored_from_config(strategy, folder):
    """A matrix survives a layer's config."""
    whole = np.random.default_rng(1).normal(size=[ROWS, DIM])
    initializer = keras.initializers.Constant(whole)
    with strategy.scope():
        layer = FullSparse(DIM, ROWS, kernel_initializer=initializer)
        layer = FullSparse.from_config(layer.get_config())
        layer.build((None, 3))
    np.testing.assert_array_equal(
        strategy.gather_table(layer), np.float32(whole)
    )


def whole_tables_out(strategy, folder):
    """Into files, a few rows at a time."""
    whole = memory_map(strategy, folder, "out")
    for dtype in ("float32", "bfloat16"):
        layer = embedding(strategy, keras.initializers.Constant(whole), dtype)
        expected = layer.get_embedding_tables()
        paths = layer.get_embedding_tables(folder=folder / dtype)
        for variable, path in zip(
            layer.table_variables(), paths.values(), strict=True
        ):
            whole_tables.write(variable, strategy.collectives, path, 7)
        if strategy.rank == 0:
            for name, path in paths.items():
                np.testing.assert_array_equal(
                    np.load(path), tf.cast(expected[name], tf.float32), name
                )
    if strategy.rank == 0:
        (folder / "file").touch()
    with pytest.raises((OSError, tf.errors.AbortedError), match="directory"):
        layer.get_embedding_tables(folder=folder / "file" / "in")
    layer, table = make_layer(strategy, "row")
    assert strategy.gather_table(layer, folder / "kernel.npy") is None
    if strategy.rank == 0:
        np.testing.assert_array_equal(np.load(folder / "kernel.npy"), table)
        assert not list(folder.glob("*.part"))
    with pytest.raises((OSError, tf.errors.AbortedError), match="missing"):
        strategy.gather_table(layer, folder / "missing" / "kernel.npy")
