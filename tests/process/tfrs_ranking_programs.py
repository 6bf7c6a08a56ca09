# SPDX-License-Identifier: Apache-2.0
"""Guides of tensorflow-recommenders on ranking, features and serving.

Each is a function of `parts`, which says what a port changes. It trains as
its guide does, and returns its model and what its guide prints.
"""

import movielens_files
import numpy as np
import tensorflow as tf
import tensorflow_recommenders as tfrs
from movielens_files import BATCH
from retrieval_models import DIM
from retrieval_models import dense
from tensorflow_recommenders.examples import movielens

keras = tf.keras


def strings(parts, name, vocabulary, mask_token=None):
    """A tower: names, and the rows of a table."""
    vocabulary = np.unique(vocabulary)
    lookup = keras.layers.StringLookup(
        vocabulary=vocabulary, mask_token=mask_token
    )
    # One row for unknown names, and one for the mask.
    more = 1 if mask_token is None else 2
    rows = parts.embedding(name, len(vocabulary) + more)
    return keras.Sequential([lookup, rows])


def ranking_task(loss=None, *metrics):
    return tfrs.tasks.Ranking(
        loss=loss or keras.losses.MeanSquaredError(),
        metrics=[*metrics, keras.metrics.RootMeanSquaredError()],
    )


def fitted(model, data):
    """What `fit` says of a model."""
    history = model.fit(data, epochs=1, verbose=0).history
    return {name: values[-1] for name, values in history.items()}


def evaluated(model, data):
    """What `evaluate` says of a model."""
    found = model.evaluate(data, return_dict=True, verbose=0)
    return {f"test/{name}": value for name, value in found.items()}


class Ratings(tfrs.Model):
    """The model of basic_ranking: a network over two rows."""

    def __init__(self, parts, users, titles):
        super().__init__()
        self.user_embeddings = strings(parts, "users", users)
        self.movie_embeddings = strings(parts, "movies", titles)
        self.ratings = keras.Sequential(
            [dense(16, "relu"), dense(8, "relu"), dense(1)]
        )
        self.task = ranking_task()

    def call(self, features):
        user_embedding = self.user_embeddings(features["user_id"])
        movie_embedding = self.movie_embeddings(features["movie_title"])
        return self.ratings(
            tf.concat([user_embedding, movie_embedding], axis=1)
        )

    def compute_loss(self, features, training=False):
        labels = features.pop("user_rating")
        return self.task(labels=labels, predictions=self(features))


def basic_ranking(parts):
    """Fits; says what a user gives three movies; leaves as a SavedModel."""
    data, known, titles = movielens_files.ratings(
        "user_id", "movie_title", "user_rating"
    )
    with parts.scope():
        model = Ratings(parts, known["user_id"], titles)
        model.compile(optimizer=keras.optimizers.Adagrad(learning_rate=0.1))
    found = fitted(model, data.batch(BATCH).cache())
    asked = {
        "user_id": tf.constant(["12"] * 3),
        "movie_title": tf.constant(titles[:3]),
    }
    found["ratings"] = model(asked)
    loaded = tf.saved_model.load(parts.save(model))
    found["served"] = loaded(asked)
    return model, found


class CrossNetwork(tfrs.Model):
    """The model of dcn: tables of strings and of integers, a cross layer."""

    strings = ("movie_id", "user_id", "user_zip_code", "user_occupation_text")
    integers = ("user_gender", "bucketized_user_age")

    def __init__(self, parts, known, projection_dim):
        super().__init__()
        self.embeddings = {
            name: strings(parts, name, known[name]) for name in self.strings
        }
        for name in self.integers:
            vocabulary = np.unique(known[name])
            lookup = keras.layers.IntegerLookup(
                vocabulary=vocabulary, mask_value=None
            )
            rows = parts.embedding(name, len(vocabulary) + 1)
            self.embeddings[name] = keras.Sequential([lookup, rows])
        self.cross_layer = tfrs.layers.dcn.Cross(
            projection_dim=projection_dim,
            kernel_initializer=keras.initializers.GlorotUniform(seed=1),
        )
        self.deep_layers = [dense(16, "relu"), dense(16, "relu")]
        self.logit_layer = dense(1)
        self.task = ranking_task()

    def call(self, features):
        x = [layer(features[name]) for name, layer in self.embeddings.items()]
        x = self.cross_layer(tf.concat(x, axis=1))
        for layer in self.deep_layers:
            x = layer(x)
        return self.logit_layer(x)

    def compute_loss(self, features, training=False):
        labels = features.pop("user_rating")
        return self.task(labels=labels, predictions=self(features))


