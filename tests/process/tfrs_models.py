# SPDX-License-Identifier: Apache-2.0
"""Guides of tensorflow-recommenders, as published but for `parts`.

`parts.Embedding`, `parts.Retrieval` and `parts.candidates`, what a metric
searches in, are what a port changes.
"""

import numpy as np
import tensorflow as tf
import tensorflow_recommenders as tfrs
from data import histories
from retrieval_models import DIM
from retrieval_models import SAMPLES
from retrieval_models import dense
from retrieval_models import movielens
from retrieval_models import named
from retrieval_models import read

Retrieval = tfrs.tasks.Retrieval
BruteForce = tfrs.layers.factorized_top_k.BruteForce


def lookup_and_rows(parts, name, vocabulary):
    """What guides have as a tower: names to rows of a table."""
    lookup = tf.keras.layers.StringLookup(
        vocabulary=vocabulary, mask_token=None
    )
    # One row more for unknown names.
    rows = parts.embedding(name, len(vocabulary) + 1)
    return tf.keras.Sequential([lookup, rows])


class BasicRetrieval(tfrs.Model):
    """examples/basic_retrieval."""

    # In `fit`, a search of stock's is not ordered with the step's update.
    evaluates = True

    def __init__(self, parts):
        super().__init__()
        self.data, self.movies, users = movielens()
        self.user_model = lookup_and_rows(parts, "users", users)
        self.movie_model = lookup_and_rows(parts, "movies", self.movies)
        self.task = parts.Retrieval(
            metrics=tfrs.metrics.FactorizedTopK(
                parts.candidates(self.movies, self.movie_model)
            )
        )

    def compute_loss(self, features, training=False):
        user_embeddings = self.user_model(features["user_id"])
        movie_embeddings = self.movie_model(features["movie_title"])
        return self.task(
            user_embeddings,
            movie_embeddings,
            candidate_ids=features["movie_title"],
            compute_metrics=not training,
        )

    def recommend(self, parts):
        """The index that the guide makes in the end."""
        index = parts.BruteForce(query_model=self.user_model)
        movies = tf.data.Dataset.from_tensor_slices(self.movies)
        index.index_from_dataset(
            tf.data.Dataset.zip(
                (
                    movies.batch(100),
                    movies.batch(100).map(self.movie_model),
                )
            )
        )
        return index(tf.constant(named("user", [42, 7])))


class Multitask(tfrs.Model):
    """examples/multitask."""

    def __init__(self, parts):
        super().__init__()
        self.data, self.movies, users = movielens()
        self.movie_model = lookup_and_rows(parts, "movies", self.movies)
        self.user_model = lookup_and_rows(parts, "users", users)
        self.rating_model = tf.keras.Sequential(
            [dense(16, "relu"), dense(8, "relu"), dense(1)]
        )
        self.rating_task = tfrs.tasks.Ranking(
            loss=tf.keras.losses.MeanSquaredError(),
            metrics=[tf.keras.metrics.RootMeanSquaredError()],
        )
        self.retrieval_task = parts.Retrieval(
            metrics=tfrs.metrics.FactorizedTopK(
                parts.candidates(self.movies, self.movie_model)
            )
        )

    def call(self, features):
        user_embeddings = self.user_model(features["user_id"])
        movie_embeddings = self.movie_model(features["movie_title"])
        return (
            user_embeddings,
            movie_embeddings,
            self.rating_model(
                tf.concat([user_embeddings, movie_embeddings], axis=1)
            ),
        )

    def compute_loss(self, features, training=False):
        scores = features.pop("user_rating")
        user_embeddings, movie_embeddings, predictions = self(features)
        rating_loss = self.rating_task(labels=scores, predictions=predictions)
        retrieval_loss = self.retrieval_task(
            user_embeddings,
            movie_embeddings,
            candidate_ids=features["movie_title"],
            compute_metrics=not training,
        )
        return 0.7 * rating_loss + 0.5 * retrieval_loss


class SequentialRetrieval(tfrs.Model):
    """examples/sequential_retrieval."""

    def __init__(self, parts):
        super().__init__()
        path, _ = read()
        known = histories.read(path, 5)
        context = known.items[:SAMPLES, :-1]
        features = {
            "context_movie_id": named("movie", context.reshape(-1)).reshape(
                context.shape
            ),
            "label_movie_id": named("movie", known.items[:SAMPLES, -1]),
        }
        self.data = tf.data.Dataset.from_tensor_slices(features)
        self.movies = named("movie", np.unique(known.items))
        self.query_model = lookup_and_rows(parts, "context", self.movies)
        self.query_model.add(
            tf.keras.layers.GRU(
                DIM,
                kernel_initializer=tf.keras.initializers.GlorotUniform(seed=1),
                recurrent_initializer=tf.keras.initializers.Orthogonal(seed=2),
            )
        )
        self.candidate_model = lookup_and_rows(parts, "movies", self.movies)
        self.task = parts.Retrieval(
            metrics=tfrs.metrics.FactorizedTopK(
                parts.candidates(self.movies, self.candidate_model)
            )
        )

    def compute_loss(self, inputs, training=False):
        query_embedding = self.query_model(inputs["context_movie_id"])
        candidate_embedding = self.candidate_model(inputs["label_movie_id"])
        return self.task(
            query_embedding,
            candidate_embedding,
            candidate_ids=inputs["label_movie_id"],
            compute_metrics=not training,
        )


class Options(BasicRetrieval):
    """A mean and all that the task takes, towers with dense layers."""

    evaluates = False

    def __init__(self, parts):
        super().__init__(parts)
        self.user_model.add(dense(DIM, seed=1))
        self.movie_model.add(dense(DIM, "tanh", seed=2))
        self.task = parts.Retrieval(
            loss=tf.keras.losses.CategoricalCrossentropy(from_logits=True),
            num_hard_negatives=5,
            temperature=0.5,
            batch_metrics=[
                tf.keras.metrics.TopKCategoricalAccuracy(3, name="in_batch")
            ],
            loss_metrics=[tf.keras.metrics.Mean("mean_loss")],
            remove_accidental_hits=True,
        )

    def compute_loss(self, features, training=False):
        title = features["movie_title"]
        chances = tf.strings.to_hash_bucket_fast(title, 7) + 1
        return self.task(
            self.user_model(features["user_id"]),
            self.movie_model(title),
            sample_weight=features["user_rating"],
            candidate_sampling_probability=tf.cast(chances, tf.float32) / 50.0,
            candidate_ids=title,
        )


MODELS = {
    "basic": BasicRetrieval,
    "multitask": Multitask,
    "sequential": SequentialRetrieval,
    "options": Options,
}
