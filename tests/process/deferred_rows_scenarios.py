# SPDX-License-Identifier: Apache-2.0
"""Tables whose rows are updated once in a round."""

import numpy as np
import pytest
import tensorflow as tf
from consistency_scenarios import ROWS
from consistency_scenarios import arrays
from consistency_scenarios import normal
from consistency_scenarios import scope

import tfdist_ext
from tfdist_ext.layers import DistributedEmbedding
from tfdist_ext.layers import DynamicVocabulary
from tfdist_ext.layers import Embedding
from tfdist_ext.layers import FeatureConfig
from tfdist_ext.layers import FullSparse
from tfdist_ext.layers import TableConfig
from tfdist_ext.optimizers import CowClip
from tfdist_ext.tables.placement import TablePlacement

keras = tf.keras
# The mean of a step's batch has this divisor; rounds add up these means.
SIZE = 4
TABLES = {
    "rows": {"placement": "row_wise", "combiner": "sum"},
    "columns": {"placement": "column_wise", "combiner": "mean"},
    "once": {
        "placement": "row_wise",
        "combiner": "sqrtn",
        "deduplicate": True,
    },
    "keys": {"placement": "row_wise", "combiner": "sum"},
}


def embedding(keys=True, **options):
    """Tables of all placements, one of them with a vocabulary that grows."""
    features = {}
    for seed, (name, table) in enumerate(TABLES.items()):
        if name == "keys" and not keys:
            continue
        initial = {"vocabulary_size": ROWS, "initializer": normal(seed)}
        if name == "keys":  # Rows depend on the order of the keys.
            initial = {
                "vocabulary": DynamicVocabulary(2 * ROWS),
                "initializer": "zeros",
            }
        config = TableConfig(name, embedding_dim=4, **initial, **table)
        features[name] = FeatureConfig(name, config, (None, 3), (None, 4))
    return DistributedEmbedding(features, name="tables", **options)


class Tables(keras.Model):
    """Trained tables, and a layer that is called twice; fixed dense layers."""

    def __init__(self, keys=True, **options):
        super().__init__()
        self.names = [name for name in TABLES if keys or name != "keys"]
        self.tables = embedding(keys, **options)
        self.twice = FullSparse(
            4, ROWS, sharding="row", kernel_initializer=normal(9)
        )
        self.twice.use_bias = False
        self.hidden = keras.layers.Dense(
            5, "tanh", kernel_initializer=normal(10), trainable=False
        )
        self.output_layer = keras.layers.Dense(
            1, "sigmoid", kernel_initializer=normal(11), trainable=False
        )

    def call(self, inputs):
        ids, tables = inputs
        found = list(self.tables(tables).values())
        found += [self.twice(ids[:, :2]), self.twice(ids[:, 1:])]
        return self.output_layer(self.hidden(tf.concat(found, 1)))


def dataset_of(model, size):
    def prepare(ids, labels):
        tables = {name: (ids + i) % ROWS for i, name in enumerate(model.names)}
        return (ids, model.tables.preprocess(tables)), labels

    data = tf.data.Dataset.from_tensor_slices(arrays()).batch(size)
    return data.map(prepare)


def fitted(strategy, folder, size, optimizer, of_keras, in_loop, options):
    """Predictions after two epochs, and the number of steps."""
    kinds = keras.optimizers if of_keras else tfdist_ext.optimizers
    total = keras.losses.BinaryCrossentropy(reduction="sum")
    with scope(strategy):
        model = Tables(**options)
        model.compile(
            getattr(kinds, optimizer)(0.3),
            total if strategy is None else "binary_crossentropy",
            loss_weights=[1 / SIZE] if strategy is None else None,
        )
    data = dataset_of(model, size)
    if in_loop:
        loop_over(strategy, model, data)
    else:
        model.fit(data, epochs=2, verbose=0)
    everything = dataset_of(model, 44)
    return {
        "steps": int(np.array(model.optimizer.iterations)),
        "predictions": model.predict(everything, verbose=0),
    }


