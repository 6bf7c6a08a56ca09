# SPDX-License-Identifier: Apache-2.0
"""Ids that travel a step ahead."""

import numpy as np
import tensorflow as tf
from exchange_models import BATCH
from exchange_models import DIM
from exchange_models import HOTNESS
from exchange_models import Top
from exchange_models import data
from exchange_models import embedding
from exchange_models import exchanges_of

import tfdist_ext
from tfdist_ext.layers import FullSparse
from tfdist_ext.tables.placement import TablePlacement

keras = tf.keras


def prefetch(strategy, folder):
    """Ids travel a step ahead; results and exchanges stay the same."""
    uneven = data(7).unbatch().batch(BATCH + 13)  # the last batch is smaller

    def fit(name, **options):
        with strategy.scope():
            layer = embedding(strategy, name, **options)
            model = Top(layer)
            model.compile(tfdist_ext.optimizers.Adagrad(0.1), "mse")
        dataset = uneven.map(lambda x, y: (layer.preprocess(x), y))
        # Validation between epochs, which an iterator outlives.
        fitted = model.fit(
            dataset.repeat(),
            epochs=3,
            steps_per_epoch=3,
            validation_data=dataset.take(2),
            verbose=0,
        )
        return model, fitted.history["loss"] + fitted.history["val_loss"]

    _, expected = fit("on_time")
    model, losses = fit("ahead", prefetch_ids=True)
    np.testing.assert_array_equal(losses, expected)
    steps = exchanges_of(strategy, "on_time/ids")
    assert exchanges_of(strategy, "ahead/next/ids") == steps
    # On time only where an iterator starts, or goes on after another.
    assert 0 < exchanges_of(strategy, "ahead/ids") < steps / 2

    # Iterators of one dataset in turns, one given up; every batch twice.
    layer = model.sparse

    def prepare(x, _):
        # The same layer on two inputs of a batch, too.
        turned = {table: tf.reverse(ids, [0]) for table, ids in x.items()}
        return x, layer.preprocess(x), turned, layer.preprocess(turned)

    dataset = uneven.map(prepare)
    local = strategy.experimental_distribute_dataset(dataset)
    look_up = tf.function(layer)
    tables = layer.get_embedding_tables()
    iterators = [iter(local), iter(local), iter(local)]
    for turn in (0, 0, 1, 1, 0, 2, 2, 1, 1):
        first, prefetched, second, other = next(iterators[turn])
        inputs = [(first, prefetched), (second, other)] * 2
        for plain, ahead in inputs:
            found = strategy.run(look_up, args=(ahead,))
            for table, ids in plain.items():
                np.testing.assert_allclose(
                    found[table],
                    tf.reduce_mean(tf.gather(tables[table], ids), 1),
                    rtol=1e-5,
                    atol=1e-6,
                )


def prefetch_distinct(strategy, folder):
    """A rank with few distinct ids counts for its samples all the same."""
    ids = np.random.default_rng(1).zipf(1.2, [5 * BATCH, HOTNESS]) % 2000
    ids[np.arange(len(ids)) % BATCH < BATCH // strategy.world_size] = 7
    labels = (ids[:, :1] % 2).astype(np.float32)
    dataset = tf.data.Dataset.from_tensor_slices((ids, labels)).batch(BATCH)
    distinct = TablePlacement.row_wise(strategy.world_size, deduplicate=True)

    def fit(prefetch_ids):
        with strategy.scope():
            layer = FullSparse(
                DIM,
                2000,
                use_bias=False,
                sharding=distinct,
                kernel_initializer=keras.initializers.RandomNormal(seed=3),
                prefetch_ids=prefetch_ids,
                name="distinct",  # Initial values depend on it.
            )
            model = Top(layer)
            model.compile(tfdist_ext.optimizers.Adagrad(0.1), "mse")
        inputs = dataset.map(lambda x, y: (layer.preprocess(x), y))
        losses = model.fit(inputs, epochs=2, verbose=0).history["loss"]
        return losses, layer

    expected, plain = fit(False)
    losses, layer = fit(True)
    np.testing.assert_array_equal(losses, expected)
    table = strategy.gather_table(layer)
    np.testing.assert_array_equal(table, strategy.gather_table(plain))

    # Outside of `run` no step tells exchanges apart.
    look_up = tf.function(layer)
    inputs = dataset.map(lambda x, _: (x, layer.preprocess(x)))
    for x, prefetched in strategy.experimental_distribute_dataset(inputs):
        np.testing.assert_allclose(
            look_up(prefetched),
            tf.reduce_sum(tf.gather(table, x), 1),
            rtol=1e-5,
            atol=1e-6,
        )

    # How many ids a sample has, the planner cannot know.
    with strategy.scope():
        made = FullSparse(DIM, 200_000, prefetch_ids=True)
        made.build(layer.preprocess(tf.constant([[1, 2]])).shape)
        known = FullSparse(DIM, 200_000, name=made.name)
        known.build([None, None])
    assert made.spec == known.spec
