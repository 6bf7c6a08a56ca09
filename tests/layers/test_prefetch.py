# SPDX-License-Identifier: Apache-2.0
"""Ids in the input pipeline: cut by sample, paired with the next batch's."""

import itertools
import types

import numpy as np
import pytest
import tensorflow as tf

import tfdist_ext
from tfdist_ext.layers import DistributedEmbedding
from tfdist_ext.layers import DynamicVocabulary
from tfdist_ext.layers import Embedding
from tfdist_ext.layers import FeatureConfig
from tfdist_ext.layers import FullSparse
from tfdist_ext.layers import SharedExchange
from tfdist_ext.layers import TableConfig
from tfdist_ext.strategy import input

keras = tf.keras
STEPS, BATCH, K, ROWS = 5, 8, 3, 50


class Alone:
    """Collectives of a rank whose peers have as many batches."""

    def __init__(self, rank=0, world_size=2):
        self.group = types.SimpleNamespace(rank=rank, world_size=world_size)

    def all_gather(self, tensor, label):
        return tf.concat([tensor] * self.group.world_size, 0)


def ids_of(rng, samples):
    """Ragged ids with weights, and dense ones."""
    lengths = rng.integers(0, 2 * K, samples)
    splits = np.concatenate([[0], np.cumsum(lengths)])
    ragged = tf.RaggedTensor.from_row_splits
    values = rng.integers(0, ROWS, splits[-1])
    weights = rng.normal(size=splits[-1]).astype(np.float32)
    dense = rng.integers(0, ROWS, [samples, K]).astype(np.int32)
    return (ragged(values, splits), ragged(weights, splits)), dense


def dataset(samples=STEPS * BATCH):
    (ids, weights), dense = ids_of(np.random.default_rng(1), samples)
    labels = np.arange(samples, dtype=np.float32)[:, None] / samples
    slices = ({"ids": ids, "weights": weights, "dense": dense}, labels)
    return tf.data.Dataset.from_tensor_slices(slices).batch(BATCH)


def prefetching():
    return FullSparse(4, ROWS, prefetch_ids=True)


def inputs_of(batch):
    """What a FullSparse layer sums: a weighted pair and dense ids."""
    return (batch["ids"], batch["weights"]), batch["dense"]


@pytest.mark.parametrize("rank", [0, 1])
def test_every_batch_knows_the_next_one(rank):
    layer = prefetching()
    local = input.distribute(
        dataset(STEPS * BATCH - 3).map(
            lambda x, y: layer.preprocess(inputs_of(x))
        ),
        Alone(rank),
        "input",
    )
    assert local.cardinality() == STEPS
    for _ in range(2):
        found = list(local)
        numbers = {int(batch.position[0]) for batch in found}
        assert len(numbers) == 1
        assert [int(b.position[1]) for b in found] == list(range(STEPS))
        for batch, following in itertools.pairwise(found):
            assert_equal_lists(batch.ahead[0], following.now)
        last = found[-1].ahead[0]
        assert all(int(tf.size(each.row_splits)) == 1 for each in last.lists)
    assert int(next(iter(local)).position[0]) not in numbers


def assert_equal_lists(first, second):
    for one, other in zip(first.lists, second.lists, strict=True):
        for field in ("values", "row_splits", "weights"):
            np.testing.assert_array_equal(
                getattr(one, field), getattr(other, field)
            )


def test_ranks_together_look_up_every_sample():
    layer = FullSparse(
        4, ROWS, prefetch_ids=True, kernel_initializer="normal", use_bias=False
    )
    prepared = dataset(BATCH - 1).map(
        lambda x, y: layer.preprocess(inputs_of(x))
    )
    parts = [
        layer(batch)
        for rank in range(3)
        for batch in input.distribute(prepared, Alone(rank, 3), "input")
    ]
    (batch,) = dataset(BATCH - 1)
    np.testing.assert_allclose(
        tf.concat(parts, 0), layer(inputs_of(batch[0])), rtol=1e-6, atol=1e-7
    )


def embedding(**options):
    table = TableConfig("table", ROWS, 4, "normal", combiner="sqrtn")
    features = {
        "ids": FeatureConfig("ids", table, (None, None), (None, 4)),
        "dense": FeatureConfig("dense", table, (None, K), (None, 4)),
    }
    return DistributedEmbedding(features, name="embedding", **options)


def shared(**options):
    layers = [FullSparse(3, ROWS), FullSparse(2, ROWS, activation="relu")]
    return SharedExchange(layers, name="shared", **options)


def sequences(**options):
    kept = TableConfig("kept", ROWS, 4, "normal", combiner=None)
    features = {
        "ids": FeatureConfig("ids", kept, (None, None), (None, 2 * K, 4)),
        "dense": FeatureConfig("dense", kept, (None, K), (None, K, 4)),
    }
    return DistributedEmbedding(features, name="sequences", **options)


