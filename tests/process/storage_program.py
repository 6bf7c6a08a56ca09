# SPDX-License-Identifier: Apache-2.0
"""Trains tables on a device beside tables on the host.

Another device of the CPU stands in for each rank's GPU: TensorFlow places,
copies and colocates alike, and the ops have kernels for both. Argument: a
folder.
"""

import pathlib
import sys

import numpy as np
import tensorflow as tf

import tfdist_ext
from tests.process.vocabulary_cases import InBuckets
from tfdist_ext import marks
from tfdist_ext.comm import gpus
from tfdist_ext.comm.gpus import TableGpus
from tfdist_ext.keras_internals import value_of
from tfdist_ext.layers import DistributedEmbedding
from tfdist_ext.layers import Embedding
from tfdist_ext.layers import FullSparse
from tfdist_ext.strategy.extended import HybridParallelExtended
from tfdist_ext.tables.table_config import FeatureConfig
from tfdist_ext.tables.table_config import TableConfig

keras = tf.keras
ROWS, DIM, BATCH = 40, 4, 16
HOST, DEVICE = "CPU:0", "CPU:1"
# Rows, what is asked for, and where it lies; all of these are planned.
TABLES = {
    "asked": (ROWS, {"storage": "device", "placement": "row"}, DEVICE),
    "once": (
        ROWS,
        {"storage": "device", "placement": "column", "deduplicate": True},
        DEVICE,
    ),
    "kept": (ROWS, {"storage": "host", "placement": "row"}, HOST),
    "small": (ROWS, {"placement": "sparsecore"}, DEVICE),
    "large": (50_000, {"placement": "sparsecore"}, HOST),
    "whole": (ROWS, {"placement": "data_parallel"}, DEVICE),
    "whole_kept": (
        ROWS,
        {"storage": "host", "placement": "data_parallel"},
        HOST,
    ),
}
# Room for all but the large one.
MEMORY = 60_000


