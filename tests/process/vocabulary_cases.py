# SPDX-License-Identifier: Apache-2.0
"""Trains tables whose vocabularies grow, on any number of ranks.

A case is the name of an optimizer. `stock` is the same without a strategy.
"""

import functools

import numpy as np
import tensorflow as tf
from checkpoint_scenarios import pieces

import tfdist_ext
from tfdist_ext.layers import DistributedEmbedding
from tfdist_ext.ops import vocabulary_ops
from tfdist_ext.tables.placement import TablePlacement
from tfdist_ext.tables.table_config import DynamicVocabulary
from tfdist_ext.tables.table_config import FeatureConfig
from tfdist_ext.tables.table_config import TableConfig

keras = tf.keras
BATCH, STEPS, DIM = 24, 14, 6
# name: combiner, what is known of its vocabulary but for the capacity
TABLES = {
    "users": ("sum", 90, {"evict": "lru", "min_count": 2}),
    "items": (
        "mean",
        170,
        {"evict": "lfu", "key_dtype": "string", "keep_text": True},
    ),
    "words": (
        "sqrtn",
        30,
        {"steps_to_live": 2, "full": "shared_row", "unadmitted": "shared_row"},
    ),
    "seen": (None, 200, {"evict": "lru", "steps_to_live": 6}),
}
# The longest rows of some, by rows and by columns on several ranks.
LONGEST = {"users": 0.8, "items": 0.7}


class InBuckets(DynamicVocabulary):
    """Of few keys all the same, so that every rank owns some."""

    buckets = 8


