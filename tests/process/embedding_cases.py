# SPDX-License-Identifier: Apache-2.0
"""Trains a model with DistributedEmbedding, on any number of ranks.

A case is "kinds/optimizer" or "kinds/optimizer/weighted". `stock` builds the
same model from stock TensorFlow ops, in one process.
"""

import functools

import numpy as np
import tensorflow as tf

import tfdist_ext
from tfdist_ext.layers import DistributedEmbedding
from tfdist_ext.tables.placement import TablePlacement
from tfdist_ext.tables.table_config import FeatureConfig
from tfdist_ext.tables.table_config import TableConfig

keras = tf.keras
BATCH, STEPS = 24, 12
TAIL = (7, 2)  # uneven on 2 and 4 ranks, and two ranks of 4 left empty
# name: rows, columns, combiner
TABLES = {
    "items": (97, 6, "mean"),
    "users": (31, 5, "sum"),
    "words": (1000, 8, "sqrtn"),
}
# name: table, ids per sample
FEATURES = {
    "liked": ("items", None),
    "item": ("items", 1),
    "user": ("users", 1),
    "text": ("words", 4),
}
WIDTH = 6 + 6 + 5 + 8


def samples(count, seed=1):
    """One flat NumPy batch: ids, weights of `liked`, labels."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 6, count)
    lengths[::5] = 0
    total = lengths.sum()
    return {
        "liked": tf.RaggedTensor.from_row_lengths(
            rng.zipf(1.3, total) % 97, lengths
        ),
        "stars": tf.RaggedTensor.from_row_lengths(
            rng.random(total).astype(np.float32) + 0.5, lengths
        ),
        "item": rng.zipf(1.2, count) % 97,
        "user": (rng.integers(0, 31, count)).astype(np.int64),
        "text": (rng.zipf(1.1, (count, 4)) % 1000).astype(np.int64),
    }, rng.normal(size=[count, 1]).astype(np.float32)


@functools.cache
def dataset():
    """Global batches: full ones, then the tail."""
    inputs, labels = samples(BATCH * STEPS + sum(TAIL))
    whole = tf.data.Dataset.from_tensor_slices((inputs, labels))
    result = whole.take(BATCH * STEPS).batch(BATCH)
    skip = BATCH * STEPS
    for size in TAIL:
        result = result.concatenate(whole.skip(skip).take(size).batch(size))
        skip += size
    return result.map(_text_as_sparse)


def _text_as_sparse(inputs, labels):
    ids = inputs["text"]
    there = tf.where(ids >= 0)
    text = tf.SparseTensor(
        there, tf.gather_nd(ids, there), tf.shape(ids, tf.int64)
    )
    weights = {
        "liked": inputs["stars"],
        "item": 0.5 + tf.zeros(tf.shape(inputs["item"])),
        "user": 2.0 + tf.zeros(tf.shape(inputs["user"])),
        "text": tf.SparseTensor(
            text.indices,
            tf.cast(1 + text.values % 3, tf.float32),
            text.dense_shape,
        ),
    }
    ids = {name: inputs[name] for name in ("liked", "item", "user")}
    return {"ids": {**ids, "text": text}, "weights": weights}, labels


# What each table is, by the name of the case.
KINDS = {
    "whole": ("row_wise", "table_wise", "column_wise"),
    "grid": ("grid", "data_parallel", "row_wise_dedup"),
    "dedup": ("column_wise_dedup", "table_wise_dedup", "grid_dedup"),
    "auto": ("auto", "auto", "auto"),
}


def placement_of(kind, ranks):
    """For a name such as "grid_dedup", on that many ranks."""
    dedup = kind.endswith("_dedup")
    kind = kind.removesuffix("_dedup")
    if kind == "auto":
        return "auto"
    if ranks == 1 or kind == "data_parallel":
        return TablePlacement.data_parallel()
    if kind == "table_wise":
        return TablePlacement.table_wise(ranks - 1, dedup)
    if kind == "row_wise":
        return TablePlacement.row_wise(ranks, dedup)
    if kind == "column_wise":
        return TablePlacement.column_wise(ranks, dedup)
    return TablePlacement.grid(max(1, ranks // 2), 2, dedup)


def embedding(kind, ranks, optimizers):
    """The layer under test."""
    tables = {
        name: TableConfig(
            name,
            rows,
            dim,
            keras.initializers.RandomNormal(0.0, 0.3, seed=3),
            optimizers.get(name),
            combiner,
            placement_of(of_table, ranks),
        )
        for (name, (rows, dim, combiner)), of_table in zip(
            TABLES.items(), KINDS[kind], strict=True
        )
    }
    return DistributedEmbedding(
        {
            name: FeatureConfig(
                name, tables[table], (None, hotness), (None, TABLES[table][1])
            )
            for name, (table, hotness) in FEATURES.items()
        },
        name="embedding",
    )


class StockEmbedding(keras.layers.Layer):
    """The twin from stock ops, with dense gradients."""

    def __init__(self, initial, **kwargs):
        super().__init__(autocast=False, **kwargs)
        self.tables = {
            name: self.add_weight(
                name=name,
                shape=initial[name].shape,
                initializer=lambda shape, dtype=None, name=name, **_: (
                    tf.constant(initial[name])
                ),
            )
            for name in TABLES
        }

    def call(self, inputs, weights=None):
        results = {}
        for name, (table, _) in FEATURES.items():
            rows, _, combiner = TABLES[table]
            ids, sample, weight = _flat(
                inputs[name], weights[name] if weights else None
            )
            count = _samples(inputs[name])
            matrix = tf.SparseTensor(
                tf.stack([sample, ids], 1), weight, [count, rows]
            )
            sums = tf.sparse.sparse_dense_matmul(
                matrix, tf.convert_to_tensor(self.tables[table])
            )
            power = 2 if combiner == "sqrtn" else 1
            total = tf.math.unsorted_segment_sum(weight**power, sample, count)
            if combiner == "sqrtn":
                total = tf.sqrt(total)
            if combiner != "sum":
                sums = tf.math.divide_no_nan(sums, total[:, None])
            results[name] = sums
        return results


def _samples(ids):
    if isinstance(ids, tf.RaggedTensor):
        return ids.nrows()
    if isinstance(ids, tf.SparseTensor):
        return ids.dense_shape[0]
    return tf.shape(ids, tf.int64)[0]


def _flat(ids, weights):
    if isinstance(ids, tf.RaggedTensor):
        flat, sample = ids.values, ids.value_rowids()
    elif isinstance(ids, tf.SparseTensor):
        flat, sample = ids.values, ids.indices[:, 0]
    else:
        flat, sample = ids, tf.range(_samples(ids))
    if weights is None:
        weights = tf.ones(tf.shape(flat))
    elif isinstance(weights, tf.RaggedTensor | tf.SparseTensor):
        weights = weights.values
    return flat, tf.cast(sample, tf.int64), tf.cast(weights, tf.float32)


class Model(keras.Model):
    """Embeddings, concatenated, and a small dense tower."""

    def __init__(self, layer, weighted):
        super().__init__()
        self.embedding = layer
        self.weighted = weighted
        self.hidden = keras.layers.Dense(
            8,
            activation="tanh",
            kernel_initializer=keras.initializers.GlorotUniform(seed=5),
        )
        self.top = keras.layers.Dense(
            1, kernel_initializer=keras.initializers.GlorotUniform(seed=6)
        )

    def call(self, inputs):
        weights = inputs["weights"] if self.weighted else None
        found = self.embedding(inputs["ids"], weights=weights)
        joined = tf.concat([found[name] for name in sorted(found)], 1)
        return self.top(self.hidden(tf.ensure_shape(joined, [None, WIDTH])))


def optimizers(name):
    """Of the model, and of single tables ("own")."""
    ours = tfdist_ext.optimizers
    if name == "mixed":
        return ours.Adam(0.05, lazy=False, clipnorm=0.5), {
            "users": ours.RowWiseAdagrad(0.05),
            "words": ours.SGD(0.05, momentum=0.9),
        }
    if name == "own":
        return ours.Adagrad(0.05), {
            "words": ours.SGD(0.1),
            "users": "adagrad",
        }
    kind = {
        "sgd": ours.SGD,
        "adagrad": ours.Adagrad,
        "row_wise_adagrad": ours.RowWiseAdagrad,
        "adam": ours.Adam,
    }[name]
    return kind(0.05), {}


def train(model, tables):
    """Fits one epoch and returns everything that must agree."""
    history = model.fit(dataset(), epochs=1, verbose=0).history
    final = {f"final/{name}": np.array(t) for name, t in tables().items()}
    return {"loss": np.array(history["loss"]), **final}


def hybrid(strategy, case):
    """Our strategy and layer."""
    kind, name, *rest = case.split("/")
    with strategy.scope():
        optimizer, own = optimizers(name)
        layer = embedding(kind, strategy.num_replicas_in_sync, own)
        model = Model(layer, bool(rest))
        model.compile(optimizer, "mse")
        layer.build()
    tables = layer.get_embedding_tables()
    result = {f"initial/{name}": t.numpy() for name, t in tables.items()}
    return result | train(model, layer.get_embedding_tables)


def of_stock(case):
    """A case with the same `stock`, which has one kind of table."""
    return "/".join(["any", *case.split("/")[1:]])


def stock(strategy, case, initial):
    """The same from stock ops, one process, a stock optimizer."""
    assert strategy is None
    _, name, *rest = case.split("/")
    layer = StockEmbedding({t: initial[f"initial/{t}"] for t in TABLES})
    model = Model(layer, bool(rest))
    kind = {"sgd": "SGD", "adagrad": "Adagrad", "adam": "Adam"}[name]
    model.compile(getattr(keras.optimizers, kind)(0.05), "mse")
    return train(model, lambda: layer.tables)
