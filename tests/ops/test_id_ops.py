# SPDX-License-Identifier: Apache-2.0
"""Ids over the wire: every op against its stock twin, messages routed by hand.

`id_exchange.py` simulates the world in one process.
"""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tests.ops.id_exchange import NONE
from tests.ops.id_exchange import batch_of
from tests.ops.id_exchange import by_column
from tests.ops.id_exchange import by_row
from tests.ops.id_exchange import decode
from tests.ops.id_exchange import encode
from tests.ops.id_exchange import exchange
from tests.ops.id_exchange import expected
from tests.ops.id_exchange import features_of
from tests.ops.id_exchange import merged
from tests.ops.id_exchange import placed
from tests.ops.id_exchange import received
from tests.reference import ids as reference_ids
from tfdist_ext.ops import id_ops
from tfdist_ext.tables import placement as placement_lib

WORLD_SIZES = (1, 2, 4)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_id_arrives_once(world_size, dtype, weighted):
    rng = np.random.default_rng(world_size)
    placements = features_of(world_size)
    batches = [
        [
            [
                batch_of(
                    rng,
                    samples + f,
                    most,
                    place.vocabulary_size,
                    weighted and most == 5,
                    dtype,
                )
                for most in (20, 5)[: 1 + f % 2]
            ]
            for f, place in enumerate(placements)
        ]
        for samples in (13, 0, 1, 64)[:world_size]
    ]
    encoded, decoded = exchange(id_ops, batches, placements)
    found = received(encoded, decoded, placements)
    for rank, f in itertools.product(range(world_size), range(len(placements))):
        wanted = expected(batches[rank][f], placements[f])
        assert found[rank][f].keys() == wanted.keys()
        for key, weight in wanted.items():
            np.testing.assert_allclose(found[rank][f][key], weight, rtol=1e-5)
    for outputs in decoded:
        np.testing.assert_array_equal(
            outputs[4], [len(batch[0][0][1]) - 1 for batch in batches]
        )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("samples,most", [(0, 0), (5, 0), (1, 9), (40, 30)])