def placement_of(name, ranks):
    """Every table has another one."""
    if ranks == 1 or name == "words":
        return TablePlacement.data_parallel()
    if name == "users":
        return TablePlacement.row_wise(ranks)
    if name == "items":
        return TablePlacement.grid(max(1, ranks // 2), 2)
    return TablePlacement(ranks, 1, tuple(reversed(range(ranks))), True)


def layer_of(ranks, more=0, optimizers=None, **options):
    """The layer under test, with room for so many more keys."""
    features = {}
    for name, (combiner, capacity, rules) in TABLES.items():
        table = TableConfig(
            name,
            embedding_dim=DIM,
            initializer=keras.initializers.RandomNormal(0.0, 0.3, seed=3),
            optimizer=(optimizers or {}).get(name),
            combiner=combiner,
            placement=placement_of(name, ranks),
            vocabulary=InBuckets(capacity + more, **rules),
            max_norm=LONGEST.get(name),
        )
        shape = (None, 3, DIM) if combiner is None else (None, DIM)
        features[name] = FeatureConfig(name, table, (None, 3), shape)
    return DistributedEmbedding(features, name="embedding", **options)


class Model(keras.Model):
    """Embeddings, joined, and one dense layer."""

    def __init__(self, layer):
        super().__init__()
        self.embedding = layer
        self.top = keras.layers.Dense(
            1, kernel_initializer=keras.initializers.GlorotUniform(seed=6)
        )

    def call(self, inputs):
        found = self.embedding(inputs)
        joined = [
            tf.reshape(found[name], [-1, DIM * (3 if name == "seen" else 1)])
            for name in TABLES
        ]
        width = DIM * (len(TABLES) + 2)
        return self.top(tf.ensure_shape(tf.concat(joined, 1), [None, width]))


@functools.cache
def dataset(first=0, steps=STEPS):
    """Global batches; the last one leaves ranks of 4 without samples."""
    rng = np.random.default_rng(2)
    count = BATCH * 2 * STEPS
    ids = {
        name: (rng.zipf(1.3, [count, 3]) + np.arange(count)[:, None] // 60)
        * -(2**33)
        for name in TABLES
    }
    ids["items"] = np.vectorize(lambda number: f"item {number}")(ids["items"])
    labels = rng.normal(size=[count, 1]).astype(np.float32)
    part = slice(first * BATCH, (first + steps) * BATCH - BATCH + 2)
    cut = {name: values[part] for name, values in ids.items()}
    whole = tf.data.Dataset.from_tensor_slices((cut, labels[part]))
    return whole.batch(BATCH)


def compiled(strategy, case, more=0):
    """A model to be trained; `strategy` may be None."""
    ours = tfdist_ext.optimizers
    kinds = {
        "own": lambda: (ours.SGD(0.1, momentum=0.9), {"seen": ours.Ftrl(0.1)}),
        "adam": lambda: (
            ours.Adam(0.05),
            {"users": ours.RowWiseAdagrad(0.1), "words": ours.SGD(0.3)},
        ),
    }
    optimizer, own = kinds[case]()
    model = Model(layer_of(strategy.world_size if strategy else 1, more, own))
    model.compile(optimizer, "mse")
    return model


def values_of(model):
    """Keys, tables and predictions, by name."""
    found = {"predicted": model.predict(dataset(4, 3), verbose=0)}
    layer = model.embedding
    for name, table in layer.get_embedding_tables().items():
        found[f"table/{name}"] = table.numpy()
    for name, keys in layer.get_vocabularies().items():
        if (texts := keys.pop("texts", None)) is not None:
            known = vocabulary_ops.fingerprints(tf.constant(texts))
            np.testing.assert_array_equal(keys["keys"], known)
            assert name == "items" and len(texts) > 20
        for what, array in keys.items():
            # Exact as float64, whose differences are compared.
            found[f"{what}/{name}"] = (array % 2**31).astype(np.float64)
    for name, counts in layer.vocabulary_counts().items():
        found[f"counts/{name}"] = np.array(list(counts.values()), np.float64)
    return found


def hybrid(strategy, case):
    """What ranks train together."""
    with strategy.scope():
        model = compiled(strategy, case)
    model.fit(dataset(), epochs=1, verbose=0)
    found = values_of(model)
    for name, longest in LONGEST.items():
        rows = model.embedding.get_vocabularies()[name]["rows"]
        norms = np.linalg.norm(found[f"table/{name}"][rows], axis=1)
        assert norms.max() < longest + 1e-5, (name, norms.max())
        assert np.isclose(norms, longest).sum() > 1, (name, norms)
    return found


def of_stock(case):
    """All that `stock` depends on."""
    return case


def stock(strategy, case, initial):
    """What one process trains without a strategy."""
    del strategy, initial
    model = compiled(None, case)
    model.fit(dataset(), epochs=1, verbose=0)
    return values_of(model)


def save(strategy, folder, case):
    """Trains, saves, exports, notes what is there, and after more steps."""
    with strategy.scope():
        model = compiled(strategy, case)
    model.fit(dataset(0, 7), verbose=0)
    saver = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    with pieces(512):
        saver.write(str(folder / case))
    files = {}
    model.embedding.save_own_variables(files)
    for name, keys in model.embedding.get_vocabularies().items():
        # In order of the buckets, whichever ranks own them.
        bucket, slot = np.nonzero(files[f"keys of {name}: counts"])
        rows = 1 + slot * InBuckets.buckets + bucket
        np.testing.assert_array_equal(np.sort(rows), keys["rows"])
    noted = {f"a/{k}": v for k, v in values_of(model).items()}
    batches = list(dataset(4, 3))  # some of whose keys have no rows
    tfdist_ext.export(
        model, folder / "served", tables="files", inputs=batches[0][0]
    )
    if strategy.rank == 0:
        served = tf.saved_model.load(str(folder / "served"))
        found = [served.serve(features) for features, _ in batches]
        np.testing.assert_allclose(
            tf.concat(found, 0), noted["a/predicted"], rtol=1e-6, atol=1e-6
        )
    model.fit(dataset(7, 7), verbose=0)
    noted |= {f"b/{k}": v for k, v in values_of(model).items()}
    if strategy.rank == 0:
        np.savez(folder / f"{case}.npz", **noted)


def restore(strategy, folder, case, more, size):
    """Finds what was saved; without more room, trains on to the same."""
    noted = dict(np.load(folder / f"{case}.npz"))
    with strategy.scope():
        model = compiled(strategy, case, more)
    model.fit(dataset(9, 1), verbose=0)  # other keys, and all slots
    saver = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    with pieces(size):
        saver.read(str(folder / case)).assert_existing_objects_matched()
    _check(values_of(model), noted, "a", more)
    model.fit(dataset(7, 7), verbose=0)
    if not more:
        _check(values_of(model), noted, "b", more)


def go_on(strategy, saved, folder):
    """Comes to what it would have, had no rank died."""
    noted = dict(np.load(saved / "adam.npz"))
    with strategy.scope():
        model = compiled(strategy, "adam")
    model.fit(dataset(9, 1), verbose=0)
    saver = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    saver.read(str(folder / "ckpt")).assert_existing_objects_matched()
    model.fit(dataset(10, 4), verbose=0)
    for name, value in values_of(model).items():
        if name.startswith("counts/"):  # since the start
            continue
        np.testing.assert_array_equal(value, noted[f"b/{name}"], name)


def _check(found, noted, when, more):
    for name, value in reversed(found.items()):  # keys before what they have
        expected = noted[f"{when}/{name}"]
        if name.startswith("counts/"):  # since the start, and of more room
            value, expected = value[1:3], expected[1:3]
        if name.startswith("table/") and more:
            value = value[: len(expected)]
        np.testing.assert_allclose(
            value, expected, rtol=1e-5, atol=1e-6, err_msg=name
        )
