# SPDX-License-Identifier: Apache-2.0
"""Keras's own examples of structured data; see `tfrs_ranking_programs`.

Dropout is left out: no two numbers of ranks drop the same. Where a batch is
normalised, a port says `synchronized=True`, as under any strategy.
"""

import math

import movielens_files
import numpy as np
import tensorflow as tf
from keras_rs_ranking_programs import fitted
from movielens_files import BATCH
from movielens_files import MOVIES
from movielens_files import USERS
from retrieval_models import DIM
from retrieval_models import dense

keras = tf.keras
layers = keras.layers


class RecommenderNet(keras.Model):
    """Of collaborative_filtering_movielens: rows with L2, and biases."""

    def __init__(self, parts):
        super().__init__()
        l2 = keras.regularizers.L2(1e-3)

        def rows(name, number):
            return parts.embedding(name, number, embeddings_regularizer=l2)

        self.user_embedding = rows("users", USERS)
        self.user_bias = parts.embedding("user_bias", USERS, dim=1)
        self.movie_embedding = rows("movies", MOVIES)
        self.movie_bias = parts.embedding("movie_bias", MOVIES, dim=1)

    def call(self, inputs):
        user_vector = self.user_embedding(inputs[:, 0])
        user_bias = self.user_bias(inputs[:, 0])
        movie_vector = self.movie_embedding(inputs[:, 1])
        movie_bias = self.movie_bias(inputs[:, 1])
        dot = tf.reduce_sum(user_vector * movie_vector, 1, keepdims=True)
        return tf.nn.sigmoid(dot + user_bias + movie_bias)


def collaborative_filtering(parts):
    """Arrays of ids, an array of labels; then what a user may like."""
    known, _ = movielens_files.features()
    users, movies = (
        known[name].astype(np.int64) - 1 for name in ("user_id", "movie_id")
    )
    x = np.stack([users, movies], axis=1)
    y = (known["user_rating"] - 1.0) / 4.0
    with parts.scope():
        model = RecommenderNet(parts)
        model.compile(
            loss=keras.losses.BinaryCrossentropy(),
            optimizer=parts.rule(keras.optimizers.Adam(0.01)),
        )
    history = model.fit(
        x=x[:-20],
        y=y[:-20],
        batch_size=BATCH,
        shuffle=False,
        validation_data=(x[-20:], y[-20:]),
        verbose=0,
    ).history
    found = {name: values[-1] for name, values in history.items()}
    asked = np.stack([np.full(MOVIES, 7), np.arange(MOVIES)], axis=1)
    found["ratings"] = model.predict(asked, verbose=0)
    return model, found


def looked_up(parts, name, vocabulary, inputs):
    """Names, in Keras's lookup, and the rows of a table."""
    lookup = layers.StringLookup(
        vocabulary=vocabulary, mask_token=None, num_oov_indices=0
    )
    size = len(vocabulary)
    rows = parts.embedding(f"{name}_rows", size, dim=int(math.sqrt(size)))
    return rows(lookup(inputs))


def norm(parts):
    """A normalisation of the whole batch."""
    return layers.BatchNormalization(**parts.of_all_ranks)


def transformer(parts, titles, jobs, genres):
    """Of movielens_recommendations_transformers: the last of four ratings."""
    names = {"user_occupation": (), "movies": (3,), "target": (1,)}
    inputs = {
        name: keras.Input(shape, name=name, dtype="string")
        for name, shape in names.items()
    }
    ratings = keras.Input((3,), name="ratings")
    lookup = layers.StringLookup(
        vocabulary=titles, mask_token=None, num_oov_indices=0
    )
    movies = parts.embedding("movie_rows", len(titles))
    of_genres = parts.fixed("genres", genres)
    processor = dense(DIM, "relu", seed=1)

    def encoded(names):
        ids = lookup(names)
        both = layers.Concatenate()([movies(ids), of_genres(ids)])
        return processor(both)

    places = parts.embedding("places", 4)(tf.range(3))
    sequence = (encoded(inputs["movies"]) + places) * layers.Reshape((3, 1))(
        ratings
    )
    x = layers.Concatenate(1)([sequence, encoded(inputs["target"])])
    start = keras.initializers.GlorotUniform(seed=2)
    # Biases of keys have no gradient but rounding errors.
    attended = layers.MultiHeadAttention(
        2, DIM, use_bias=False, kernel_initializer=start
    )(x, x)
    x1 = layers.LayerNormalization()(layers.Add()([x, attended]))
    x2 = dense(DIM, seed=3)(layers.LeakyReLU()(x1))
    x = layers.LayerNormalization()(layers.Add()([x1, x2]))
    job = looked_up(parts, "jobs", jobs, inputs["user_occupation"])
    x = layers.Concatenate()([layers.Flatten()(x), job])
    x = layers.LeakyReLU()(norm(parts)(dense(16, seed=4)(x)))
    return keras.Model({**inputs, "ratings": ratings}, dense(1)(x))


