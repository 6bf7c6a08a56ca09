# SPDX-License-Identifier: Apache-2.0
"""Examples of keras-rs on ranking, and SASRec; see `tfrs_ranking_programs`.

Its GRU4Rec is the example sequential_retrieval, in `keras_rs_models`.
"""

import keras
import keras_rs
import movielens_files
import numpy as np
import tensorflow as tf
from keras import ops
from movielens_files import BATCH
from movielens_files import MOVIES
from movielens_files import USERS
from retrieval_models import DIM
from retrieval_models import dense


def fitted(model, data):
    """What `fit` says of a model."""
    history = model.fit(data, epochs=1, verbose=0).history
    return {name: values[-1] for name, values in history.items()}


def numbers(*names):
    """Of every rating: integers where they are, and the score from 0 to 1."""
    known, _ = movielens_files.features()
    found = {name: known[name].astype(np.int32) for name in names}
    return found, (known["user_rating"] - 1.0) / 4.0


class Rating(keras.Model):
    """The model of basic_ranking: a network over two rows."""

    def __init__(self, parts):
        super().__init__()
        # Ids start at 1.
        self.user_embedding = parts.embedding("users", USERS + 1)
        self.candidate_embedding = parts.embedding("movies", MOVIES + 1)
        self.ratings = keras.Sequential(
            [dense(16, "relu"), dense(8, "relu"), dense(1)]
        )

    def call(self, inputs):
        user_embeddings = self.user_embedding(inputs["user_id"])
        candidate_embeddings = self.candidate_embedding(inputs["movie_id"])
        return self.ratings(
            ops.concatenate([user_embeddings, candidate_embeddings], axis=1)
        )


def basic_ranking(parts):
    """Fits; says what a user gives three movies."""
    data = tf.data.Dataset.from_tensor_slices(numbers("user_id", "movie_id"))
    with parts.scope():
        model = Rating(parts)
        model.compile(
            loss=keras.losses.MeanSquaredError(),
            metrics=[keras.metrics.RootMeanSquaredError()],
            optimizer=parts.rule(keras.optimizers.Adagrad(learning_rate=0.1)),
        )
    found = fitted(model, data.batch(BATCH).cache())
    asked = {
        "user_id": ops.array([12] * 3),
        "movie_id": ops.array([20, 14, 1]),
    }
    found["ratings"] = model.predict(asked, verbose=0)
    return model, found


class ListRanking(Rating):
    """The model of listwise_ranking: scores of the movies in a list."""

    def build(self, input_shape):
        self.user_embedding.build(input_shape["user_id"])
        self.candidate_embedding.build(input_shape["movie_id"])
        shape = self.candidate_embedding.compute_output_shape(
            input_shape["movie_id"]
        )
        self.ratings.build([*shape[:-1], 2 * shape[-1]])

    def call(self, inputs):
        user_id, movie_id = inputs["user_id"], inputs["movie_id"]
        candidate_embeddings = self.candidate_embedding(movie_id)
        repeated = ops.repeat(
            ops.expand_dims(self.user_embedding(user_id), axis=1),
            repeats=ops.shape(movie_id)[-1],
            axis=1,
        )
        scores = self.ratings(
            ops.concatenate([repeated, candidate_embeddings], axis=-1)
        )
        return ops.squeeze(scores, axis=-1)

    def compute_output_shape(self, input_shape):
        return (input_shape[0], input_shape[1])


def listwise_ranking(parts):
    """Lists of three movies of a user, by keras-rs's loss and metric."""
    known, scores = numbers("user_id", "movie_id")
    rng = np.random.default_rng(42)
    users, lists = [], []
    for user in np.unique(known["user_id"]):
        rated = np.flatnonzero(known["user_id"] == user)
        for _ in range(3 if len(rated) >= 3 else 0):
            users.append(user)
            lists.append(rng.choice(rated, 3, replace=False))
    inputs = {"user_id": users, "movie_id": known["movie_id"][lists]}
    data = tf.data.Dataset.from_tensor_slices((inputs, scores[lists]))
    with parts.scope():
        model = ListRanking(parts)
        model.compile(
            loss=keras_rs.losses.PairwiseHingeLoss(),
            metrics=[keras_rs.metrics.NDCG(k=3, name="ndcg")],
            optimizer=parts.rule(keras.optimizers.Adagrad(learning_rate=0.1)),
        )
    return model, fitted(model, data.batch(BATCH).cache())


