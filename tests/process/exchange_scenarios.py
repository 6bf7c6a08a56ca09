# SPDX-License-Identifier: Apache-2.0
"""What travels in one exchange, and how, on two or more ranks."""

import time

import numpy as np
import tensorflow as tf
from exchange_models import BATCH
from exchange_models import HOTNESS
from exchange_models import ROWS
from exchange_models import STEPS
from exchange_models import Top
from exchange_models import data
from exchange_models import embedding
from exchange_models import exchanges_of
from exchange_models import train

import tfdist_ext
from tfdist_ext.embedding import sharded_variable
from tfdist_ext.layers import FullSparse
from tfdist_ext.layers import SharedExchange

keras = tf.keras


def shared(strategy, folder):
    """Layers in a SharedExchange train as they do alone."""

    def layers():
        initializer = keras.initializers.RandomNormal(0.0, 0.3, seed=4)
        arguments = {"kernel_initializer": initializer}
        return [
            FullSparse(6, 20000, name="wide", **arguments),
            FullSparse(3, 30000, name="deep", activation="relu", **arguments),
        ]

    class Alone(keras.layers.Layer):
        def __init__(self):
            super().__init__(autocast=False)
            self.parts = layers()

        def call(self, inputs):
            pairs = zip(self.parts, inputs, strict=True)
            return [layer(value) for layer, value in pairs]

    dataset = data().map(lambda x, y: ((x["rows"] * 6, x["columns"] * 50), y))
    _, expected = train(strategy, Alone, dataset)
    model, losses = train(
        strategy, lambda: SharedExchange(layers(), name="shared"), dataset
    )
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert losses[-1] < losses[0]
    for layer in model.sparse.layers:
        planned = layer.plan.placement_of(layer.name)
        assert planned.ranks, planned
        assert layer.spec.ranks == planned.ranks
    labels = strategy.statistics()["labels"]
    # Layers of one model share an exchange without being told, too.
    by_itself = labels["wide, deep/ids"][0]
    assert labels["shared/ids"][0] == by_itself >= STEPS, labels


def two_gradients_of_one_lookup(strategy, folder):
    """They are not confused if ranks compute them in different orders."""

    def late(rank):
        def sleep(value):
            time.sleep(0.2 * (strategy.rank == rank))
            return value

        @tf.custom_gradient
        def identity(x):
            def wait(gradient):
                slept = tf.numpy_function(sleep, [gradient], tf.float32)
                return tf.ensure_shape(slept, gradient.shape)

            return tf.identity(x), wait

        return identity

    with strategy.scope():
        layer = FullSparse(2, 40, sharding="row", use_bias=False, name="both")
        layer.build([None, 3])
    ids = np.arange(12).reshape(4, 3) + strategy.rank

    @tf.function
    def gradients():
        def step():
            with tf.GradientTape(persistent=True) as tape:
                rows = layer(ids)
                ones = tf.reduce_sum(late(0)(rows))
                tens = tf.reduce_sum(10 * late(1)(rows))
            found = [tape.gradient(loss, layer.kernel) for loss in (ones, tens)]
            return [each.values for each in found]

        return strategy.run(step)

    for _ in range(3):
        for values, expected in zip(gradients(), (1.0, 10.0), strict=True):
            found = np.unique(values)
            shares = {expected, expected * strategy.world_size}
            assert set(found) <= shares, (expected, found)


def built_by_fit(strategy, folder):
    """Layers may be built by `fit`, which Keras 3 does in a graph."""
    losses = []
    for early in (True, False):

        def make(early=early):
            layer = embedding(strategy, "late", optimizer="sgd")
            if early:
                layer.build()
            return layer

        model, noted = train(strategy, make, data(10))
        losses.append(noted)
        variables = model.sparse.trainable_variables
        assert len(variables) == len(ROWS)
        assert all(map(sharded_variable.is_shard, variables))
        (own,) = model.optimizer.table_optimizers
        assert type(own) is tfdist_ext.optimizers.SGD
    np.testing.assert_array_equal(*losses)


