# SPDX-License-Identifier: Apache-2.0
"""Ids that travel a step ahead."""

import numpy as np
import tensorflow as tf
import vocabulary_cases
from exchange_models import BATCH
from exchange_models import DIM
from exchange_models import HOTNESS
from exchange_models import Top
from exchange_models import data
from exchange_models import embedding
from exchange_models import exchanges_of

import tfdist_ext
from tfdist_ext.layers import DistributedEmbedding
from tfdist_ext.layers import DynamicVocabulary
from tfdist_ext.layers import FeatureConfig
from tfdist_ext.layers import FullSparse
from tfdist_ext.layers import TableConfig
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


def prefetch_keys(strategy, folder):
    """Keys are sent a step ahead; rows, counts and evictions stay the same."""
    del folder

    def fit(prefetch_ids):
        with strategy.scope():
            layer = vocabulary_cases.layer_of(
                strategy.world_size, prefetch_ids=prefetch_ids
            )
            model = vocabulary_cases.Model(layer)
            model.compile(tfdist_ext.optimizers.Adagrad(0.1), "mse")
        whole = vocabulary_cases.dataset()
        dataset = whole.map(lambda x, y: (layer.preprocess(x), y))
        fitted = model.fit(
            dataset,
            epochs=2,
            validation_data=dataset.take(2),
            verbose=0,
        )
        found = vocabulary_cases.values_of(model)
        losses = fitted.history["loss"] + fitted.history["val_loss"]
        return losses, found

    before = exchanges_of(strategy, "embedding/keys")
    expected, tables = fit(False)
    steps = exchanges_of(strategy, "embedding/keys") - before
    losses, found = fit(True)
    np.testing.assert_array_equal(losses, expected)
    assert found.keys() == tables.keys()
    for name, values in tables.items():
        np.testing.assert_array_equal(found[name], values, name)
    lost = sum(found[f"counts/{name}"][4:6] for name in vocabulary_cases.TABLES)
    assert all(lost > 0), lost  # keys were evicted, and expired
    # In the step of a batch only where an iterator starts; `predict` of
    # `values_of` prefetches nothing.
    predicted = 3
    on_time = exchanges_of(strategy, "embedding/keys") - before - steps
    assert exchanges_of(strategy, "embedding/next/keys") == steps - predicted
    assert on_time == predicted + 4, (on_time, steps)


def prefetch_keys_and_restore(strategy, folder):
    """A checkpoint with other owners of the keys is read between two steps."""

    def made(seed, prefetch_ids):
        keras.utils.set_random_seed(seed)
        vocabulary = vocabulary_cases.InBuckets(4000)
        table = TableConfig("table", embedding_dim=DIM, vocabulary=vocabulary)
        feature = FeatureConfig("f", table, (None, HOTNESS), (None, DIM))
        with strategy.scope():
            layer = DistributedEmbedding(
                {"f": feature}, name="restored", prefetch_ids=prefetch_ids
            )
            model = Top(layer)
            model.compile(tfdist_ext.optimizers.SGD(0.1), "mse")
        return model

    def batches():
        rng = np.random.default_rng(4)
        ids = rng.integers(0, 2**40, [12 * BATCH, HOTNESS])
        ids[BATCH:] = ids[:-BATCH] + rng.integers(0, 2, [11 * BATCH, 1])
        labels = (ids[:, :1] % 2).astype(np.float32)
        whole = tf.data.Dataset.from_tensor_slices(({"f": ids}, labels))
        return whole.batch(BATCH)

    saved = made(1, False)
    saved.fit(batches().take(2), verbose=0)
    path = str(folder / "keys")
    tf.train.Checkpoint(model=saved).write(path)

    def train(prefetch_ids):
        model = made(2, prefetch_ids)
        dataset = batches().map(lambda x, y: (model.sparse.preprocess(x), y))
        iterator = iter(strategy.experimental_distribute_dataset(dataset))

        @tf.function
        def step(batch):
            strategy.run(model.train_step, args=(batch,))

        for number in range(8):
            if number == 4:
                tf.train.Checkpoint(model=model).read(path).expect_partial()
            step(next(iterator))
        keys = model.sparse.get_vocabularies()["table"]
        (values,) = model.sparse.get_embedding_tables().values()
        return keys, values

    keys, values = train(False)
    keys_ahead, values_ahead = train(True)
    assert len(keys["keys"]) > BATCH
    for name, array in keys.items():
        np.testing.assert_array_equal(keys_ahead[name], array, name)
    np.testing.assert_array_equal(values_ahead, values)