def test_same_as_twin(world_size, weighted, samples, most):
    rng = np.random.default_rng(3)
    placements = features_of(world_size)
    batches = [
        [
            [
                batch_of(rng, samples, most, p.vocabulary_size, weighted)
                for _ in range(2)
            ]
            for p in placements
        ]
        for _ in range(world_size)
    ]
    ours = exchange(id_ops, batches, placements)
    twin = exchange(reference_ids, batches, placements)
    for mine, other in zip(ours[0], twin[0], strict=True):
        for i in (2, 3):  # the messages themselves differ
            np.testing.assert_array_equal(mine[i], other[i])
            assert mine[i].dtype == other[i].dtype
    for mine, other in zip(ours[1], twin[1], strict=True):
        for i in (0, 1, 3, 4):
            np.testing.assert_array_equal(mine[i], other[i])
            assert mine[i].dtype == other[i].dtype
        np.testing.assert_allclose(mine[2], other[2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("policy", ["error", "ignore"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_unique(world_size, policy):
    rng = np.random.default_rng(world_size)
    placements = features_of(world_size)
    batches = []
    for _ in range(world_size):
        batch = []
        for p in placements:
            limit = p.vocabulary_size
            edge = 2 if policy == "ignore" else 0
            ids = np.unique(rng.integers(-edge, limit + edge, limit // 2))
            batch.append([(ids, np.arange(len(ids) + 1), NONE)])
        batches.append(batch)
    options = {
        "out_of_range": [policy] * len(placements),
        "unique": [True] * len(placements),
    }
    ours = exchange(id_ops, batches, placements, **options)
    twin = exchange(reference_ids, batches, placements, **options)
    for mine, other in zip(ours[0], twin[0], strict=True):
        for i in (2, 3):
            np.testing.assert_array_equal(mine[i], other[i])
    for mine, other in zip(ours[1], twin[1], strict=True):
        for x, y in zip(mine, other, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    "ids,splits",
    [
        ([1, 1], [0, 1, 2]),
        ([2, 1], [0, 1, 2]),
        ([1, 2], [0, 2, 2]),
        ([1, 2], [0, 2]),
        ([1], [0, 0, 1]),
    ],
)
def test_broken_promise_of_unique(ids, splits):
    with pytest.raises(tf.errors.InvalidArgumentError, match="under unique"):
        encode(
            id_ops,
            [[(np.array(ids), np.array(splits), NONE)]],
            by_row(9, 2),
            0,
            2,
            unique=[True],
        )


@pytest.mark.parametrize("place", [by_row, by_column])
@pytest.mark.parametrize(
    "ids_per_sample", [1, 7, 8, 9, 63, 127, 128, 129, 1000]
)
@pytest.mark.parametrize(
    "limit", [1, 3, 64, 2**24, 2**24 + 1, 2**31 + 11, 2**40]
)
def test_sizes_and_vocabularies(limit, ids_per_sample, place):
    rng = np.random.default_rng(limit % 1000)
    splits = np.arange(4) * ids_per_sample
    batches = [
        [[(rng.integers(0, limit, splits[-1]), splits, NONE)]] for _ in range(4)
    ]
    batches[0][0][0][0][:2] = [limit - 1, 0][: len(batches[0][0][0][0][:2])]
    placements = place(limit, 4)
    _encoded, decoded = exchange(id_ops, batches, placements)
    for rank in range(placements[0].row_parts):
        ids = np.concatenate(
            [
                np.unique(batch[0][0][0][a:b])
                for batch in batches
                for a, b in itertools.pairwise(splits)
            ]
        )
        if place is by_row:
            ids = ids[placement_lib.part_of(ids, 4) == rank]
            ids = placement_lib.local_row(ids, 4)
        np.testing.assert_array_equal(decoded[rank][1], ids)


@pytest.mark.parametrize("large", [0, 600])
def test_ascending_ids_give_the_same_message(large):
    rng = np.random.default_rng(0)
    ids, splits, none = batch_of(rng, 50, 80, 1000)
    # One sample may have more ids than the others together.
    ids = np.concatenate([ids, rng.integers(0, 1000, large)])
    splits = np.append(splits, len(ids))
    ascending = ids.copy()
    for a, b in itertools.pairwise(splits):
        ascending[a:b].sort()
    first = encode(id_ops, [[(ids, splits, none)]], by_row(1000, 4), 0, 4)
    second = encode(
        id_ops, [[(ascending, splits, none)]], by_row(1000, 4), 0, 4
    )
    for x, y in zip(first, second, strict=True):
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
            id_ops, [[[(ids, splits, sent)]]], by_row(3000, 1)
        )
        wanted = sent if sent.max() > 1 else []
        np.testing.assert_array_equal(decoded[0][2], wanted)
        sizes.append(len(encoded[0][0]))
    assert sizes[0] < sizes[1]


@pytest.mark.parametrize("odd", [0.0, -1.0, 0.5, 2.0**24 + 2, np.nan, np.inf])
def test_other_weights_travel_unchanged(odd):
    weights = np.ones(300, np.float32)
    weights[17] = odd
    lists = [(np.arange(300), np.arange(301), weights)]
    _, decoded = exchange(id_ops, [[lists]], by_row(300, 1))
    np.testing.assert_array_equal(decoded[0][2], weights)


def test_weights_of_one_are_not_sent():
    rng = np.random.default_rng(0)
    ids, splits, none = batch_of(rng, 50, 40, 1000)
    ids = np.arange(len(ids))
    ones = np.ones(len(ids), np.float32)
    for weights in (none, ones):
        encoded, decoded = exchange(
            id_ops, [[[(ids, splits, weights)]]], by_row(len(ids), 1)
        )
        assert decoded[0][2].shape == (0,)
        assert len(encoded[0][0]) < 2 * len(ids)


def test_large_batches_are_encoded_in_parts():
    rng = np.random.default_rng(0)
    lists = [batch_of(rng, 4000, 30, 10**6)]
    encoded, decoded = exchange(id_ops, [[lists]] * 2, by_row(10**6, 2))
    total = sum(len(sample) for sample in merged(lists))
    assert sum(len(outputs[1]) for outputs in decoded) == 2 * total
    assert (np.diff(encoded[0][2][: encoded[0][3][0, 0]]) > 0).all()


@pytest.mark.parametrize("unique", [False, True])
def test_overhead_of_small_sections(unique):
    # A section is its ids' bits and a header; an absent one is a byte.
    header = 6
    one = [(np.array([1]), np.array([0, 1]), NONE)]
    none = [(np.zeros(0, np.int64), np.array([0]), NONE)]
    sizes = [
        len(
            encode(
                id_ops,
                [one] + [each] * 25,
                [placed(str(f), 9, 1, 1) for f in range(26)],
                0,
                1,
                unique=[unique] * 26,
            )[0]
        )
        for each in (none, one)
    ]
    assert sizes[0] <= header + 6 + 25
    assert sizes[1] <= header + 26 * 6


@pytest.mark.parametrize("module", [id_ops, reference_ids])
@pytest.mark.parametrize("unique", [False, True])
@pytest.mark.parametrize("bad", [-1, 100, 2**40])
def test_bad_id_fails_alike_on_all_ranks(module, unique, bad):
    placements = [
        placed("first", 50, 1, 1),
        placed("emb", 100, 1, 1),  # rank 1 holds nothing of either
        placed("last", 10, 1, 1),
    ]
    splits = np.array([0, 1, 2])
    good = [(np.array([1, 2]), splits, NONE)]
    bad_list = [(np.sort([3, bad]), splits, NONE)]
    worse = [(np.array([11, 12]), splits, NONE)]
    options = {"unique": [unique] * 3}
    encoded = [
        encode(module, batch, placements, rank, 2, **options)
        for rank, batch in enumerate(
            [[good, good, good], [good, bad_list, worse]]
        )
    ]
    messages = []
    for rank in range(2):
        with pytest.raises(tf.errors.InvalidArgumentError) as error:
            decode(module, encoded, placements, rank)
        messages.append(error.value.message.split(" [Op:")[0])
    sample = "" if unique else f" in sample {int(bad > 0)}"
    assert f"id {bad}{sample} of rank 1" in messages[0]
    assert "Layer 'emb'" in messages[0] and "below 100" in messages[0]
    assert messages[0].split("}} ")[-1] == messages[1].split("}} ")[-1]


@pytest.mark.parametrize("module", [id_ops, reference_ids])
@pytest.mark.parametrize("place", [by_row, by_column])
def test_ignored_ids_contribute_nothing(module, place):
    lists = [(np.array([5, -1, 9, 100]), np.array([0, 2, 2, 3, 4]), NONE)]
    placements = place(100, 2)
    encoded, decoded = exchange(
        module, [[lists]] * 2, placements, out_of_range=["ignore"]
    )
    found = received(encoded, decoded, placements)
    columns = range(placements[0].column_parts)
    wanted = {(s, i, c): 1.0 for s, i in [(0, 5), (2, 9)] for c in columns}
    assert found == [[wanted]] * 2


@pytest.mark.parametrize(
    "ids",
    [
        [],
        [7],
        [3, 3, 3],
        [5, -1, 5, 2**62, -(2**63), 2**63 - 1, -1],
        np.random.default_rng(0).integers(0, 300, 5000),
    ],
)
def test_unique_ids(ids):
    ids = np.array(ids, np.int64)
    wanted, inverse = np.unique(ids, return_inverse=True)
    for module in (id_ops, reference_ids):
        unique, positions = module.unique_ids(tf.constant(ids))
        np.testing.assert_array_equal(unique, wanted)
        np.testing.assert_array_equal(positions, inverse)
