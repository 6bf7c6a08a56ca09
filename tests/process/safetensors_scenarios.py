# SPDX-License-Identifier: Apache-2.0
"""Weights written as safetensors files at some ranks, and read at others."""

import contextlib
import json
import pathlib

import numpy as np
import pytest
import tensorflow as tf

import tfdist_ext
from tfdist_ext.layers import DistributedEmbedding
from tfdist_ext.layers import FeatureConfig
from tfdist_ext.layers import FullSparse
from tfdist_ext.layers import TableConfig
from tfdist_ext.tables.placement import TablePlacement
from tfdist_ext.tables.table_config import DynamicVocabulary

keras = tf.keras
INDEX = "model.safetensors.index.json"
# Rows, columns, dtype, vocabulary.
TABLES = {
    "rows": (53, 6, "float32", None),
    "columns": (40, 6, "bfloat16", None),
    "one": (7, 4, "float32", None),
    "ids": (30, 4, "float32", DynamicVocabulary(30, evict="lru")),
    "words": (
        30,
        4,
        "float32",
        DynamicVocabulary(30, key_dtype="string", keep_text=True),
    ),
}


def placement_of(name, ranks, other):
    if ranks == 1 or (name == "one" and other):
        return TablePlacement.data_parallel()
    if name == "one":
        return TablePlacement.table_wise(ranks - 1)
    if (name == "columns") != other:
        return TablePlacement.column_wise(ranks)
    return TablePlacement.row_wise(ranks)


def inputs(seed=0):
    rng = np.random.default_rng(seed)
    ids = {
        name: rng.integers(0, TABLES[name][0], [16, 2])
        for name in ("rows", "columns", "one")
    }
    ids["ids"] = rng.integers(10**12, 10**12 + 20, [16, 2])
    ids["words"] = rng.integers(0, 20, [16, 2]).astype(str)
    return {name: tf.constant(each) for name, each in ids.items()}


class Model(keras.Model):
    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding
        self.first = FullSparse(3, 25, name="first", sharding="row")
        self.top = keras.layers.Dense(1, name="top")

    def call(self, inputs, training=False):
        rows = self.embedding(inputs, training=training)
        rows = [tf.cast(each, tf.float32) for each in rows.values()]
        rows.append(self.first(inputs["rows"] % 25))
        return self.top(tf.concat(rows, 1))


def make_model(strategy, other=False, seed=1):
    ranks = strategy.world_size if strategy else 1
    features = {}
    for i, (name, (rows, dim, dtype, vocabulary)) in enumerate(TABLES.items()):
        table = TableConfig(
            name,
            **({} if vocabulary else {"vocabulary_size": rows}),
            embedding_dim=dim,
            initializer=keras.initializers.RandomUniform(seed=seed + i),
            placement=placement_of(name, ranks, other),
            dtype=dtype,
            vocabulary=vocabulary,
        )
        features[name] = FeatureConfig(name, table, (None, 2), (None, dim))
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = Model(DistributedEmbedding(features, name="embedding"))
        arguments = {"jit_compile": False} if hasattr(keras, "ops") else {}
        optimizer = tfdist_ext.optimizers.Adagrad(0.5)
        model.compile(optimizer, "mse", **arguments)
        model(inputs())
    return model


def state(strategy, model):
    """Whole tables, keys and other weights."""
    found = {
        f"embedding/{name}": np.asarray(table, np.float32)
        for name, table in model.embedding.get_embedding_tables().items()
    }
    kernel = model.first.kernel
    if strategy:
        kernel = strategy.gather_table(model.first)
    found["first/kernel"] = np.array(kernel)
    for name, keys in model.embedding.get_vocabularies().items():
        for what in ("keys", "rows", "texts"):
            if what in keys:
                found[f"{name} {what}"] = keys[what]
    found["top/kernel"], found["top/bias"] = model.top.get_weights()
    return found


def write(strategy, folder):
    model = make_model(strategy)
    data = tf.data.Dataset.from_tensor_slices((inputs(), tf.ones([16, 1])))
    model.fit(data.batch(8), epochs=2, verbose=0)
    tfdist_ext.export_safetensors(model, str(folder))
    assert not list(pathlib.Path(folder).glob("*.part"))
    return state(strategy, model)


def read(strategy, folder, expected):
    model = make_model(strategy, other=True, seed=50)
    before = state(strategy, model)
    assert not np.allclose(before["top/kernel"], expected["top/kernel"])
    tfdist_ext.load_safetensors(model, str(folder))
    found = state(strategy, model)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, name)


def one_rank_fails(strategy, folder):
    """A damaged file changes nothing, and an export does not lose another."""
    folder = pathlib.Path(folder)
    model = make_model(strategy)
    tfdist_ext.export_safetensors(model, folder)
    last = (
        folder / f"model-{strategy.world_size:05}-of-{strategy.world_size:05}"
    )
    last = last.with_suffix(".safetensors")
    index = json.loads((folder / INDEX).read_text())
    expected = state(strategy, model)
    again = make_model(strategy, seed=50)
    before = state(strategy, again)
    whole = last.read_bytes()
    strategy.gather(tf.zeros([1]), 0)  # all ranks have read it
    if strategy.rank == 0:
        last.write_bytes(whole[:-9])
    strategy.gather(tf.zeros([1]), 0)
    with pytest.raises((ValueError, tf.errors.OpError), match="complete"):
        tfdist_ext.load_safetensors(again, folder)
    for name, value in state(strategy, again).items():
        np.testing.assert_array_equal(value, before[name], name)
    if strategy.rank == 0:
        last.write_bytes(whole)
        # A folder is where the last rank would write its file.
        last.with_suffix(".safetensors.part").mkdir()
    strategy.gather(tf.zeros([1]), 0)
    with pytest.raises((OSError, tf.errors.OpError), match="part"):
        tfdist_ext.export_safetensors(again, folder)
    assert json.loads((folder / INDEX).read_text()) == index
    tfdist_ext.load_safetensors(again, folder)
    for name, value in state(strategy, again).items():
        np.testing.assert_array_equal(value, expected[name], name)
