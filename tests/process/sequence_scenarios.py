# SPDX-License-Identifier: Apache-2.0
"""What sequences meet on their way, at several ranks."""

import numpy as np
import tensorflow as tf
from fit_models import same_on_all_ranks
from sequence_models import BATCH
from sequence_models import DIM
from sequence_models import ITEMS
from sequence_models import LENGTH
from sequence_models import samples

import tfdist_ext
from tfdist_ext.keras_internals import KERAS_3
from tfdist_ext.layers import DistributedEmbedding
from tfdist_ext.layers import Embedding
from tfdist_ext.layers import FeatureConfig
from tfdist_ext.layers import FullSparse
from tfdist_ext.layers import TableConfig
from tfdist_ext.tables.placement import TablePlacement

keras = tf.keras
# A checkpoint where tf_keras writes no whole tables into a file.
WEIGHTS = "model.weights.h5" if KERAS_3 else "weights"


def normal(seed):
    return keras.initializers.RandomNormal(0.0, 0.3, seed=seed)


def rnn(units):
    """Heeds a mask; to trace the loops of a GRU would take seconds."""
    return keras.layers.SimpleRNN(
        units,
        kernel_initializer=normal(5),
        recurrent_initializer=normal(6),
        unroll=True,
    )


def ids_of_rank(strategy, shape):
    """Ids of which the ranks have different numbers, the first one none."""
    rng = np.random.default_rng(strategy.rank)
    return rng.integers(0, ITEMS, [strategy.rank * 2, *shape])


def every_placement(strategy, folder):
    """Rows come back to where their ids were, wherever the table is."""
    ranks = strategy.world_size
    places = {
        "rows": TablePlacement.row_wise(ranks),
        "unique": TablePlacement.row_wise(ranks, deduplicate=True),
        "columns": TablePlacement.column_wise(ranks),
        "one": TablePlacement.table_wise(ranks - 1),
        "copied": TablePlacement.data_parallel(),
    }
    shapes = {"many": [3, 2], "few": [4], "one": []}
    with strategy.scope():
        features = {}
        for name, place in places.items():
            table = TableConfig(
                name, ITEMS, DIM, normal(1), combiner=None, placement=place
            )
            features[name] = {
                kind: FeatureConfig(
                    f"{name}/{kind}", table, (None, *shape), (None, *shape, DIM)
                )
                for kind, shape in shapes.items()
            } | {
                "ragged": FeatureConfig(
                    f"{name}/ragged", table, (None, None), (None, 2, DIM)
                )
            }
        layer = DistributedEmbedding(features)
        layer.build()
    ids = {kind: ids_of_rank(strategy, shape) for kind, shape in shapes.items()}
    lists = [list(range(r % 4)) for r in range(2 * strategy.rank)]
    ragged = tf.ragged.constant(lists, ragged_rank=1, dtype=tf.int64)
    found = layer({name: {**ids, "ragged": ragged} for name in places})
    tables = layer.get_embedding_tables()
    for name, results in found.items():
        table = tables[name].numpy()
        for kind, each in ids.items():
            np.testing.assert_allclose(results[kind], table[each], rtol=1e-6)
        assert results["ragged"].shape == (len(lists), 2, DIM)
        for rows, each in zip(results["ragged"], lists, strict=True):
            expected = np.zeros([2, DIM], np.float32)
            expected[: len(each)] = table[each[:2]].reshape([-1, DIM])
            np.testing.assert_allclose(rows, expected, rtol=1e-6)


class Mixed(keras.Model):
    """Layers of three kinds, of sequences and of none."""

    def __init__(self, **options):
        super().__init__()
        self.items = Embedding(
            ITEMS,
            DIM,
            normal(2),
            mask_zero=True,
            sharding=TablePlacement.row_wise(
                tf.distribute.get_strategy().world_size, deduplicate=True
            ),
            name="items",
            **options,
        )
        users = TableConfig("users", 31, DIM, normal(3), placement="row_wise")
        user = FeatureConfig("user", users, (None,), (None, DIM))
        self.users = DistributedEmbedding(user, name="of_users")
        self.wide = FullSparse(
            DIM,
            ITEMS,
            kernel_initializer=normal(4),
            sharding="row_wise",
            name="wide",
        )
        self.rnn = rnn(DIM)

    def call(self, inputs):
        rows = self.items(inputs["bundle"])
        state = self.rnn(rows) + self.users(inputs["user"])
        return state + self.wide(inputs["history"])


def mixed_data(layer):
    """Uneven batches; samples of one rank that are padding altogether."""
    inputs, labels = samples()
    dataset = tf.data.Dataset.from_tensor_slices((inputs, labels))
    return dataset.batch(BATCH).map(
        lambda x, y: ({**x, "bundle": layer.preprocess(x["history"])}, y)
    )


