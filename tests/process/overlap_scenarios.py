# SPDX-License-Identifier: Apache-2.0
"""Calls of one layer that overlap; all elements have one size.

Ranks ask for other ids and take their time, so that they do not call in one
order. Whatever is mixed up shows against the whole table.
"""

import functools
import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from tfdist_ext.layers import DistributedEmbedding
from tfdist_ext.layers import FeatureConfig
from tfdist_ext.layers import FullSparse
from tfdist_ext.layers import TableConfig

keras = tf.keras
ROWS, DIM, BATCH, HOTNESS, BATCHES = 300, 6, 8, 3, 40


def make_layer(strategy, sharding, **arguments):
    """A layer without bias, and its whole kernel."""
    with strategy.scope():
        layer = FullSparse(
            DIM,
            use_bias=False,
            sharding=sharding,
            **{"input_dim": ROWS, "kernel_initializer": "normal", **arguments},
        )
        layer.build((None, HOTNESS))
    return layer, strategy.gather_table(layer)


def make_ids(strategy):
    rng = np.random.default_rng(strategy.rank)
    return rng.integers(0, ROWS, [BATCHES, BATCH, HOTNESS])


def check(found, table, ids):
    np.testing.assert_allclose(found, table[ids].sum(-2), atol=1e-5)


@functools.lru_cache(1)
def _random(rank):
    return np.random.default_rng(100 + rank)


def dawdle(strategy, ids):
    """The ids, after a while that differs between ranks and elements."""

    def wait(value):
        time.sleep(_random(strategy.rank).uniform(0, 0.005))
        return value

    return tf.ensure_shape(tf.numpy_function(wait, [ids], tf.int64), ids.shape)


def parallel_map(strategy, folder):
    """`Dataset.map(layer, num_parallel_calls=...)`, as TFRS's candidates."""
    ids = make_ids(strategy)
    dataset = tf.data.Dataset.from_tensor_slices(ids)
    for sharding in ("row", "column"):
        layer, table = make_layer(strategy, sharding)
        found = dataset.map(
            lambda x, layer=layer: layer(dawdle(strategy, x)),
            num_parallel_calls=4,
        )
        check(list(found.as_numpy_iterator()), table, ids)
    with strategy.scope():
        config = TableConfig(
            "t", ROWS, DIM, combiner="sum", placement="row_wise"
        )
        feature = FeatureConfig("f", config, (None, HOTNESS), (None, DIM))
        layer = DistributedEmbedding(feature)
        layer.build()
    table = layer.get_embedding_tables()["t"].numpy()
    found = dataset.map(
        lambda x: layer(dawdle(strategy, x)),
        num_parallel_calls=tf.data.AUTOTUNE,
    )
    check(list(found.prefetch(2).as_numpy_iterator()), table, ids)


def parallel_iterations(strategy, folder):
    """`tf.map_fn` of a layer, in a step and outside of one."""
    ids = make_ids(strategy)
    layer, table = make_layer(strategy, "column")

    @tf.function
    def look_up(ids):
        return tf.map_fn(
            lambda x: layer(dawdle(strategy, x)),
            ids,
            fn_output_signature=tf.float32,
            parallel_iterations=8,
        )

    check(look_up(ids), table, ids)
    check(strategy.run(look_up, args=(tf.constant(ids),)), table, ids)


def threads(strategy, folder):
    """Threads that call one layer at once."""
    ids = make_ids(strategy)
    layer, table = make_layer(strategy, "column")
    found = [None] * BATCHES

    def call(first):
        for i in range(first, BATCHES, 4):
            time.sleep(_random(strategy.rank).uniform(0, 0.002))
            found[i] = layer(ids[i]).numpy()

    workers = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    check(found, table, ids)


def dataset_of_steps(strategy, folder):
    """Steps read no dataset that calls a layer; it would run ahead."""
    ids = make_ids(strategy).reshape(-1, HOTNESS)
    layer, _ = make_layer(strategy, "row")
    dataset = tf.data.Dataset.from_tensor_slices(ids).batch(BATCH)
    dataset = dataset.map(lambda x: (x, layer(x))).prefetch(2)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(DIM)])
        model.compile("sgd", "mse")
    for use in (
        lambda: model.fit(dataset),
        lambda: strategy.distribute_datasets_from_function(lambda _: dataset),
    ):
        # Whoever finds it first may tell the others before they look.
        errors = (ValueError, tf.errors.AbortedError)
        with pytest.raises(errors, match="looks up in partitioned tables"):
            use()


def failing_calls(strategy, folder):
    """A bad id fails its call on all ranks, and none after it."""
    ids = make_ids(strategy)
    layer, table = make_layer(strategy, "row")
    ids[-1] = -1
    dataset = tf.data.Dataset.from_tensor_slices(ids)
    for look_up in (layer, tf.function(layer)):
        with pytest.raises(tf.errors.InvalidArgumentError, match="id -1 "):
            look_up(tf.constant(ids[-1]))
        check(look_up(ids[0]), table, ids[0])
    # A parallel map that fails drops what has not begun, each rank for itself,
    # so the bad call is the only one there.
    for parallel, calls in ((None, dataset), (4, dataset.skip(BATCHES - 1))):
        with pytest.raises(tf.errors.InvalidArgumentError, match="id -1 "):
            list(calls.map(layer, num_parallel_calls=parallel))
        check(layer(ids[0]), table, ids[0])