class Decoder(keras.layers.Layer):
    """What sas_rec takes of KerasHub: a decoder that looks at what came."""

    def __init__(self):
        super().__init__()
        self.norms = [keras.layers.LayerNormalization() for _ in range(2)]
        start = keras.initializers.GlorotUniform(seed=1)
        # Biases of keys have no gradient but rounding errors.
        self.attend = keras.layers.MultiHeadAttention(
            2, DIM // 2, use_bias=False, kernel_initializer=start
        )
        self.inner, self.outer = dense(DIM, "relu"), dense(DIM)

    def call(self, x, decoder_padding_mask):
        seen = self.norms[0](x)
        allowed = decoder_padding_mask[:, tf.newaxis, :]
        x = x + self.attend(
            seen, seen, attention_mask=allowed, use_causal_mask=True
        )
        return x + self.outer(self.inner(self.norms[1](x)))


class SasRec(keras.Model):
    """The model of sas_rec: the next movie at every place, against one."""

    def __init__(self, parts, length):
        super().__init__()
        self.item_embedding = parts.embedding(
            "items",
            MOVIES + 1,
            # Its own `compute_loss` leaves it out.
            embeddings_regularizer=keras.regularizers.L2(0.001),
        )
        self.places = self.add_weight(
            shape=[length, DIM],
            initializer=keras.initializers.GlorotUniform(seed=2),
        )
        self.transformer_layers = [Decoder()]
        self.layer_norm = keras.layers.LayerNormalization(epsilon=1e-8)
        self.retrieval = parts.BruteForce(k=5, return_scores=False)
        self.loss_fn = keras.losses.BinaryCrossentropy(
            from_logits=True, reduction=None
        )

    def build(self, input_shape):
        self.item_embedding.build(input_shape)
        self.retrieval.candidate_embeddings = self.item_embedding.embeddings
        self.retrieval.build(input_shape)
        super().build(input_shape)

    def call(self, inputs, training=False):
        mask = inputs["padding_mask"]
        x = self.item_embedding(inputs["item_ids"]) + self.places
        for layer in self.transformer_layers:
            x = layer(x, decoder_padding_mask=mask)
        x = self.layer_norm(x)
        result = {"item_sequence_embedding": x}
        if not training:
            lengths = ops.sum(ops.cast(mask, "int32"), axis=1)
            last = ops.expand_dims(ops.maximum(lengths - 1, 0), axis=(-2, -1))
            last = ops.squeeze(ops.take_along_axis(x, last, axis=1), axis=1)
            result["predictions"] = self.retrieval(last)
        return result

    def compute_loss(self, x, y, y_pred, sample_weight, training=False):
        states = y_pred["item_sequence_embedding"]
        positive = ops.sum(
            self.item_embedding(y["positive_sequence"]) * states, axis=-1
        )
        negative = ops.sum(
            self.item_embedding(y["negative_sequence"]) * states, axis=-1
        )
        labels = [ops.ones_like(positive), ops.zeros_like(negative)]
        logits = ops.concatenate([positive, negative], axis=1)
        sample_weight = ops.concatenate([sample_weight] * 2, axis=1)
        loss = self.loss_fn(
            y_true=ops.expand_dims(ops.concatenate(labels, axis=1), axis=-1),
            y_pred=ops.expand_dims(logits, axis=-1),
            sample_weight=sample_weight,
        )
        return ops.divide_no_nan(ops.sum(loss), ops.sum(sample_weight))


def sas_rec(parts, length=5):
    """Sequences of different lengths; the best movies after each."""
    known, _ = numbers("user_id", "movie_id")
    movies = [
        known["movie_id"][known["user_id"] == user]
        for user in range(1, USERS + 1)
    ]
    rng = np.random.default_rng(3)
    others = [rng.integers(1, MOVIES + 1, len(each)) for each in movies]

    def padded(lists):
        ragged = tf.ragged.constant(lists, dtype=tf.int32)
        return ragged.to_tensor(shape=[None, length + 1])

    sequence, negative = padded(movies), padded(others)
    inputs = {
        "item_ids": sequence[:, :-1],
        "padding_mask": (sequence != 0)[:, :-1],
    }
    labels = {
        "positive_sequence": sequence[:, 1:],
        "negative_sequence": negative[:, 1:],
    }
    counts = tf.cast(sequence != 0, "float32")[:, 1:]
    data = tf.data.Dataset.from_tensor_slices((inputs, labels, counts))
    with parts.scope():
        model = SasRec(parts, length)
        rule = keras.optimizers.Adam(learning_rate=0.01, beta_2=0.98)
        model.compile(optimizer=parts.rule(rule))
    found = fitted(model, data.batch(13))
    asked = {name: value[:7] for name, value in inputs.items()}
    found["best"] = model.predict(asked, verbose=0)["predictions"]
    return model, found


