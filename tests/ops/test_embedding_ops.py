# SPDX-License-Identifier: Apache-2.0
"""Ids over the wire: every op against its stock twin, messages routed by hand.

The world is simulated in one process: every rank encodes, the test carries the
messages, every rank decodes.
"""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tfdist_ext.ops import embedding_ops
from tfdist_ext.ops import reference
from tfdist_ext.sharding import placement as placement_lib

WORLD_SIZES = (1, 2, 4)
PLACEMENTS = ("row", "column")


def batch_of(rng, samples, most_ids, limit, weighted=False, dtype=np.int64):
    """Random ids, with duplicates and empty samples: (ids, splits, weights)."""
    counts = rng.integers(0, most_ids + 1, samples)
    splits = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    ids = (rng.integers(0, limit, splits[-1]) ** 2 // limit).astype(dtype)
    weights = rng.normal(size=splits[-1] * weighted).astype(np.float32)
    return ids, splits, weights


def merged(lists):
    """What a sample's ids are in all: a dict {id: weight} per sample."""
    samples = [{} for _ in lists[0][1][1:]]
    for ids, splits, weights in lists:
        for s, total in enumerate(samples):
            for i in range(splits[s], splits[s + 1]):
                weight = weights[i] if len(weights) else 1.0
                total[int(ids[i])] = total.get(int(ids[i]), 0.0) + weight
    return samples


def exchange(module, batches, limit, placement, **options):
    """Encodes and decodes on all ranks; numpy (encoded, decoded) per rank."""
    world_size = len(batches)
    table = {
        "world_size": world_size,
        "vocabulary_size": limit,
        "placement": placement,
        "layer": options.pop("layer", "emb"),
    }
    encoded = [
        module.encode_ids(
            *zip(*lists, strict=True),
            len(lists[0][1]) - 1.0,
            rank=rank,
            **table,
            **options,
        )
        for rank, lists in enumerate(batches)
    ]
    encoded = [[x.numpy() for x in outputs] for outputs in encoded]
    decoded = []
    for rank in range(world_size):
        parts = [message_to(rank, placement, e) for e in encoded]
        sizes = np.array([len(part) for part in parts])
        payload = np.concatenate(parts)
        outputs = module.decode_ids(payload, sizes, rank=rank, **table)
        decoded.append([x.numpy() for x in outputs])
    return encoded, decoded


def message_to(rank, placement, encoded):
    payload, splits = encoded[:2]
    if placement == "column":
        assert (splits == len(payload)).all()
        return payload
    begin = splits[:rank].sum()
    return payload[begin : begin + splits[rank]]


def received(encoded, decoded, placement, limit):
    """Puts what the owners decoded together again: a dict per rank, sample."""
    world_size = len(encoded)
    found = [{} for _ in range(world_size)]
    for owner in range(world_size):
        ids = np.arange(limit)
        if placement == "row":
            ids = placement_lib.ids_of_shard(owner, world_size, limit)
        row_splits, rows, weights, sample_splits, _ = decoded[owner]
        served = 0
        for rank in range(world_size):
            _, _, sample_ids, splits = encoded[rank]
            assert splits[owner] == sample_splits[rank]
            first = splits[:owner].sum() if placement == "row" else 0
            for sample in sample_ids[first : first + splits[owner]]:
                entries = range(*row_splits[served : served + 2])
                assert len(entries) > 0
                served += 1
                for i in entries:
                    weight = weights[i] if len(weights) else 1.0
                    key = (sample, ids[rows[i]])
                    if placement == "row":
                        assert key not in found[rank]
                    found[rank][key] = weight
        assert served == len(row_splits) - 1
    return found


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_id_arrives_once(world_size, placement, dtype, weighted):
    rng = np.random.default_rng(world_size)
    batches = [
        [
            batch_of(rng, samples, most, 97, weighted and most == 5, dtype)
            for most in (20, 5)
        ]
        for samples in (13, 0, 1, 64)[:world_size]
    ]
    encoded, decoded = exchange(embedding_ops, batches, 97, placement)
    found = received(encoded, decoded, placement, 97)
    for rank, lists in enumerate(batches):
        expected = {
            (s, i): w
            for s, sample in enumerate(merged(lists))
            for i, w in sample.items()
        }
        assert found[rank].keys() == expected.keys()
        for key, weight in expected.items():
            np.testing.assert_allclose(found[rank][key], weight, rtol=1e-5)
    for outputs in decoded:
        np.testing.assert_array_equal(
            outputs[4], [len(lists[0][1]) - 1 for lists in batches]
        )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("samples,most", [(0, 0), (5, 0), (1, 9), (40, 30)])
def test_same_as_twin(world_size, placement, weighted, samples, most):
    rng = np.random.default_rng(3)
    batches = [
        [batch_of(rng, samples, most, 50, weighted) for _ in range(2)]
        for _ in range(world_size)
    ]
    ours = exchange(embedding_ops, batches, 50, placement)
    twin = exchange(reference, batches, 50, placement)
    for mine, other in zip(ours[0], twin[0], strict=True):
        for i in (2, 3):  # the messages themselves differ
            np.testing.assert_array_equal(mine[i], other[i])
    for mine, other in zip(ours[1], twin[1], strict=True):
        for i in (0, 1, 3, 4):
            np.testing.assert_array_equal(mine[i], other[i])
        np.testing.assert_allclose(mine[2], other[2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("ids_per_sample", [1, 7, 8, 9, 63, 64, 65, 1000])
@pytest.mark.parametrize("limit", [1, 3, 64, 2**31 + 11, 2**40])
def test_sizes_and_vocabularies(limit, ids_per_sample, placement):
    rng = np.random.default_rng(limit % 1000)
    splits = np.arange(4) * ids_per_sample
    batches = [
        [(rng.integers(0, limit, splits[-1]), splits, np.zeros(0, np.float32))]
        for _ in range(4)
    ]
    batches[0][0][0][:2] = [limit - 1, 0][: len(batches[0][0][0][:2])]
    _encoded, decoded = exchange(embedding_ops, batches, limit, placement)
    world_size = 4 if placement == "row" else 1
    for rank in range(world_size):
        ids = np.concatenate(
            [
                np.unique(lists[0][0][a:b])
                for lists in batches
                for a, b in itertools.pairwise(splits)
            ]
        )
        if placement == "row":
            ids = ids[placement_lib.owner_of(ids, 4) == rank]
            ids = placement_lib.local_row(ids, 4)
        np.testing.assert_array_equal(decoded[rank][1], ids)


def test_ascending_ids_give_the_same_message():
    rng = np.random.default_rng(0)
    ids, splits, none = batch_of(rng, 50, 40, 1000)
    ascending = ids.copy()
    for a, b in itertools.pairwise(splits):
        ascending[a:b].sort()
    first, _ = exchange(embedding_ops, [[(ids, splits, none)]] * 4, 1000, "row")
    second, _ = exchange(
        embedding_ops, [[(ascending, splits, none)]] * 4, 1000, "row"
    )
    for x, y in zip(first[0], second[0], strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("most", [1, 7, 2**22])
def test_whole_weights_travel_as_counts(most):
    rng = np.random.default_rng(0)
    ids = np.arange(3000)
    splits = np.arange(0, 3001, 100)
    weights = rng.integers(1, most + 1, 3000).astype(np.float32)
    sizes = []
    for sent in (weights, weights + np.float32(0.5)):
        encoded, decoded = exchange(
            embedding_ops, [[(ids, splits, sent)]], 3000, "row"
        )
        expected = sent if sent.max() > 1 else []
        np.testing.assert_array_equal(decoded[0][2], expected)
        sizes.append(len(encoded[0][0]))
    assert sizes[0] < sizes[1]


@pytest.mark.parametrize("odd", [0.0, -1.0, 0.5, 2.0**24 + 2, np.nan, np.inf])
def test_other_weights_travel_unchanged(odd):
    weights = np.ones(300, np.float32)
    weights[17] = odd
    _, decoded = exchange(
        embedding_ops,
        [[(np.arange(300), np.arange(301), weights)]],
        300,
        "row",
    )
    np.testing.assert_array_equal(decoded[0][2], weights)


def test_weights_of_one_are_not_sent():
    rng = np.random.default_rng(0)
    ids, splits, none = batch_of(rng, 50, 40, 1000)
    ids = np.arange(len(ids))
    ones = np.ones(len(ids), np.float32)
    for weights in (none, ones):
        encoded, decoded = exchange(
            embedding_ops, [[(ids, splits, weights)]], len(ids), "row"
        )
        assert decoded[0][2].shape == (0,)
        assert len(encoded[0][0]) < 2 * len(ids)


def test_large_batches_are_encoded_in_parts():
    rng = np.random.default_rng(0)
    lists = [batch_of(rng, 4000, 30, 10**6)]
    encoded, decoded = exchange(embedding_ops, [lists] * 2, 10**6, "row")
    total = sum(len(sample) for sample in merged(lists))
    assert sum(len(outputs[1]) for outputs in decoded) == 2 * total
    assert (np.diff(encoded[0][2][: encoded[0][3][0]]) > 0).all()


@pytest.mark.parametrize("module", [embedding_ops, reference])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("bad", [-1, 100, 2**40])
def test_bad_id_fails_alike_on_all_ranks(module, placement, bad):
    none = np.zeros(0, np.float32)
    good = [(np.array([1, 2]), np.array([0, 1, 2]), none)] * 2
    bad_batch = [good[0], (np.array([3, bad]), np.array([0, 1, 2]), none)]
    messages = []
    table = {"world_size": 2, "vocabulary_size": 100, "placement": placement}
    encoded = []
    for rank, lists in enumerate([good, bad_batch]):
        outputs = module.encode_ids(
            *zip(*lists, strict=True), 2.0, rank=rank, **table
        )
        encoded.append([x.numpy() for x in outputs])
    for rank in range(2):
        parts = [message_to(rank, placement, e) for e in encoded]
        with pytest.raises(tf.errors.InvalidArgumentError) as error:
            module.decode_ids(
                np.concatenate(parts),
                [len(part) for part in parts],
                rank=rank,
                layer="emb",
                **table,
            )
        messages.append(error.value.message.split(" [Op:")[0])
    assert f"id {bad} in sample 1 of rank 1" in messages[0]
    assert "Layer 'emb'" in messages[0] and "below 100" in messages[0]
    assert messages[0].split("}} ")[-1] == messages[1].split("}} ")[-1]


@pytest.mark.parametrize("module", [embedding_ops, reference])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_ignored_ids_contribute_nothing(module, placement):
    none = np.zeros(0, np.float32)
    lists = [(np.array([5, -1, 9, 100]), np.array([0, 2, 2, 3, 4]), none)]
    options = {"out_of_range": "ignore"}
    encoded, decoded = exchange(module, [lists] * 2, 100, placement, **options)
    found = received(encoded, decoded, placement, 100)
    assert found == [{(0, 5): 1.0, (2, 9): 1.0}] * 2
