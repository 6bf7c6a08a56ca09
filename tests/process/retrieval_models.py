# SPDX-License-Identifier: Apache-2.0
"""Published programs of retrieval, as their guides have them.

Each is a function of `parts`, which says what a port changes: the class of an
Embedding, the task, and what the metric searches in.
"""

import pathlib
import sys

import numpy as np
import tensorflow as tf

sys.path.append(str(pathlib.Path(__file__).parents[2] / "examples"))

from data import ratings

keras = tf.keras
DIM = 8
SAMPLES, BATCH = 161, 48  # uneven on 2 and 4 ranks in the last batch


def dense(units, activation=None, seed=5):
    return keras.layers.Dense(
        units,
        activation,
        kernel_initializer=keras.initializers.GlorotUniform(seed=seed),
    )


def read():
    """Ratings from a file; users and movies are named by strings."""
    path = ratings.synthetic_directory(4000) / "u.data"
    known = ratings.read(path)
    return path, known


def named(kind, numbers):
    return np.array([f"{kind} {number}" for number in numbers])


def movielens():
    """`ratings` and `movies` of the guides, and the names of users."""
    _, known = read()
    movies = named("movie", np.unique(known.items))
    users = named("user", np.unique(known.users))
    features = {
        "movie_title": named("movie", known.items[:SAMPLES]),
        "user_id": named("user", known.users[:SAMPLES]),
        "user_rating": known.scores[:SAMPLES],
    }
    return tf.data.Dataset.from_tensor_slices(features), movies, users
