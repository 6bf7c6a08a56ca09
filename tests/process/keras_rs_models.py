# SPDX-License-Identifier: Apache-2.0
"""Examples of keras-rs, as published but for `parts`, see `tfrs_models`."""

import keras
import keras_rs
import tensorflow as tf
from data import histories
from retrieval_models import DIM
from retrieval_models import SAMPLES
from retrieval_models import read

BruteForce = keras_rs.layers.BruteForceRetrieval
Retrieval = None  # keras-rs has none: examples write their loss


class BasicRetrieval(keras.Model):
    """basic_retrieval: a rating is a product of rows; all movies are found."""

    evaluates = True  # training finds nothing

    def __init__(self, parts):
        super().__init__()
        _, known = read()
        features = {"user_id": known.users[:SAMPLES]}
        labels = {
            "movie_id": known.items[:SAMPLES],
            "rating": known.scores[:SAMPLES],
        }
        self.data = tf.data.Dataset.from_tensor_slices((features, labels))
        self.user_embedding = parts.embedding("users", 500)
        self.candidate_embedding = parts.embedding("movies", 800)
        self.retrieval = parts.BruteForce(k=10, return_scores=False)
        self.loss_fn = keras.losses.MeanSquaredError()

    def build(self, input_shape):
        self.user_embedding.build(input_shape)
        self.candidate_embedding.build(input_shape)
        # In this case, the candidates are directly the movie embeddings.
        self.retrieval.candidate_embeddings = (
            self.candidate_embedding.embeddings
        )
        self.retrieval.build(input_shape)
        super().build(input_shape)

    def call(self, inputs, training=False):
        user_embeddings = self.user_embedding(inputs["user_id"])
        result = {"user_embeddings": user_embeddings}
        if not training:
            # Skip the retrieval of top movies during training.
            result["predictions"] = self.retrieval(user_embeddings)
        return result

    def compute_loss(self, x, y, y_pred, sample_weight, training=True):
        candidate_id, rating = y["movie_id"], y["rating"]
        user_embeddings = y_pred["user_embeddings"]
        candidate_embeddings = self.candidate_embedding(candidate_id)
        labels = keras.ops.expand_dims(rating, -1)
        scores = keras.ops.sum(
            keras.ops.multiply(user_embeddings, candidate_embeddings),
            axis=1,
            keepdims=True,
        )
        return self.loss_fn(labels, scores, sample_weight)


class SequentialRetrieval(keras.Model):
    """sequential_retrieval: the next of all movies, by those of the batch."""

    def __init__(self, parts):
        super().__init__()
        path, _ = read()
        known = histories.read(path, 5)
        items = known.items[:SAMPLES]
        self.data = tf.data.Dataset.from_tensor_slices(
            (items[:, :-1], items[:, -1])
        )
        self.query_embedding = parts.embedding("context", 801)
        self.query_model = keras.Sequential(
            [
                self.query_embedding,
                keras.layers.GRU(
                    DIM,
                    kernel_initializer=keras.initializers.GlorotUniform(seed=1),
                    recurrent_initializer=keras.initializers.Orthogonal(seed=2),
                ),
            ]
        )
        self.candidate_model = parts.embedding("movies", 801)
        self.retrieval = parts.BruteForce(k=10, return_scores=False)
        self.loss_fn = keras.losses.CategoricalCrossentropy(
            from_logits=True, reduction="sum"
        )
        self.gather_candidates = parts.gather_candidates

    def build(self, input_shape):
        self.query_model.build(input_shape)
        self.candidate_model.build(input_shape)
        # In this case, the candidates are directly the movie embeddings.
        self.retrieval.candidate_embeddings = self.candidate_model.embeddings
        self.retrieval.build(input_shape)
        super().build(input_shape)

    def call(self, inputs, training=False):
        query_embeddings = self.query_model(inputs)
        result = {"query_embeddings": query_embeddings}
        if not training:
            # Skip the retrieval of top movies during training.
            result["predictions"] = self.retrieval(query_embeddings)
        return result

    def compute_loss(self, x, y, y_pred, sample_weight, training=True):
        query_embeddings = y_pred["query_embeddings"]
        candidate_embeddings = self.candidate_model(y)
        candidate_embeddings = self.gather_candidates(candidate_embeddings)
        num_queries = keras.ops.shape(query_embeddings)[0]
        num_candidates = keras.ops.shape(candidate_embeddings)[0]
        labels = keras.ops.eye(num_queries, num_candidates)
        scores = keras.ops.matmul(
            query_embeddings, keras.ops.transpose(candidate_embeddings)
        )
        return self.loss_fn(labels, scores, sample_weight)


MODELS = {
    "basic": BasicRetrieval,
    "sequential": SequentialRetrieval,
}
