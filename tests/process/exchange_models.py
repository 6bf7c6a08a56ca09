# SPDX-License-Identifier: Apache-2.0
"""Models of several tables, their data, and what is counted."""

import numpy as np
import tensorflow as tf
from fit_models import same_on_all_ranks

import tfdist_ext
from tfdist_ext.layers import DistributedEmbedding
from tfdist_ext.layers import FeatureConfig
from tfdist_ext.layers import TableConfig
from tfdist_ext.tables.placement import TablePlacement

keras = tf.keras
BATCH, STEPS, HOTNESS, DIM = 64, 45, 8, 5
ROWS = {"rows": 3000, "columns": 500, "distinct": 2000}


def placements(ranks):
    return {
        "rows": TablePlacement.row_wise(ranks),
        "columns": TablePlacement.column_wise(ranks),
        "distinct": TablePlacement.grid(max(1, ranks // 2), 2, True),
    }


def embedding(
    strategy,
    name,
    dtype="float32",
    out_of_range="error",
    optimizer=None,
    **options,
):
    places = placements(strategy.world_size)
    features = {}
    for table, rows in ROWS.items():
        config = TableConfig(
            table,
            rows,
            DIM,
            keras.initializers.RandomNormal(0.0, 0.3, seed=3),
            placement=places[table],
            optimizer=optimizer if table == "columns" else None,
            dtype=dtype,
            out_of_range=out_of_range,
        )
        features[table] = FeatureConfig(
            table, config, (None, HOTNESS), (None, DIM)
        )
    return DistributedEmbedding(features, name=name, **options)


class Top(keras.Model):
    """A sparse layer, its outputs side by side, and a dense one."""

    def __init__(self, sparse):
        super().__init__()
        self.sparse = sparse
        self.top = keras.layers.Dense(
            1, kernel_initializer=keras.initializers.GlorotUniform(seed=6)
        )

    def call(self, inputs):
        found = tf.nest.flatten(self.sparse(inputs))
        width = sum(part.shape[-1] for part in found)
        return self.top(tf.ensure_shape(tf.concat(found, 1), [None, width]))


def data(steps=STEPS, seed=1):
    """Ids as popular as Zipf's, of two dtypes."""
    rng = np.random.default_rng(seed)
    ids = {
        table: rng.zipf(1.2, [steps * BATCH, HOTNESS]) % rows
        for table, rows in ROWS.items()
    }
    ids["columns"] = ids["columns"].astype(np.int32)
    labels = rng.normal(size=[steps * BATCH, 1]).astype(np.float32)
    labels += (ids["rows"][:, :1] % 2).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((ids, labels)).batch(BATCH)


def train(strategy, make, dataset=None):
    """A model's loss after every step, the same on all ranks."""
    with strategy.scope():
        model = Top(make())
        model.compile(tfdist_ext.optimizers.Adagrad(0.1), "mse")
    losses = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: losses.append(logs["loss"])
    )
    # Builds the model: not all of the layers are built before.
    model.fit(dataset or data(), verbose=0, callbacks=[note])
    assert same_on_all_ranks(strategy, losses)
    return model, np.array(losses)


def exchanges_of(strategy, label):
    return strategy.statistics()["labels"].get(label, (0, 0))[0]