def loop_over(strategy, model, data, epochs=2):
    def step(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            losses = keras.losses.binary_crossentropy(y, model(x))
            loss = tf.reduce_sum(losses) / SIZE
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        model.optimizer.apply_gradients(zip(gradients, variables, strict=True))

    run = tf.function(lambda batch: strategy.run(step, (batch,)))
    local = strategy.experimental_distribute_dataset(data)
    for _ in range(epochs):
        for batch in local:
            run(batch)
        strategy.synchronize()


def held_back(strategy, folder, batches, rate, sharding):
    """The table before and after what is held back is sent, and its share.

    Args:
        batches: ids `[steps, b]`.
        rate: learning rate.
        sharding: placement of the table.
    """
    with scope(strategy):
        layer = Embedding(
            ROWS,
            4,
            embeddings_initializer=keras.initializers.Constant(0.5),
            sharding=sharding,
            name="held",
        )
        model = keras.Sequential(
            [
                keras.Input([1], dtype="int64"),
                layer,
                keras.layers.Flatten(),
            ]
        )
        model.compile(
            tfdist_ext.optimizers.SGD(rate),
            lambda _, rows: tf.reduce_sum(rows * [1.0, 2.0, 3.0, 4.0], 1),
        )
    for ids in batches:
        model.train_on_batch(np.array(ids)[:, np.newaxis], np.zeros(len(ids)))
    before = strategy.gather_table(layer)
    strategy.synchronize()
    after = strategy.gather_table(layer)
    return before, after, strategy.statistics()["rows_held_back"]


def bytes_sent(strategy, folder, steps):
    """Bytes of an epoch by label, of ids that many samples have."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 10, [8 * steps, 6])
    with scope(strategy):
        layer = Embedding(1000, 16, sharding="row", name="repeated")
        model = keras.Sequential(
            [
                keras.Input([6], dtype="int64"),
                layer,
                keras.layers.Flatten(),
                keras.layers.Dense(1),
            ]
        )
        model.compile(tfdist_ext.optimizers.SGD(0.1), "mse")

    def labels():
        model.fit(ids, ids[:, :1] / 10, batch_size=8, shuffle=False, verbose=0)
        found = strategy.statistics()["labels"]
        return {name: each[1] for name, each in found.items()}

    first = labels()  # with a check
    return {
        name: count - first.get(name, 0) for name, count in labels().items()
    }


def copied(strategy, folder, ids, sharding, wire_dtype, in_loop):
    """Tables, logs and bytes of three epochs; tables change after the first.

    Args:
        ids: `[samples, 2]`; the second column is of a pooled feature.
        sharding: placement of the table of the first column.
        wire_dtype: see `Wire`.
        in_loop: whether the loop is one of the program.
    """
    ids = np.array(ids)
    options = {"embeddings_initializer": normal(1), "wire_dtype": wire_dtype}
    ranks = range(strategy.num_replicas_in_sync)
    parts = {f"{sharding}_parts": len(ranks), "ranks": tuple(ranks)}
    with scope(strategy):
        once, pooled = (
            Embedding(
                ROWS,
                4,
                sharding=TablePlacement(deduplicate=deduplicate, **parts),
                name=name,
                **options,
            )
            for name, deduplicate in (("once", True), ("pooled", False))
        )
        inputs = keras.Input([2], dtype="int64")
        found = keras.layers.Flatten()(
            keras.layers.concatenate([once(inputs[:, :1]), pooled(inputs)], 1)
        )
        model = keras.Model(inputs, keras.layers.Dense(1)(found))
        model.compile(tfdist_ext.optimizers.Adagrad(0.3), "mse")
    x, y = ids, np.sin(ids[:, :1])
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    tables, logs = [], {}
    for epoch in range(3):
        if in_loop:
            loop_over(strategy, model, data, epochs=1)
        else:
            logs = model.fit(data, verbose=0).history
            model.evaluate(data, verbose=0)
        if epoch == 0:
            weights = [0.5 * each for each in model.get_weights()]
            model.set_weights(weights)
        tables.append([strategy.gather_table(each) for each in (once, pooled)])
    statistics = strategy.statistics()
    labels = {name: each[1] for name, each in statistics["labels"].items()}
    return {
        "tables": tables,
        "logs": logs.get("row_cache_hits"),
        "hits": statistics.get("row_cache_hits"),
        "bytes": sum(v for k, v in labels.items() if k.endswith("/results")),
    }


def refused(strategy, folder):
    """What needs rows in every step is named."""
    ids, labels = arrays(8)

    def model_of(layer, **options):
        with strategy.scope():
            inputs = keras.Input([3], dtype="int64")
            joined = layer(inputs)
            if isinstance(joined, dict):
                (joined,) = joined.values()
            model = keras.Model(inputs, keras.layers.Dense(1)(joined))
            model.compile(tfdist_ext.optimizers.SGD(**options), "mse")
        return model

    evicting = TableConfig(
        "lru",
        embedding_dim=4,
        placement="row_wise",
        vocabulary=DynamicVocabulary(20, evict="lru"),
    )
    with strategy.scope():
        keys = DistributedEmbedding(
            FeatureConfig("lru", evicting, (None, 3), (None, 4))
        )
        plain = FullSparse(4, ROWS, sharding="row")
    with pytest.raises(Exception, match=r"'lru'.*evict.*tables=True"):
        model_of(keys).fit(ids, labels, verbose=0)
    with pytest.raises(ValueError, match=r"SGD has a `row_clip`.*LocalSteps"):
        model_of(plain, row_clip=CowClip()).fit(ids, labels, verbose=0)


def in_inner_function(strategy, folder):
    """A lookup whose gradient would be lost is an error."""
    with strategy.scope():
        layer = FullSparse(4, ROWS, sharding="row")
        layer.build([None, 3])
    inner = tf.function(layer)

    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(inner(ids))
        return tape.gradient(loss, layer.trainable_variables)[0].values

    with pytest.raises(
        LookupError, match=r"stays on its rank.*one tf\.function"
    ):
        strategy.run(step, (tf.constant(arrays(8)[0]),))