def dcn(parts):
    """The cross network of low rank, with Adam."""
    names = (*CrossNetwork.strings, *CrossNetwork.integers, "user_rating")
    data, known, _ = movielens_files.ratings(*names)
    with parts.scope():
        model = CrossNetwork(parts, known, projection_dim=6)
        model.compile(optimizer=keras.optimizers.Adam(learning_rate=0.01))
    return model, fitted(model, data.batch(BATCH).cache())


class Queries(keras.Model):
    """Of context_features: who asks, and when, in buckets and as a number."""

    def __init__(self, parts, known):
        super().__init__()
        times = known["timestamp"]
        buckets = np.linspace(times.min(), times.max(), num=30)
        self.user_embedding = strings(parts, "users", known["user_id"])
        self.timestamp_embedding = keras.Sequential(
            [
                keras.layers.Discretization(buckets.tolist()),
                parts.embedding("times", len(buckets) + 1),
            ]
        )
        self.normalized_timestamp = keras.layers.Normalization(axis=None)
        self.normalized_timestamp.adapt(times)

    def call(self, inputs):
        time = inputs["timestamp"]
        number = tf.reshape(self.normalized_timestamp(time), (-1, 1))
        rows = self.user_embedding(inputs["user_id"])
        return tf.concat([rows, self.timestamp_embedding(time), number], axis=1)


class Movies(keras.Model):
    """Of context_features: titles, whole and word by word."""

    def __init__(self, parts, titles):
        super().__init__()
        self.title_embedding = strings(parts, "movies", titles)
        self.vectorizer = keras.layers.TextVectorization(max_tokens=300)
        self.title_text_embedding = keras.Sequential(
            [
                self.vectorizer,
                parts.embedding("words", 300, mask_zero=True),
                keras.layers.GlobalAveragePooling1D(),
            ]
        )
        movies = tf.data.Dataset.from_tensor_slices(titles)
        self.vectorizer.adapt(movies.batch(50))

    def call(self, titles):
        return tf.concat(
            [self.title_embedding(titles), self.title_text_embedding(titles)],
            axis=1,
        )


class InContext(tfrs.Model):
    """The model of context_features: two towers of several features each."""

    def __init__(self, parts, known, titles):
        super().__init__()
        self.query_model = keras.Sequential([Queries(parts, known), dense(DIM)])
        self.candidate_model = keras.Sequential(
            [Movies(parts, titles), dense(DIM)]
        )
        self.task = parts.Retrieval(
            metrics=tfrs.metrics.FactorizedTopK(
                parts.of_tower(titles, self.candidate_model)
            )
        )

    def compute_loss(self, features, training=False):
        query = {name: features[name] for name in ("user_id", "timestamp")}
        # In training, what a search finds is what it finds in between.
        return self.task(
            self.query_model(query),
            self.candidate_model(features["movie_title"]),
            candidate_ids=features["movie_title"],
            compute_metrics=not training,
        )


def context_features(parts):
    """Candidates of a tower with a dense layer, searched as they are then."""
    data, known, titles = movielens_files.ratings(
        "user_id", "movie_title", "timestamp"
    )
    with parts.scope():
        model = InContext(parts, known, titles)
        model.compile(optimizer=keras.optimizers.Adagrad(0.1))
    data = data.batch(BATCH)
    return model, fitted(model, data) | evaluated(model, data)


class PairwiseHinge(keras.losses.Loss):
    """As of tensorflow_ranking, which today's TensorFlow cannot import."""

    def call(self, labels, scores):
        pairs = labels[:, :, tf.newaxis] > labels[:, tf.newaxis, :]
        apart = scores[:, :, tf.newaxis] - scores[:, tf.newaxis, :]
        return tf.where(pairs, tf.nn.relu(1.0 - apart), 0.0)


