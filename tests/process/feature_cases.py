# SPDX-License-Identifier: Apache-2.0
"""Trains on strings and numbers that Keras's preprocessing layers read.

A case says where these layers are: "in_model", or in the dataset, as those of
a "feature_space". Stock has Embedding and Dense layers behind them.
"""

import numpy as np
import tensorflow as tf
from sequence_cases import first_rows

import tfdist_ext

keras = tf.keras
layers = keras.layers

SAMPLES, BATCH, DIM, BUCKETS = 80, 16, 4, 64
# Rows; a few more than there are words.
NAMES, CODES, TAGS, BINS, WORDS = 32, 48, 13, 8, 24


def columns():
    """Raw features of every sample, and labels; the last batch is uneven."""
    rng = np.random.default_rng(7)
    count = SAMPLES - 5
    words = rng.integers(0, 20, [count, 4])
    known = {
        "name": [[f"name {i}"] for i in rng.zipf(1.6, count) % (NAMES - 2)],
        "tags": [[f"tag {i}" for i in row] for row in words[:, :3] % 12],
        "text": [
            [" ".join(f"w{i}" for i in row[: 1 + row[0] % 4])] for row in words
        ],
        "code": rng.integers(1000, 1000 + CODES - 2, [count, 1]),
        "number": rng.normal(3, 2, [count, 1]).astype(np.float32),
    }
    labels = rng.integers(0, 2, [count, 1]).astype(np.float32)
    return {name: tf.constant(values) for name, values in known.items()}, labels


def inputs_of(features):
    return {
        name: keras.Input(value.shape[1:], dtype=value.dtype, name=name)
        for name, value in features.items()
    }


class Ours:
    """Our layers, by what they do."""

    def __init__(self):
        self.tables = {}

    def embedding(self, name, rows, **options):
        start = keras.initializers.Constant(
            first_rows(name, rows, DIM).astype(np.float32)
        )
        layer = tfdist_ext.layers.Embedding(
            rows,
            DIM,
            embeddings_initializer=start,
            name=f"the_{name}",
            **options,
        )
        self.tables[name] = layer
        return layer

    def of_ids(self, name, rows):
        """The sum of the rows of a sample's ids."""
        return self.of_matrix(name, rows)

    def of_matrix(self, name, rows):
        """The product of a matrix of counts and a kernel."""
        layer = tfdist_ext.layers.FullSparse(DIM, rows, name=f"the_{name}")
        self.tables[name] = layer
        return layer

    def pooled(self, name, rows):
        """The mean of the rows of a sample's ids."""
        start = keras.initializers.Constant(
            first_rows(name, rows, DIM).astype(np.float32)
        )
        table = tfdist_ext.TableConfig(name, rows, DIM, start, combiner="mean")
        feature = tfdist_ext.FeatureConfig(name, table, (None, 1), (None, DIM))
        layer = tfdist_ext.layers.DistributedEmbedding(feature)
        self.tables[name] = layer
        return layer

    def results(self, strategy):
        found = {}
        for name, layer in self.tables.items():
            if isinstance(layer, tfdist_ext.layers.DistributedEmbedding):
                ((_, layer),) = layer.get_embedding_tables().items()
            found[f"table/{name}"] = strategy.gather_table(layer)
        return found


class Stock:
    """Keras's layers, which do the same."""

    def __init__(self):
        self.tables = {}

    def embedding(self, name, rows, **options):
        matrix = first_rows(name, rows, DIM)
        layer = layers.Embedding(
            rows,
            DIM,
            embeddings_initializer=lambda shape, dtype=None, **_: tf.constant(
                matrix, dtype
            ),
            name=f"the_{name}",
            **options,
        )
        self.tables[name] = layer
        return layer

    def of_ids(self, name, rows):
        count = layers.CategoryEncoding(rows, output_mode="count")
        dense = self.of_matrix(name, rows)
        return lambda ids: dense(count(ids))

    def of_matrix(self, name, rows):
        del rows
        layer = layers.Dense(
            DIM,
            kernel_initializer="zeros",
            bias_initializer=keras.initializers.Constant(1 / DIM),
            name=f"the_{name}",
        )
        self.tables[name] = layer
        return layer

    def pooled(self, name, rows):
        embedding = self.embedding(name, rows)
        return lambda ids: layers.Flatten()(embedding(ids))

    def results(self, strategy):
        assert strategy is None
        return {
            f"table/{name}": np.array(layer.weights[0])
            for name, layer in self.tables.items()
        }