def prefetch_keys_of_a_full_table(strategy, folder):
    """After an error, the next batch of the same iterator is looked up."""
    del folder
    table = TableConfig(
        "table", embedding_dim=DIM, vocabulary=DynamicVocabulary(9)
    )
    feature = FeatureConfig("f", table, (None, 2), (None, DIM))
    with strategy.scope():
        layer = DistributedEmbedding(
            {"f": feature}, name="full", prefetch_ids=True
        )
        layer.build()
    keys = np.array([[1, 2], [3, 4], [10, 90], [91, 92], [1, 3], [2, 4]])
    keys = np.concatenate([keys, np.arange(20, 40).reshape([10, 2]), keys[:2]])
    dataset = tf.data.Dataset.from_tensor_slices(keys).batch(2)
    dataset = dataset.map(lambda ids: (ids, layer.preprocess({"f": ids})))

    @tf.function
    def look_up(ids):
        return strategy.run(lambda x: layer(x, training=True)["f"], (ids,))

    failed = []
    for number, (ids, ahead) in enumerate(
        strategy.experimental_distribute_dataset(dataset)
    ):
        try:
            found = look_up(ahead)
        except tf.errors.FailedPreconditionError as error:
            assert "is full" in str(error), error
            failed.append(number)
            continue
        np.testing.assert_array_equal(found, look_up_alone(layer, ids))
    assert failed == [3, 4, 5, 6, 7], failed


def look_up_alone(layer, ids):
    """Means of the rows of keys, from the entire table."""
    keys = layer.get_vocabularies()["table"]
    rows = dict(zip(keys["keys"].tolist(), keys["rows"], strict=True))
    (table,) = layer.get_embedding_tables().values()
    return np.array(
        [np.mean([table[rows[k]] for k in pair], 0) for pair in ids.numpy()]
    ).reshape([-1, DIM])


def prefetch_after_bad_ids(strategy, folder):
    """After a bad id in one of two layers, all ranks go on alike."""
    del folder
    rows, count = 40, 24
    with strategy.scope():
        layers = [
            FullSparse(
                DIM,
                rows,
                use_bias=False,
                sharding=TablePlacement.row_wise(strategy.world_size),
                kernel_initializer=keras.initializers.RandomNormal(seed=3),
                prefetch_ids=True,
            )
            for _ in range(2)
        ]
        for layer in layers:
            layer.build([None, 2])
    ids = np.random.default_rng(1).integers(0, rows, [count * 4, 2, 2])
    bad = range(3, count - 1, 3)
    for batch in bad:
        ids[batch * 4 + 3, batch % 2, 0] = rows  # on the last rank
    dataset = tf.data.Dataset.from_tensor_slices(ids).batch(4)

    def prepare(x):
        pairs = enumerate(layers)
        return x, tuple(layer.preprocess(x[:, i]) for i, layer in pairs)

    dataset = dataset.map(prepare)
    tables = [strategy.gather_table(layer) for layer in layers]

    @tf.function
    def look_up(inputs):
        def found(x):
            return [layer(part) for layer, part in zip(layers, x, strict=True)]

        return strategy.run(found, args=(inputs,))

    failed = []
    local = strategy.experimental_distribute_dataset(dataset)
    for number, (x, inputs) in enumerate(local):
        try:
            results = look_up(inputs)
        except tf.errors.InvalidArgumentError:
            failed.append(number)
            continue
        for i, result in enumerate(results):
            np.testing.assert_allclose(
                result, tables[i][x.numpy()[:, i]].sum(1), rtol=1e-5, atol=1e-6
            )
    # The step of a bad id, and the step before, which sends it.
    assert failed == sorted({b - 1 for b in bad} | set(bad)), failed
