# SPDX-License-Identifier: Apache-2.0
"""Popular ids coded by their popularity: the same ids in fewer bytes."""

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
from tests.ops.id_exchange import received
from tfdist_ext.ops import id_ops


def hot_exchange(batches, placements, hot_ids, **options):
    """As `exchange`, with hot ids on all ranks."""
    ranks = range(len(batches))
    encoded = [
        encode(
            id_ops,
            batches[rank],
            placements,
            rank,
            len(batches),
            hot_ids=hot_ids,
            **options,
        )
        for rank in ranks
    ]
    decoded = [
        decode(id_ops, encoded, placements, rank, hot_ids=hot_ids)
        for rank in ranks
    ]
    return encoded, decoded


def sorted_rows(decoded):
    """What was decoded, the rows of every sample ascending."""
    row_splits, rows, weights, *rest = decoded
    sample = np.repeat(np.arange(len(row_splits) - 1), np.diff(row_splits))
    order = np.lexsort((rows, sample))
    weights = weights[order] if len(weights) else weights
    return [row_splits, rows[order], weights, *rest]


@pytest.mark.parametrize("share", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("most", [1, 25])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_same_ids_as_without(world_size, most, weighted, share):
    rng = np.random.default_rng(world_size)
    placements = features_of(world_size)
    hot_ids = [
        rng.permutation(p.vocabulary_size)[: int(share * p.vocabulary_size)]
        for p in placements
    ]
    batches = [
        [
            [batch_of(rng, 30, most, p.vocabulary_size, weighted)]
            for p in placements
        ]
        for _ in range(world_size)
    ]
    encoded, decoded = hot_exchange(batches, placements, hot_ids)
    plain = exchange(id_ops, batches, placements)
    for mine, other in zip(encoded, plain[0], strict=True):
        for i in (2, 3):
            np.testing.assert_array_equal(mine[i], other[i])
    for mine, other in zip(decoded, plain[1], strict=True):
        for x, y in zip(sorted_rows(mine), other, strict=True):
            np.testing.assert_array_equal(x, y)
    found = received(encoded, decoded, placements)
    for rank, f in itertools.product(range(world_size), range(len(placements))):
        wanted = expected(batches[rank][f], placements[f])
        assert found[rank][f].keys() == wanted.keys()


@pytest.mark.parametrize("limit", [2, 65536, 2**31 + 11, 2**40])
@pytest.mark.parametrize("hotness", [1, 50])
@pytest.mark.parametrize("place", [by_row, by_column])
def test_vocabularies(place, hotness, limit):
    rng = np.random.default_rng(0)
    hot = np.unique(rng.integers(0, limit, 65536))
    rng.shuffle(hot)
    ids = np.where(
        rng.integers(0, 2, 40 * hotness),
        rng.choice(hot, 40 * hotness),
        rng.integers(0, limit, 40 * hotness),
    )
    ids[:2] = limit - 1, 0
    lists = [(ids, np.arange(41) * hotness, NONE)]
    placements = place(limit, 4)
    _, decoded = hot_exchange([[lists]] * 4, placements, [hot])
    plain = exchange(id_ops, [[lists]] * 4, placements)[1]
    for mine, other in zip(decoded, plain, strict=True):
        for x, y in zip(sorted_rows(mine), other, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("hotness", [1, 100])
def test_fewer_bytes(hotness):
    rng = np.random.default_rng(0)
    rows = 2**17
    order = rng.permutation(rows)
    ids = order[rng.zipf(1.1, (256, hotness)).astype(np.uint64) % rows].ravel()
    lists = [(ids, np.arange(257) * hotness, NONE)]
    plain, hot = (
        len(
            encode(
                id_ops, [lists], by_row(rows, 1), 0, 1, hot_ids=[order[1:count]]
            )[0]
        )
        for count in (1, rows // 16)
    )
    assert hot < 0.8 * plain


def test_rows_come_in_order_of_popularity():
    lists = [(np.array([3, 9, 1, 5, 0]), np.array([0, 5]), NONE)]
    hot = np.array([9, 0, 3])
    _, decoded = hot_exchange([[lists]], by_row(10, 1), [hot])
    np.testing.assert_array_equal(decoded[0][1], [9, 0, 3, 1, 5])


def test_lists_may_change_from_call_to_call():
    # The ops keep what they made of the last list.
    rng = np.random.default_rng(0)
    lists = [batch_of(rng, 20, 9, 100)]
    wanted = exchange(id_ops, [[lists]], by_row(100, 1))[1][0]
    for count in (0, 5, 5, 80, 3):
        hot = tf.constant(rng.permutation(100)[:count])
        for _ in range(2):
            decoded = hot_exchange([[lists]], by_row(100, 1), [hot])[1][0]
            for x, y in zip(sorted_rows(decoded), wanted, strict=True):
                np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("theirs", [[], [2, 1, 3], [1, 2], [1, 2, 4]])
def test_other_lists_of_other_ranks_are_refused(theirs):
    lists = [(np.array([1, 2, 3, 5]), np.array([0, 2, 4]), NONE)]
    encoded = encode(
        id_ops, [lists], by_row(9, 1), 0, 1, hot_ids=[np.array([1, 2, 3])]
    )
    with pytest.raises(
        tf.errors.DataLossError, match=r"'emb'.* rank 0 .*other hot_ids"
    ):
        decode(
            id_ops,
            [encoded],
            by_row(9, 1),
            0,
            hot_ids=[np.array(theirs, np.int64)],
        )


@pytest.mark.parametrize(
    "hot,text",
    [
        ([[1, 1]], "twice"),
        ([[9]], "out of range"),
        ([[-1]], "out of range"),
        ([[1], [2]], "every feature"),
        ([np.arange(65537)], "at most 65536"),
    ],
)
def test_malformed_lists_are_refused(hot, text):
    lists = [(np.array([1]), np.array([0, 1]), NONE)]
    hot = [np.array(each, np.int64) for each in hot]
    with pytest.raises(tf.errors.InvalidArgumentError, match=text):
        encode(id_ops, [lists], by_row(9, 1), 0, 1, hot_ids=hot)