def growing(**options):
    """Numbers and strings as keys, of which some lose their rows."""
    features = {}
    for name, length in (("ids", None), ("dense", K)):
        vocabulary = DynamicVocabulary(
            ROWS // 2,
            evict="lru",
            full="shared_row",
            key_dtype="string" if name == "dense" else "int64",
        )
        table = TableConfig(
            name, embedding_dim=4, initializer="normal", vocabulary=vocabulary
        )
        shapes = (None, length), (None, 4)
        features[name] = FeatureConfig(name, table, *shapes)
    return DistributedEmbedding(features, name="growing", **options)


def prepare_keys(layer, x):
    texts = tf.strings.as_string(x["dense"])
    return layer.preprocess({"ids": x["ids"], "dense": texts})


def prepare_embedding(layer, x):
    weights = {
        "ids": x["weights"],
        "dense": tf.ones([tf.shape(x["dense"])[0], K]),
    }
    return layer.preprocess({"ids": x["ids"], "dense": x["dense"]}, weights)


def nested(ids):
    """Ragged in two dimensions, with a third of one size behind them."""
    pairs = tf.stack([ids.values, ids.values], axis=1)
    lists = tf.RaggedTensor.from_row_splits(pairs, ids.row_splits)
    number = tf.cast(ids.nrows(), tf.int64)
    # Sample i has i % 3 lists: the last of the batch has what is left.
    ends = tf.cumsum(tf.range(number) % 3)
    ends = tf.concat([[0], tf.minimum(ends[:-1], number), [number]], 0)
    return tf.RaggedTensor.from_row_splits(lists, ends)


def total(rows):
    """The sum of all rows of a sample."""
    while len(rows.shape) > 2:
        rows = tf.reduce_sum(rows, 1)
    return rows


WAYS = {
    "embedding": (embedding, prepare_embedding),
    "growing": (growing, prepare_keys),
    "full_sparse": (
        lambda **options: FullSparse(4, ROWS, name="full", **options),
        lambda layer, x: layer.preprocess(inputs_of(x)),
    ),
    "sequences": (sequences, prepare_embedding),
    "ragged": (
        lambda **options: Embedding(ROWS, 4, name="rows", **options),
        lambda layer, x: layer.preprocess(x["ids"]),
    ),
    "nested": (
        lambda **options: Embedding(ROWS, 4, name="rows", **options),
        lambda layer, x: layer.preprocess(nested(x["ids"])),
    ),
    "masked": (
        lambda **o: Embedding(ROWS, 4, mask_zero=True, name="rows", **o),
        lambda layer, x: layer.preprocess(x["dense"]),
    ),
    "shared": (
        shared,
        lambda layer, x: layer.preprocess((inputs_of(x), x["dense"])),
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_one_process_trains_the_same(way):
    make, prepare = WAYS[way]

    class Model(keras.Model):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer
            self.top = keras.layers.Dense(1, kernel_initializer="ones")

        def call(self, inputs):
            found = tf.nest.flatten(self.layer(inputs))
            sums = [total(x) for x in found]
            mask = getattr(found[0], "_keras_mask", None)
            if mask is not None:
                sums.append(tf.cast(mask, tf.float32))
            return self.top(tf.concat(sums, 1))

    losses = []
    for prefetch_ids in (False, True):
        keras.utils.set_random_seed(3)
        layer = make(prefetch_ids=prefetch_ids)
        assert layer.get_config()["prefetch_ids"] is prefetch_ids
        model = Model(layer)
        model.compile(tfdist_ext.optimizers.Adagrad(0.02), "mse")
        batches = dataset().map(
            lambda x, y, layer=layer: (prepare(layer, x), y)
        )
        losses.append(model.fit(batches, epochs=2, verbose=0).history["loss"])
    np.testing.assert_array_equal(*losses)
    assert losses[0][1] < losses[0][0]


@pytest.mark.parametrize("way", ["sequences", "ragged", "nested", "masked"])
def test_sequences_are_cut_by_sample(way):
    make, prepare = WAYS[way]
    layer = make(prefetch_ids=True)
    (batch,) = dataset(BATCH - 1)
    whole = tf.nest.flatten(layer(prepare(layer, batch[0])))
    prepared = dataset(BATCH - 1).map(lambda x, y: prepare(layer, x))
    parts = [
        tf.nest.flatten(layer(part))
        for rank in range(3)
        for part in input.distribute(prepared, Alone(rank, 3), "input")
    ]
    for expected, *found in zip(whole, *parts, strict=True):
        joined, equal = tf.concat(found, 0), expected
        if isinstance(equal, tf.RaggedTensor):
            joined, equal = joined.to_tensor(), equal.to_tensor()
        np.testing.assert_allclose(joined, equal, rtol=1e-6, atol=1e-7)


def test_files_cannot_be_shared_out_after_preprocess():
    layer = prefetching()
    options = tf.data.Options()
    policy = tf.data.experimental.AutoShardPolicy.OFF
    options.experimental_distribute.auto_shard_policy = policy
    prepared = dataset().map(lambda x, y: layer.preprocess(x["dense"]))
    with pytest.raises(ValueError, match="auto_shard_policy=OFF"):
        input.distribute(prepared.with_options(options), Alone(), "input")