class ListRanking(tfrs.Model):
    """The model of listwise_ranking: scores of the movies in a list."""

    def __init__(self, parts, users, titles, loss):
        super().__init__()
        self.user_embeddings = strings(parts, "users", users, "")
        self.movie_embeddings = strings(parts, "movies", titles, "")
        self.score_model = keras.Sequential(
            [dense(16, "relu"), dense(8, "relu"), dense(1)]
        )
        self.task = ranking_task(loss)

    def call(self, features):
        user_embeddings = self.user_embeddings(features["user_id"])
        movie_embeddings = self.movie_embeddings(features["movie_title"])
        list_length = features["movie_title"].shape[1]
        repeated = tf.repeat(
            tf.expand_dims(user_embeddings, 1), [list_length], axis=1
        )
        return self.score_model(tf.concat([repeated, movie_embeddings], 2))

    def compute_loss(self, features, training=False):
        labels = features.pop("user_rating")
        scores = tf.squeeze(self(features), axis=-1)
        return self.task(labels=labels, predictions=scores)


def listwise_ranking(parts):
    """Lists drawn by TFRS's own function; a loss over pairs of a list."""
    data, known, titles = movielens_files.ratings(
        "user_id", "movie_title", "user_rating"
    )
    lists = movielens.sample_listwise(
        data, num_list_per_user=3, num_examples_per_list=3, seed=42
    )
    with parts.scope():
        model = ListRanking(parts, known["user_id"], titles, PairwiseHinge())
        model.compile(optimizer=keras.optimizers.Adagrad(0.1))
    return model, fitted(model, lists.batch(BATCH).cache())


class TwoTowers(tfrs.Model):
    """The model of efficient_serving, whose metric is given its index."""

    def __init__(self, parts, users, titles):
        super().__init__()
        self.movie_model = strings(parts, "movies", titles)
        self.user_model = strings(parts, "users", users)
        self.task = parts.Retrieval(
            metrics=tfrs.metrics.FactorizedTopK(
                parts.candidates(np.unique(titles), self.movie_model)
            )
        )

    def compute_loss(self, features, training=False):
        return self.task(
            self.user_model(features["user_id"]),
            self.movie_model(features["movie_title"]),
            candidate_ids=features["movie_title"],
            compute_metrics=not training,
        )


def efficient_serving(parts):
    """Movies and many more are candidates, of a metric too; they are saved."""
    data, known, titles = movielens_files.ratings("user_id", "movie_title")
    with parts.scope():
        model = TwoTowers(parts, known["user_id"], titles)
        model.compile(optimizer=keras.optimizers.Adagrad(learning_rate=0.1))
    data = data.batch(BATCH)
    found = fitted(model, data)
    movies = tf.data.Dataset.from_tensor_slices(titles).batch(100)
    more = movies.repeat(3)
    names = movies.concatenate(more.map(tf.zeros_like))
    rows = movies.map(model.movie_model).concatenate(
        more.enumerate().map(lambda i, x: model.movie_model(x) * noise(i, x))
    )
    lots_of_movies = tf.data.Dataset.zip((names, rows))
    with parts.scope():
        index = parts.BruteForce()
    index.index_from_dataset(lots_of_movies)
    users = tf.constant(["12", "31"])
    found["scores"], best = index(model.user_model(users), k=10)
    found["others"] = tf.cast(best == b"", tf.float32)
    with parts.scope():
        # TFRS loses a metric that is not in a list.
        metric = tfrs.metrics.FactorizedTopK(index)
        model.task.factorized_metrics = [metric]
        model.compile()
    found |= evaluated(model, data)
    with parts.scope():
        index = parts.BruteForce(query_model=model.user_model)
    index.index_from_dataset(lots_of_movies)
    index(users)
    loaded = tf.saved_model.load(parts.save(index))
    found["served"], _ = loaded(users)
    return model, found


def noise(number, x):
    seed = tf.stack([number, 7])
    return tf.random.stateless_uniform([tf.shape(x)[0], 1], seed)


PROGRAMS = {
    "basic_ranking": basic_ranking,
    "dcn": dcn,
    "context_features": context_features,
    "listwise_ranking": listwise_ranking,
    "efficient_serving": efficient_serving,
}