def use_a_second_cpu() -> None:
    """The device of ranks, and of their dense layers, from here on."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, two)
    stock = HybridParallelExtended._initialize_local_devices

    def on_second(*arguments, **named):
        devices, kind = stock(*arguments, **named)
        return tuple(each.replace(HOST, DEVICE) for each in devices), kind

    HybridParallelExtended._initialize_local_devices = on_second
    gpus.visible_device = lambda: 1


class Model(keras.Model):
    """All kinds of layers, some of which share an exchange."""

    def __init__(self, on_host):
        super().__init__()
        features = {}
        for name, (rows, asked, _) in TABLES.items():
            asked = {**asked, "storage": "host"} if on_host else asked
            self.add(features, TableConfig(name, rows, DIM, **asked))
        vocabulary = InBuckets(80, evict="lru", steps_to_live=2)
        storage = "host" if on_host else "device"
        grown = {"vocabulary": vocabulary, "placement": "row", "max_norm": 0.5}
        self.add(
            features,
            TableConfig("grown", embedding_dim=DIM, storage=storage, **grown),
        )
        self.together = DistributedEmbedding(features, name="together")
        self.lone = Embedding(ROWS, DIM, storage=storage, name="lone")
        self.linear = FullSparse(DIM, ROWS, storage="host", name="linear")
        self.top = keras.layers.Dense(1, name="top")

    def add(self, features, table):
        features[table.name] = FeatureConfig(
            table.name, table, (None, 3), (None, DIM)
        )

    def call(self, ids):
        found = [
            *self.together(dict.fromkeys([*TABLES, "grown"], ids)).values(),
            tf.reduce_sum(self.lone(ids), 1),
            self.linear(ids),
        ]
        return self.top(tf.concat(found, 1))

    def expected(self, on_host):
        """Where each table is, by variable."""
        places = {name: place for name, (*_, place) in TABLES.items()}
        places |= {"grown": DEVICE, "lone": DEVICE, "linear": HOST}
        tables = {
            name: getattr(self.together, f"table_{name}")
            for name in [*TABLES, "grown"]
        }
        tables["lone"] = self.lone.embeddings
        tables["linear"] = self.linear.kernel
        return [
            (name, tables[name], HOST if on_host else place)
            for name, place in places.items()
        ]


def data():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, ROWS, [5 * BATCH, 3])
    labels = rng.normal(size=[5 * BATCH, 1]).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((ids, labels)).batch(BATCH)


def make(strategy, on_host):
    keras.utils.set_random_seed(0)
    if strategy.collectives:
        strategy.collectives.gpus = TableGpus(memory=MEMORY)
    with strategy.scope():
        model = Model(on_host)
        model.compile(tfdist_ext.optimizers.Adam(0.01), "mse")
        model(next(iter(data()))[0])
    return model


def check_places(strategy, model, on_host):
    """Tables and slots lie where they should."""
    optimizer = model.optimizer
    variables = optimizer.variables
    slots = list(
        map(value_of, variables() if callable(variables) else variables)
    )
    tables = model.expected(on_host)
    if not strategy.collectives:
        # All is whole: on the host if that was asked for, slots beside it.
        asked = {"kept", "whole_kept", "linear"}
        tables = [
            (name, table, HOST if on_host or name in asked else DEVICE)
            for name, table, _ in tables
        ]
        kept = [place for *_, place in tables if place == HOST]
        parts = [strategy.experimental_local_results(slot) for slot in slots]
        places = [p.device for p, *_ in parts if p.shape.rank == 2]
        assert sum(p.endswith(HOST) for p in places) == 2 * len(kept)
    for name, table, place in tables:
        (part,) = strategy.experimental_local_results(value_of(table))
        assert part.device.endswith(place), (name, part.device)
        spec = marks.shard_spec(table)
        if spec is None:
            continue
        mine = [
            slot
            for slot in slots
            if (own := marks.shard_spec(slot)) and own.table == spec.table
        ]
        assert len(mine) == 2, (name, mine)
        for slot in mine:
            assert slot.device.endswith(place), (name, slot.device)


def values_of(strategy, model):
    tables = model.together.get_embedding_tables()
    for layer in (model.lone, model.linear):
        tables[layer.name] = strategy.gather_table(layer)
    tables["top"] = model.top.get_weights()[0]
    keys = model.together.get_vocabularies()["grown"]["keys"]
    return {**{n: np.array(v) for n, v in tables.items()}, "keys": keys}


def same(ours, theirs):
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, name)


def fit_ahead(strategy, prefetch_ids):
    """Trains tables of both places, maybe with ids that travel a step ahead."""
    with strategy.scope():
        features = {
            name: FeatureConfig(
                name,
                TableConfig(
                    name,
                    ROWS,
                    DIM,
                    keras.initializers.RandomUniform(seed=1),
                    **TABLES[name][1],
                ),
                (None, 3),
                (None, DIM),
            )
            for name in ("asked", "kept", "once")
        }
        layer = DistributedEmbedding(
            features, prefetch_ids=prefetch_ids, name=f"ahead_{prefetch_ids}"
        )
        model = Ahead(layer)
        model.compile(tfdist_ext.optimizers.SGD(0.1), "mse")
    prepared = data().map(
        lambda ids, y: (layer.preprocess(dict.fromkeys(features, ids)), y)
    )
    model.fit(prepared, epochs=2, verbose=0)
    tables = layer.get_embedding_tables()
    return {name: table.numpy() for name, table in tables.items()}


class Ahead(keras.Model):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def call(self, inputs):
        rows = tf.concat(list(self.layer(inputs).values()), 1)
        return tf.reduce_sum(rows, 1, keepdims=True)


def refuse(strategy):
    """A rank without a GPU ends all, by name."""
    strategy.collectives.gpus = TableGpus(reason=f"rank 1: {gpus.NO_GPU}")
    with strategy.scope():
        for layer in (
            Model(on_host=False),
            Embedding(ROWS, DIM, storage="device", name="asked"),
        ):
            try:
                layer(next(iter(data()))[0])
            except ValueError as error:
                assert "asked" in str(error) and "rank 1: Tens" in str(error)
                assert "storage='device'" in str(error)
            else:
                raise AssertionError("nothing was refused")


def compare(strategy, folder):
    """What devices learn is what hosts do, also from what the others saved."""
    models = [trained(strategy, on_host) for on_host in (True, False)]
    first, second = (values_of(strategy, model) for model in models)
    same(second, first)
    assert len(first["keys"]) > 10 and first["asked"].any()
    for here, there in ((0, 1), (1, 0)):
        model, other = models[here], models[there]
        saved = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        path = saved.write(str(folder / f"from_{here}"))
        model.fit(data(), epochs=1, verbose=0)
        restored = tf.train.Checkpoint(model=other, optimizer=other.optimizer)
        restored.read(path).assert_existing_objects_matched()
        other.fit(data(), epochs=1, verbose=0)
        check_places(strategy, other, there == 0)
        same(values_of(strategy, other), values_of(strategy, model))
    same(fit_ahead(strategy, True), fit_ahead(strategy, False))


def trained(strategy, on_host):
    model = make(strategy, on_host)
    model.fit(data(), epochs=2, verbose=0)
    check_places(strategy, model, on_host)
    return model


def main():
    folder = pathlib.Path(sys.argv[1])
    use_a_second_cpu()
    strategy = tfdist_ext.HybridParallelStrategy()
    if strategy.collectives and hasattr(keras, "ops"):
        compare(strategy, folder)
        refuse(strategy)
    else:  # the ops are the same, who makes the slots is not
        trained(strategy, on_host=False)
    (folder / f"done.{strategy.rank}").touch()


if __name__ == "__main__":
    main()
