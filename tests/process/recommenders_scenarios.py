# SPDX-License-Identifier: Apache-2.0
"""Trains models of tensorflow-recommenders, on any number of ranks."""

import numpy as np
import tensorflow as tf
import tensorflow_recommenders as tfrs

import tfdist_ext
from tfdist_ext.layers import DistributedEmbedding
from tfdist_ext.layers import FeatureConfig
from tfdist_ext.layers import TableConfig

SAMPLES, BATCH = 960, 48


def feature(name, rows, dim, placement="sparsecore"):
    initializer = tf.keras.initializers.RandomNormal(0.0, 0.1, seed=1)
    table = TableConfig(
        name, rows, dim, initializer, placement=placement, combiner="sum"
    )
    return FeatureConfig(name, table, (None,), (None, dim))


def dlrm():
    """`tfrs.experimental.models.Ranking` on four tables."""
    names = {"c1": 1000, "c2": 77, "c3": 500, "c4": 9}
    rng = np.random.default_rng(1)
    sparse = {n: rng.zipf(1.2, SAMPLES) % rows for n, rows in names.items()}
    dense = rng.normal(size=(SAMPLES, 5)).astype(np.float32)
    labels = (dense[:, 0] + np.sin(sparse["c1"]) > 0).astype(np.float32)
    inputs = {"dense_features": dense, "sparse_features": sparse}
    data = tf.data.Dataset.from_tensor_slices((inputs, labels)).batch(BATCH)

    def mlp(*units):
        return tf.keras.Sequential(
            [
                tf.keras.layers.Dense(
                    width,
                    "sigmoid" if width == 1 else "relu",
                    kernel_initializer=tf.keras.initializers.GlorotUniform(
                        seed=i
                    ),
                )
                for i, width in enumerate(units)
            ]
        )

    placements = ["row_wise", "data_parallel", "column_wise", "table_wise"]
    model = tfrs.experimental.models.Ranking(
        DistributedEmbedding(
            {
                n: feature(n, rows, 8, placement)
                for (n, rows), placement in zip(
                    names.items(), placements, strict=True
                )
            }
        ),
        bottom_stack=mlp(16, 8),
        top_stack=mlp(16, 1),
    )
    return model, data


class TwoTower(tfrs.Model):
    """Retrieval: users and movies in one space."""

    def __init__(self):
        super().__init__()
        self.embedding = DistributedEmbedding(
            {
                "user": feature("user", 943, 16),
                "movie": feature("movie", 1682, 16),
            }
        )
        self.user = tf.keras.layers.Dense(8)
        self.movie = tf.keras.layers.Dense(8)
        self.task = tfrs.tasks.Retrieval()

    def candidates(self, movies):
        return movies  # of this rank

    def compute_loss(self, inputs, training=False):
        found = self.embedding(inputs)
        loss = self.task(
            self.user(found["user"]),
            self.candidates(self.movie(found["movie"])),
            compute_metrics=False,
        )
        return loss


class AllNegatives(TwoTower):
    """Candidates of all ranks, this rank's own first."""

    def candidates(self, movies):
        context = tf.distribute.get_replica_context()
        sizes = context.all_gather(tf.shape(movies)[:1], axis=0)
        before = tf.reduce_sum(sizes[: context.replica_id_in_sync_group])
        return tf.roll(context.all_gather(movies, axis=0), -before, axis=0)


class DefaultLoss(TwoTower):
    """A task whose loss stock refuses under a strategy."""

    def __init__(self):
        super().__init__()
        self.task = tfrs.tasks.Ranking()

    def compute_loss(self, inputs, training=False):
        found = self.embedding(inputs)
        both = self.user(found["user"]) + self.movie(found["movie"])
        labels = tf.cast(inputs["movie"] % 2, tf.float32)[:, tf.newaxis]
        scores = tf.sigmoid(tf.reduce_sum(both, axis=1, keepdims=True))
        return self.task(labels=labels, predictions=scores)


def two_tower(make=TwoTower):
    rng = np.random.default_rng(2)
    user = rng.integers(0, 943, SAMPLES)
    data = {"user": user, "movie": (user * 7) % 1682}
    return make(), tf.data.Dataset.from_tensor_slices(data).batch(BATCH)


class Rating(tfrs.Model):
    """The Ranking task, with a loss that docs/errors.md tells to take."""

    def __init__(self, loss):
        super().__init__()
        self.embedding = DistributedEmbedding({"user": feature("user", 50, 8)})
        self.top = tf.keras.layers.Dense(
            1, "sigmoid", kernel_initializer="ones"
        )
        self.task = tfrs.tasks.Ranking(
            loss, metrics=[tf.keras.metrics.RootMeanSquaredError("rmse")]
        )

    def compute_loss(self, inputs, training=False):
        found = self.embedding({"user": inputs["user"]})
        losses = self.task(
            labels=inputs["label"], predictions=self.top(found["user"])
        )
        return tf.nn.compute_average_loss(losses)


def rmse(strategy):
    """Of every epoch; the last batch has an odd number of samples."""
    users = np.arange(985) % 50
    data = {"user": users, "label": (users[:, None] % 3 == 0).astype("float32")}
    data = tf.data.Dataset.from_tensor_slices(data).batch(BATCH)
    each = tf.keras.losses.BinaryCrossentropy(reduction="none")
    with strategy.scope():
        model = Rating(each)
        model.compile(optimizer=tfdist_ext.optimizers.Adagrad(0.5))
    return model.fit(data, epochs=4, verbose=0).history["rmse"]


def check_candidates(model):
    """The candidates of a retrieval index, as TFRS's guide makes them."""

    def embed(ids):
        found = model.embedding({"user": tf.zeros_like(ids), "movie": ids})
        return ids, model.movie(found["movie"])

    candidates = tf.data.Dataset.range(1600).batch(100)
    index = tfrs.layers.factorized_top_k.BruteForce()
    index.index_from_dataset(candidates.map(embed, num_parallel_calls=4))
    table = model.embedding.get_embedding_tables()["movie"][:1600]
    np.testing.assert_allclose(index._candidates, model.movie(table), 1e-5)


def train(strategy, folder):
    """Losses and metrics of all models, by name."""
    result = {}
    models = {
        "dlrm": dlrm,
        "two_tower": two_tower,
        "all_negatives": lambda: two_tower(AllNegatives),
        "default_loss": lambda: two_tower(DefaultLoss),
    }
    for name, make in models.items():
        tf.keras.utils.set_random_seed(3)
        with strategy.scope():
            model, data = make()
            model.compile(optimizer=tfdist_ext.optimizers.Adagrad(0.1))
        history = model.fit(data, epochs=4, verbose=0).history
        result[f"{name}/loss"] = history["loss"]
    check_candidates(model)
    result["rating/rmse"] = rmse(strategy)
    return result
