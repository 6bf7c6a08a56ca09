# SPDX-License-Identifier: Apache-2.0
"""What travels in one exchange, and how; run on two or more ranks.

Usage: exchange_program.py SCENARIO...

A scenario is a function of this file. It checks for itself, on every rank.
"""

import sys

import numpy as np
import tensorflow as tf
from fit_models import same_on_all_ranks

import tfdist_ext
from tfdist_ext.layers import DistributedEmbedding
from tfdist_ext.layers import FeatureConfig
from tfdist_ext.layers import FullSparse
from tfdist_ext.layers import SharedExchange
from tfdist_ext.layers import TableConfig
from tfdist_ext.sharding import sharded_variable
from tfdist_ext.sharding.config import TablePlacement

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
    hot_rows=0,
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
            hot_rows=hot_rows if table == "rows" else 0,
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


def shared(strategy):
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
        assert layer.planned.ranks, layer.planned
        assert layer.spec.ranks == layer.planned.ranks
    labels = strategy.statistics()["labels"]
    calls = {name: labels[f"{name}/ids"][0] for name in ("shared", "wide")}
    assert calls["shared"] == calls["wide"] >= STEPS, calls
    assert labels["deep/ids"][0] == calls["wide"]  # alone, not in the other


def built_by_fit(strategy):
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


def frequent(strategy):
    """Codes of ids and packed numbers change bytes, not results."""
    ways = {
        "plain": {},
        "packed": {"wire_packing": True},
        "learnt": {"learn_frequent_ids": True},
        "both": {"wire_packing": True, "learn_frequent_ids": True},
    }
    losses, models = {}, {}
    for name, options in ways.items():
        models[name], losses[name] = train(
            strategy,
            lambda name=name, options=options: embedding(
                strategy, name, **options
            ),
        )
    np.testing.assert_array_equal(losses["packed"], losses["plain"])
    np.testing.assert_array_equal(losses["both"], losses["learnt"])
    # Frequent ids come first in a sum, whose rounding then differs.
    np.testing.assert_allclose(losses["learnt"], losses["plain"], rtol=1e-5)
    labels = strategy.statistics()["labels"]
    sent = {name: labels[f"{name}/ids"][1] for name in ways}
    assert sent["packed"] == sent["plain"]
    assert sent["learnt"] == sent["both"] < sent["plain"], sent
    for name in ("learnt", "both"):
        learnt = models[name].sparse._frequent
        sizes = dict(zip(sorted(ROWS), map(int, learnt._sizes), strict=True))
        assert sizes["rows"] > 100 and sizes["columns"] > 50, sizes
        assert sizes["distinct"] == 0, sizes
        for ids in learnt.of_tables():
            assert len(set(ids.numpy())) == len(ids)
            assert same_on_all_ranks(strategy, ids)
        most = learnt.of_tables()[2].numpy()[:2]
        assert set(most) == {1, 2}, most
    assert models["plain"].sparse._frequent is None


def prefetch(strategy):
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
    others = {"learn_frequent_ids": True, "hot_rows": (1, 2, 3, 9)}
    _, found = fit("others", prefetch_ids=True, **others)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    # One more where an iterator starts or goes on after another: 15 and 21.
    on_time = exchanges_of(strategy, "on_time/ids")
    ahead = exchanges_of(strategy, "ahead/ids")
    assert on_time < ahead < 1.5 * on_time, (on_time, ahead)

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


def gathered(strategy):
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


def exchanges_of(strategy, label):
    return strategy.statistics()["labels"].get(label, (0, 0))[0]


def bad_ids(strategy):
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


def bfloat16(strategy):
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


SCENARIOS = (
    shared,
    built_by_fit,
    frequent,
    prefetch,
    gathered,
    bad_ids,
    bfloat16,
)


def main():
    strategy = tfdist_ext.HybridParallelStrategy()
    by_name = {scenario.__name__: scenario for scenario in SCENARIOS}
    for name in sys.argv[1:]:
        by_name[name](strategy)


if __name__ == "__main__":
    main()