# name, rows, ids of a sample; those of few rows are not partitioned.
LARGE = [("cat_14", 700, 3), ("cat_25", 300, 8), ("cat_34", 900, 20)]
SMALL = [("cat_19", 3, 1), ("cat_28", 118, 9)]


class DlrmDcnV2(keras.Model):
    """The model of ml_perf."""

    def __init__(self, parts):
        super().__init__()
        self.bottom_mlp = keras.Sequential(
            [dense(16, "relu"), dense(DIM, "relu")]
        )
        self.embedding_layer = parts.DistributedEmbedding(
            feature_configs=self.feature_configs(parts),
            table_stacking="auto",
            dtype="float32",
            name="embedding_layer",
        )
        self.small_embedding_layers = {
            f"{name}_id": parts.embedding(name, rows) for name, rows, _ in SMALL
        }
        start = keras.initializers.GlorotUniform(seed=1337)
        self.dcn_block = [
            keras_rs.layers.FeatureCross(
                projection_dim=6, kernel_initializer=start
            )
            for _ in range(2)
        ]
        self.top_mlp = keras.Sequential(
            [dense(16, "relu"), dense(1, "sigmoid")]
        )

    def feature_configs(self, parts):
        configs = {}
        for name, rows, _ in LARGE:
            table = parts.TableConfig(
                name=name,
                vocabulary_size=rows,
                embedding_dim=DIM,
                initializer=parts.start(name, rows),
                optimizer=keras.optimizers.Adagrad(learning_rate=0.05),
                combiner="sum",
                placement=parts.placement,
                max_ids_per_partition=8192,
                max_unique_ids_per_partition=4096,
            )
            configs[f"{name}_id"] = parts.FeatureConfig(
                name=name,
                table=table,
                input_shape=(BATCH, 1),
                output_shape=(BATCH, DIM),
            )
        return configs

    def call(self, inputs):
        found = [self.bottom_mlp(inputs["dense_input"])]
        found += self.embedding_layer(inputs["large_emb_inputs"]).values()
        for name, ids in inputs["small_emb_inputs"].items():
            rows = self.small_embedding_layers[name](ids)
            found.append(ops.sum(rows, axis=-2))
        x0 = x = ops.concatenate(found, axis=-1)
        for layer in self.dcn_block:
            x = layer(x0, x)
        return self.top_mlp(x)


def dlrm_dcn_v2(parts):
    """Batches of a Python generator, preprocessed by the layer."""
    rng = np.random.default_rng(1337)

    def ids(features):
        return {
            f"{name}_id": rng.integers(0, rows, [BATCH - 1, count])
            for name, rows, count in features
        }

    with parts.scope():
        model = DlrmDcnV2(parts)
        model.compile(
            loss=keras.losses.BinaryCrossentropy(),
            optimizer=parts.rule_with_tables(0.05),
            metrics=[keras.metrics.BinaryAccuracy(), keras.metrics.AUC()],
        )
    batches = [
        (
            {
                "dense_input": rng.random([BATCH - 1, 13], np.float32),
                "large_emb_inputs": ids(LARGE),
                "small_emb_inputs": ids(SMALL),
            },
            rng.integers(0, 2, [BATCH - 1, 1]),
        )
        for _ in range(3)
    ]

    def generator():
        for features, labels in batches:
            large = model.embedding_layer.preprocess(
                features["large_emb_inputs"], training=True
            )
            yield {**features, "large_emb_inputs": large}, labels

    return model, fitted(model, generator())


PROGRAMS = {
    "basic_ranking": basic_ranking,
    "listwise_ranking": listwise_ranking,
    "sas_rec": sas_rec,
    "dlrm_dcn_v2": dlrm_dcn_v2,
}