def packed(strategy, folder):
    """Packed numbers change bytes, not results."""
    ways = {"plain": {}, "packed": {"wire_packing": True}}
    losses = {}
    for name, options in ways.items():
        _, losses[name] = train(
            strategy,
            lambda name=name, options=options: embedding(
                strategy, name, **options
            ),
        )
    np.testing.assert_array_equal(losses["packed"], losses["plain"])
    labels = strategy.statistics()["labels"]
    sent = {
        name: [labels[f"{name}/{what}"][1] for what in ("ids", "results")]
        for name in ways
    }
    assert sent["packed"][0] == sent["plain"][0], sent
    assert sent["packed"][1] < sent["plain"][1], sent


def gathered(strategy, folder):
    """Rows travel of the gradient of a large table that all ranks hold."""
    rows, units = 20_000, 8  # 640 kB: that of a small one travels whole
    initializer = keras.initializers.RandomNormal(0.0, 0.3, seed=4)

    def table(sharding):
        return FullSparse(
            units,
            rows,
            use_bias=False,
            kernel_initializer=initializer,
            sharding=sharding,
            name="table",
        )

    with strategy.scope():
        first = table("replicated")
        first.build((None, HOTNESS))
    initial = keras.initializers.Constant(strategy.gather_table(first))

    class Summed(keras.layers.Layer):
        """Keras's own."""

        def __init__(self):
            super().__init__()
            self.rows = keras.layers.Embedding(rows, units, initial)

        def call(self, ids):
            return tf.reduce_sum(self.rows(ids), 1)

    ways = {
        "row": lambda: table("row"),
        "replicated": lambda: table("replicated"),
        "keras": Summed,
    }
    uneven = data(20).unbatch().batch(BATCH + 13)  # on 2 ranks, too
    dataset = uneven.map(lambda x, y: (x["rows"] * 6, y))
    losses, exchanges = {}, {}
    for name, make in ways.items():
        before = exchanges_of(strategy, "gradients/rows")
        _, losses[name] = train(strategy, make, dataset)
        after = exchanges_of(strategy, "gradients/rows")
        exchanges[name] = after - before
        np.testing.assert_allclose(losses[name], losses["row"], rtol=1e-5)
    steps = len(losses["row"])
    assert exchanges == {"row": 0, "replicated": steps, "keras": steps}


def bad_ids(strategy, folder):
    """A deduplicated feature's bad id fails on every rank, or is dropped."""
    for bad in (ROWS["distinct"] + 5, -7):
        (ids, labels), *_ = data(1)
        wrong = ids["distinct"].numpy()
        wrong[-1, 3] = bad  # in the last rank's part
        batch = ({**ids, "distinct": wrong}, labels)
        dataset = tf.data.Dataset.from_tensors(batch)
        try:
            train(strategy, lambda: embedding(strategy, "strict"), dataset)
            raise AssertionError("a bad id was accepted")
        except tf.errors.InvalidArgumentError as error:
            message = str(error)
        for part in ("strict/distinct", f"id {bad} ", f"{ROWS['distinct']}"):
            assert part in message, (part, message)
        with strategy.scope():
            layer = embedding(strategy, "lenient", out_of_range="ignore")
            model = Top(layer)
        local = strategy.experimental_distribute_dataset(dataset)
        for inputs, _ in local:
            found = strategy.run(
                tf.function(lambda x, m=model: m.sparse(x)), args=(inputs,)
            )["distinct"]
        rows = layer.get_embedding_tables()["distinct"].numpy()
        kept = inputs["distinct"].numpy()
        good = (kept >= 0) & (kept < len(rows))
        assert good.all() == (strategy.rank < strategy.world_size - 1)
        total = (rows[np.where(good, kept, 0)] * good[..., None]).sum(1)
        np.testing.assert_allclose(
            found, total / good.sum(1, keepdims=True), rtol=1e-5, atol=1e-6
        )


def bfloat16(strategy, folder):
    """Tables in half the memory train about the same."""
    results = {}
    for dtype in ("float32", "bfloat16"):
        model, results[dtype] = train(
            strategy, lambda dtype=dtype: embedding(strategy, dtype, dtype)
        )
        tables = model.sparse.get_embedding_tables()
        assert {table.dtype.name for table in tables.values()} == {dtype}
    np.testing.assert_allclose(
        results["bfloat16"], results["float32"], rtol=2e-2
    )
    assert (results["bfloat16"] != results["float32"]).any()
