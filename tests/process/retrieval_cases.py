# SPDX-License-Identifier: Apache-2.0
"""Trains published programs of retrieval: as they are, and as ports."""

import importlib
import types

import numpy as np
import tensorflow as tf
from retrieval_models import BATCH
from retrieval_models import DIM

import tfdist_ext
from tfdist_ext.keras_internals import KERAS_3
from tfdist_ext.layers import ShardedTopK

keras = tf.keras


def programs():
    """Those for the Keras there is."""
    name = "keras_rs_models" if KERAS_3 else "tfrs_models"
    return importlib.import_module(name)


def first_rows(name, rows, dim):
    seed = sum(map(ord, name))
    matrix = np.random.default_rng(seed).normal(0, 0.5, [rows, dim])
    return matrix.astype(np.float32)


class OnRows(keras.layers.Embedding):
    """Keras's layer with our definition of a regularizer: of looked-up rows."""

    def __init__(self, rows, dim, embeddings_regularizer, **options):
        super().__init__(rows, dim, **options)
        self.of_rows = embeddings_regularizer

    def call(self, inputs):
        rows = super().call(inputs)
        self.add_loss(self.of_rows(rows))
        return rows


def ported(tables, sharding="row_wise"):
    """What a port changes of a program."""

    def embedding(name, rows, dim=DIM, **options):
        start = keras.initializers.Constant(first_rows(name, rows, dim))
        tables[name] = tfdist_ext.layers.Embedding(
            rows,
            dim,
            embeddings_initializer=start,
            sharding=sharding,
            name=name,
            **options,
        )
        return tables[name]

    def candidates(movies, model):
        lookup, rows = model.layers[:2]
        return ShardedTopK().index(rows, movies, rows=lookup(movies))

    return types.SimpleNamespace(
        embedding=embedding,
        candidates=candidates,
        Retrieval=tfdist_ext.losses.Retrieval,
        BruteForce=ShardedTopK,
        gather_candidates=tfdist_ext.losses.gather_candidates,
    )


def published(tables):
    """What the guides have."""

    def embedding(name, rows, dim=DIM, **options):
        matrix = first_rows(name, rows, dim)
        kind = keras.layers.Embedding
        if "embeddings_regularizer" in options:
            kind = OnRows
        tables[name] = kind(
            rows,
            dim,
            embeddings_initializer=lambda shape, dtype=None, **_: tf.constant(
                matrix, dtype
            ),
            name=name,
            **options,
        )
        return tables[name]

    def candidates(movies, model):
        names = tf.data.Dataset.from_tensor_slices(movies).batch(128)
        return tf.data.Dataset.zip((names, names.map(model)))

    return types.SimpleNamespace(
        embedding=embedding,
        candidates=candidates,
        gather_candidates=lambda x: x,
        Retrieval=programs().Retrieval,
        BruteForce=programs().BruteForce,
    )


def train(case, parts, tables, table):
    """Fits, and evaluates some; everything that must agree."""
    model = programs().MODELS[case](parts)
    # Keras 3's Adagrad takes squares of rows that Keras's Embedding repeats.
    rule = keras.optimizers.SGD(0.02 if "basic" in case else 0.1)
    model.compile(optimizer=rule if KERAS_3 else keras.optimizers.Adagrad(0.1))
    data = model.data.batch(BATCH)
    history = model.fit(data, epochs=1, verbose=0).history
    result = {name: np.array(value) for name, value in history.items()}
    if getattr(model, "evaluates", False):
        found = model.evaluate(data, return_dict=True, verbose=0)
        result |= {f"test/{name}": np.array(v) for name, v in found.items()}
    for name, layer in tables.items():
        result[f"table/{name}"] = table(layer)
    others = [w for w in model.trainable_weights if "embeddings" not in w.name]
    for index, weight in enumerate(others):
        result[f"dense/{index}"] = np.array(weight)
    if hasattr(model, "recommend"):
        scores, names = model.recommend(parts)
        result["scores"] = np.array(scores)
        result["found"] = np.array(names == names[:, :1]) * 1.0
    return result


def hybrid(strategy, case):
    """A port, on our strategy."""
    tables = {}
    with strategy.scope():
        parts = ported(tables)
        return train(case, parts, tables, strategy.gather_table)


def of_stock(case):
    """All of a case counts."""
    return case


def stock(strategy, case, initial):
    """A program as it was published, in one process."""
    tables = {}
    parts = published(tables)
    return train(case, parts, tables, lambda layer: np.array(layer.embeddings))