def behaviour_sequence_transformer(parts):
    """Lists in the columns of a file, read by TensorFlow's own reader."""
    _, titles = movielens_files.features()
    path = movielens_files.write_sequences()

    def process(features):
        movies = tf.strings.split(features["movies"], ",").to_tensor()
        ratings = tf.strings.to_number(
            tf.strings.split(features["ratings"], ",")
        ).to_tensor()
        features |= {"movies": movies[:, :-1], "target": movies[:, -1:]}
        features["ratings"] = ratings[:, :-1]
        return features, ratings[:, -1:]

    data = tf.data.experimental.make_csv_dataset(
        str(path),
        batch_size=BATCH - 1,
        column_names=["user_occupation", "movies", "ratings"],
        num_epochs=1,
        header=False,
        field_delim="|",
        shuffle=False,
    ).map(lambda features: process(dict(features)))
    genres = np.random.default_rng(5).integers(0, 2, [len(titles), 6])
    with parts.scope():
        model = transformer(
            parts, titles, movielens_files.JOBS, genres.astype(np.float32)
        )
        model.compile(
            optimizer=parts.rule(keras.optimizers.Adagrad(0.05)),
            loss=keras.losses.MeanSquaredError(),
            metrics=[keras.metrics.MeanAbsoluteError()],
        )
    return model, fitted(model, data)


NUMBERS = ("Aspect", "Elevation", "Slope")
NAMES = {
    "Soil_Type": [f"soil_type_{i}" for i in range(40)],
    "Wilderness_Area": [f"area_type_{i}" for i in range(4)],
}
CLASSES = 7


def encoded(parts, inputs, use_embedding):
    """One column after the other: numbers, and names in one of two ways."""
    found = []
    for name, value in inputs.items():
        if name in NUMBERS:
            found.append(layers.Reshape((1,))(value))
        elif use_embedding:
            found.append(looked_up(parts, name, NAMES[name], value))
        else:
            lookup = layers.StringLookup(
                vocabulary=NAMES[name],
                mask_token=None,
                num_oov_indices=0,
                output_mode="multi_hot",
            )
            found.append(lookup(layers.Reshape((1,))(value)))
    return layers.Concatenate()(found)


def wide_and_deep(parts):
    """Of wide_deep_cross_networks: a file with a header, and two networks."""
    path = movielens_files.write_cover_types(NUMBERS, NAMES, CLASSES)
    columns = [*NUMBERS, *NAMES, "Cover_Type"]
    data = tf.data.experimental.make_csv_dataset(
        str(path),
        batch_size=BATCH - 1,
        column_names=columns,
        column_defaults=[["NA"] if c in NAMES else [0] for c in columns],
        label_name="Cover_Type",
        num_epochs=1,
        header=True,
        shuffle=False,
    ).map(lambda features, target: (dict(features), target))
    with parts.scope():
        inputs = {
            name: keras.Input(
                (), name=name, dtype="string" if name in NAMES else "float32"
            )
            for name in (*NUMBERS, *NAMES)
        }
        wide = norm(parts)(encoded(parts, inputs, use_embedding=False))
        deep = encoded(parts, inputs, use_embedding=True)
        for seed in (1, 2):
            deep = layers.ReLU()(norm(parts)(dense(16, seed=seed)(deep)))
        merged = layers.Concatenate()([wide, deep])
        model = keras.Model(inputs, dense(CLASSES, "softmax")(merged))
        model.compile(
            optimizer=parts.rule(keras.optimizers.Adam(learning_rate=0.01)),
            loss=keras.losses.SparseCategoricalCrossentropy(),
            metrics=[keras.metrics.SparseCategoricalAccuracy()],
        )
    found = fitted(model, data.cache())
    found["accuracy"] = model.evaluate(data, verbose=0)[1]
    return model, found


PROGRAMS = {
    "collaborative_filtering": collaborative_filtering,
    "behaviour_sequence_transformer": behaviour_sequence_transformer,
    "wide_and_deep": wide_and_deep,
}