def one_exchange_also_ahead(strategy, folder):
    """Layers share an exchange, each row travels once; ids may go ahead."""

    def fit(prefetch_ids):
        with strategy.scope():
            model = Mixed(prefetch_ids=prefetch_ids)
            model.compile(keras.optimizers.SGD(0.1), "mse")
        dataset = mixed_data(model.items)
        before = dict(strategy.statistics()["labels"])
        losses = model.fit(dataset, epochs=2, verbose=0).history["loss"]
        after = strategy.statistics()["labels"]
        made = {
            label: count[0] - before.get(label, (0, 0))[0]
            for label, count in after.items()
            if label.endswith(("/ids", "/results", "/results/gradient"))
        }
        return losses, model, {k: v for k, v in made.items() if v}

    expected, plain, made = fit(False)
    assert same_on_all_ranks(strategy, expected)
    steps = 2 * (len(samples()[1]) // BATCH + 1)
    assert sorted(made.values()) == [steps] * 3, made
    losses, ahead, made = fit(True)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    assert made["items/next/ids"] == steps, made
    for name in ("items", "wide"):
        np.testing.assert_allclose(
            strategy.gather_table(getattr(plain, name)),
            strategy.gather_table(getattr(ahead, name)),
            rtol=1e-5,
            atol=1e-6,
        )


def bad_ids_end_on_all_ranks(strategy, folder):
    """An id that one rank finds fails the step of all, which write nothing."""
    with strategy.scope():
        layer = Embedding(ITEMS, DIM, sharding="row_wise", name="items")
        model = keras.Sequential(
            [
                keras.Input([LENGTH], dtype="int64"),
                layer,
                keras.layers.Flatten(),
                keras.layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.SGD(0.1), "mse")
    ids = np.ones([BATCH, LENGTH], np.int64)
    model.fit(ids, np.ones([BATCH, 1]), batch_size=BATCH, verbose=0)
    before = strategy.gather_table(layer)
    for bad in (ITEMS, -1):
        ids[-1, -1] = bad
        try:
            model.fit(ids, np.ones([BATCH, 1]), batch_size=BATCH, verbose=0)
        except tf.errors.InvalidArgumentError as error:
            assert f"id {bad}" in str(error), error
        else:
            raise AssertionError("trained on an id that is none")
    np.testing.assert_array_equal(strategy.gather_table(layer), before)


def fewer_bits(strategy, folder):
    """Tables and results of 16 bits are those of the table, rounded."""
    ids = ids_of_rank(strategy, [3])
    with strategy.scope():
        for policy, kept in (
            ("mixed_bfloat16", "float32"),
            ("mixed_float16", "float32"),
            ("bfloat16", "bfloat16"),
        ):
            layer = Embedding(
                ITEMS, DIM, sharding="row_wise", dtype=policy, mask_zero=True
            )
            found = layer(tf.constant(ids))
            table = tf.constant(strategy.gather_table(layer))
            assert table.dtype == kept
            assert found.dtype == layer.compute_dtype
            expected = tf.cast(tf.gather(table, ids), found.dtype)
            np.testing.assert_array_equal(
                tf.cast(found, tf.float32), tf.cast(expected, tf.float32)
            )
            np.testing.assert_array_equal(found._keras_mask, ids != 0)


def model_for_files(strategy):
    with strategy.scope():
        ids = keras.Input([LENGTH], dtype="int64", name="ids")
        items = Embedding(
            ITEMS, DIM, normal(7), mask_zero=True, sharding="row", name="items"
        )
        state = rnn(3)(items(ids))
        model = keras.Model(ids, keras.layers.Dense(1, name="top")(state))
        model.compile(tfdist_ext.optimizers.Adagrad(0.1), "mse")
    return model


def save(strategy, folder):
    inputs, labels = samples()
    model = model_for_files(strategy)
    model.fit(inputs["history"], labels, batch_size=BATCH, verbose=0)
    saver = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    saver.write(str(folder / "checkpoint"))
    if KERAS_3:  # tf_keras cannot, see docs/errors.md
        model.save(str(folder / "model.keras"))
    model.save_weights(str(folder / WEIGHTS))
    found = model.predict(inputs["history"], verbose=0)
    if strategy.rank == 0:
        np.save(folder / "predicted.npy", found)


def restore(strategy, folder):
    inputs, labels = samples()
    expected = np.load(folder / "predicted.npy")

    def check(model):
        found = model.predict(inputs["history"], verbose=0)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)

    model = model_for_files(strategy)
    saver = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    saver.read(str(folder / "checkpoint")).assert_existing_objects_matched()
    check(model)
    model.fit(inputs["history"], labels, batch_size=BATCH, verbose=0)
    model.load_weights(str(folder / WEIGHTS))
    check(model)
    if not KERAS_3:
        return
    with strategy.scope():
        check(keras.models.load_model(str(folder / "model.keras")))