def readers(features):
    """Keras's preprocessing layers, by what they make."""

    def adapted(layer, name):
        data = tf.data.Dataset.from_tensor_slices(features[name]).batch(BATCH)
        layer.adapt(data)
        return lambda batch: layer(batch[name])

    hashing = layers.Hashing(BUCKETS)
    one_hot = layers.CategoryEncoding(BUCKETS, output_mode="count")
    crossing = layers.HashedCrossing(BUCKETS)
    return {
        "name": adapted(layers.StringLookup(), "name"),
        "code": adapted(layers.IntegerLookup(), "code"),
        "hashed": lambda batch: hashing(batch["tags"]),
        "counts": lambda batch: one_hot(hashing(batch["tags"])),
        "tags": adapted(
            layers.StringLookup(output_mode="multi_hot", sparse=True), "tags"
        ),
        "crossed": lambda batch: crossing((batch["name"], batch["code"])),
        "bins": adapted(layers.Discretization(num_bins=BINS), "number"),
        "words": adapted(
            layers.TextVectorization(output_sequence_length=4), "text"
        ),
        "number": adapted(layers.Normalization(), "number"),
    }


def head(made, read):
    """A model's output of what has been read."""
    mean = layers.GlobalAveragePooling1D()
    parts = [
        layers.Flatten()(made.embedding("name", NAMES)(read["name"])),
        made.pooled("code", CODES)(read["code"]),
        made.of_ids("hashed", BUCKETS)(read["hashed"]),
        made.of_matrix("counts", BUCKETS)(read["counts"]),
        made.of_matrix("tags", TAGS)(read["tags"]),
        layers.Flatten()(made.embedding("crossed", BUCKETS)(read["crossed"])),
        layers.Flatten()(made.embedding("bins", BINS)(read["bins"])),
        mean(made.embedding("words", WORDS, mask_zero=True)(read["words"])),
        read["number"],
    ]
    ones = keras.initializers.Constant(0.3)
    return layers.Dense(1, "sigmoid", kernel_initializer=ones)(
        layers.Concatenate()(parts)
    )


def in_model(made, features, dataset):
    """Raw features are the model's inputs."""
    inputs = inputs_of(features)
    read = {name: reader(inputs) for name, reader in readers(features).items()}
    return keras.Model(inputs, head(made, read)), dataset


def feature_space(made, features, dataset):
    """`keras.utils.FeatureSpace` reads them, in the dataset."""
    space = keras.utils.FeatureSpace
    names = ("name", "code", "number", "hashed")
    flat = {name: features[name][:, 0] for name in names[:3]}
    flat["hashed"] = features["tags"][:, 0]
    space = space(
        {
            "name": space.string_categorical(output_mode="int"),
            "code": space.integer_categorical(output_mode="int"),
            "number": space.float_normalized(),
            "hashed": space.string_hashed(BUCKETS, output_mode="one_hot"),
        },
        crosses=[space.cross(("name", "code"), BUCKETS, output_mode="int")],
        output_mode="dict",
    )
    labels = tf.concat([label for _, label in dataset], 0)
    raw = tf.data.Dataset.from_tensor_slices((flat, labels)).batch(BATCH)
    space.adapt(raw.map(lambda batch, _: batch))
    encoded = space.get_encoded_features()
    parts = [
        layers.Flatten()(made.embedding("name", NAMES)(encoded["name"])),
        made.pooled("code", CODES)(encoded["code"]),
        made.of_matrix("hashed", BUCKETS)(encoded["hashed"]),
        layers.Flatten()(
            made.embedding("crossed", BUCKETS)(encoded["name_X_code"])
        ),
        encoded["number"],
    ]
    ones = keras.initializers.Constant(0.3)
    output = layers.Dense(1, "sigmoid", kernel_initializer=ones)(
        layers.Concatenate()(parts)
    )
    model = keras.Model(encoded, output)
    return model, raw.map(lambda batch, label: (space(batch), label))


def train(strategy, case, made):
    """Fits, evaluates and predicts; everything that must agree."""
    features, labels = columns()
    dataset = tf.data.Dataset.from_tensor_slices((features, labels))
    model, dataset = globals()[case](made, features, dataset.batch(BATCH))
    model.compile(keras.optimizers.SGD(0.2), "binary_crossentropy")
    history = model.fit(dataset, epochs=1, verbose=0).history
    predicted = model.predict(dataset.map(lambda x, _: x), verbose=0)
    return {
        "loss": np.array(history["loss"]),
        "evaluated": np.array(model.evaluate(dataset, verbose=0)),
        "predicted": predicted,
        **made.results(strategy),
    }


def hybrid(strategy, case):
    """Our strategy and layers."""
    with strategy.scope():
        return train(strategy, case, Ours())


def of_stock(case):
    return case


def stock(strategy, case, initial):
    """Keras's layers, in one process."""
    del initial
    return train(strategy, case, Stock())
