# SPDX-License-Identifier: Apache-2.0
"""Malformed inputs are refused.

Messages come from the network: any bytes decode in bounds or are refused.
"""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tests import fuzzing
from tfdist_ext.ops import id_ops
from tfdist_ext.tables.placement import FeaturePlacement

LIMIT = 1000
PLACEMENTS = [
    FeaturePlacement("ragged", LIMIT, 8, 1, 2, (0, 1)),
    FeaturePlacement("one", 30, 8, 1, 1, (0,)),
    FeaturePlacement("elsewhere", 30, 8, 1, 1, (1,)),
    FeaturePlacement("unique", 500, 8, 2, 1, (1, 0)),
]
TABLES = {"placements": PLACEMENTS, "world_size": 2}
REFUSED = (tf.errors.DataLossError, tf.errors.InvalidArgumentError)


def message(rng, weighted=False, rank=0, in_blocks=False):
    """What `rank` sends to rank 0."""
    samples = 300 if in_blocks else 20
    splits = np.concatenate([[0], np.cumsum(rng.integers(0, 9, samples))])
    unique = np.unique(rng.integers(0, 500, samples))
    lists = [
        (rng.integers(0, LIMIT, splits[-1]), splits),
        (rng.integers(0, 30, samples), np.arange(samples + 1)),
        (rng.integers(0, 30, samples), np.arange(samples + 1)),
        (unique, np.arange(len(unique) + 1)),
    ]
    payload, sizes, *_ = id_ops.encode_ids(
        *zip(*lists, strict=True),
        [
            rng.normal(size=len(ids) * weighted).astype(np.float32)
            for ids, _ in lists
        ],
        3.0,
        rank=rank,
        list_features=range(4),
        out_of_range=["error"] * 4,
        unique=[False] * 3 + [True],
        in_blocks=in_blocks,
        **TABLES,
    )
    return payload.numpy()[: sizes[0]]


def decode(*messages):
    return id_ops.decode_ids(
        np.concatenate(messages),
        np.array([len(each) for each in messages]),
        rank=0,
        **TABLES,
    )


def check_decoded(outputs):
    """What was accepted must be usable without further checks."""
    row_splits, rows, weights, served, _ = (x.numpy() for x in outputs)
    assert row_splits[0] == 0 and row_splits[-1] == len(rows)
    assert (np.diff(row_splits) > 0).all()
    assert served.sum() == len(row_splits) - 1
    limits = np.repeat(np.tile([LIMIT, 30, 0, 250], 2), served.ravel())
    limits = np.repeat(limits, np.diff(row_splits))
    assert ((rows >= 0) & (rows < limits)).all()
    assert len(weights) in (0, len(rows))


def changed(rng, original):
    """A message with some bytes flipped, cut off, appended or replaced."""
    result = original.copy()
    kind = rng.integers(5)
    if kind == 0:
        return result[: rng.integers(len(result))]
    if kind == 1:
        extra = rng.integers(0, 256, rng.integers(1, 20), np.uint8)
        return np.concatenate([result, extra])
    if kind == 2:  # the header, where the sizes are
        result[rng.integers(min(len(result), 40))] = rng.integers(256)
        return result
    if kind == 3:
        return rng.integers(0, 256, rng.integers(0, 60), np.uint8)
    for _ in range(rng.integers(1, 4)):
        result[rng.integers(len(result))] ^= 1 << rng.integers(8)
    return result


@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_changed_bytes(seed, weighted, in_blocks):
    rng = np.random.default_rng(seed)
    refused = 0
    rounds = fuzzing.inputs(4800, parts=16)
    for _ in range(rounds):
        good = message(rng, weighted, in_blocks=in_blocks)
        other = message(rng, rng.integers(2) == 1, rank=1)
        try:
            check_decoded(decode(changed(rng, good), other))
        except REFUSED as error:
            assert "rank 0" in error.message
            refused += 1
    assert refused > rounds // 3


def test_valid_messages_are_accepted():
    rng = np.random.default_rng(0)
    check_decoded(decode(message(rng), message(rng, rank=1)))
    check_decoded(decode(message(rng, in_blocks=True), message(rng, rank=1)))


def test_every_truncation_is_refused():
    rng = np.random.default_rng(0)
    other = message(rng, rank=1)
    for weighted, in_blocks in itertools.product((False, True), repeat=2):
        whole = message(rng, weighted, in_blocks=in_blocks)
        for size in range(0, len(whole), 7 if in_blocks else 1):
            with pytest.raises(tf.errors.DataLossError, match="rank 0 sent"):
                decode(whole[:size], other)


@pytest.mark.parametrize("flags", [0, 4, 8, 12, 16, 28])
def test_claimed_sizes_do_not_allocate(flags):
    # A section of 2^41 entries in a message of a few bytes.
    entries = [0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x7F]
    counts = [] if flags & 4 else [1, 63, 1]
    section = [flags, *entries, *counts, 0, 0, 0]
    huge = [2, 0, 0, 0, 0, 0, len(section), *section, 0, 0]
    other = message(np.random.default_rng(0), rank=1)
    with pytest.raises(tf.errors.DataLossError, match="ends before"):
        decode(np.array(huge, np.uint8), other)


@pytest.mark.parametrize(
    "table, blocks, why",
    [
        ([1, 63, 1, 63, 1], [1, 1], ""),
        ([3, 63, 1, 63, 2], [3], ""),  # one block
        ([2, 63, 1, 63, 1], [1], "its sizes contradict"),  # for 2 samples
        ([1, 63, 2, 63, 1], [1, 1], "its size is wrong"),
        ([1, 63, 0, 63, 1], [1, 1], "its size is wrong"),
        ([1, 63, 1, 63, 0], [1, 1], "its sizes contradict"),
        ([1, 63, 1, 63, 2], [1, 1], "its sizes contradict"),
        ([0, 63, 1, 63, 1], [1, 1], "its header is malformed"),
        ([1, 49, 1, 63, 1], [1, 1], "its header is malformed"),
        ([1, 0, 1, 63, 1], [0, 0], "it ends before its last entry"),
        ([1, 63, 1, 63, 1], [1, 0], "it ends before its last entry"),
        ([1, 63, 1, 63, 1], [1], "it ends before its last entry"),
    ],
)
def test_blocks_that_contradict_their_section_are_refused(table, blocks, why):
    """Two samples of one entry each, row 0."""
    section = [16, 2, 2, 63, 1, 0, *table, *blocks]
    sent = np.array([2, *[0] * 5, len(section), *section, 0, 0], np.uint8)
    other = message(np.random.default_rng(0), rank=1)
    if why:
        with pytest.raises(tf.errors.DataLossError, match=why):
            decode(sent, other)
    else:
        row_splits, rows, *_ = decode(sent, other)
        assert list(row_splits[:3]) == [0, 1, 2] and list(rows[:2]) == [0, 0]


@pytest.mark.parametrize(
    "rows, why",
    [
        (1, ""),
        (0, "its sizes contradict"),
        (2, "its rows contradict its blocks"),
    ],
)
def test_rows_that_run_through_must_meet_the_next_block(rows, why):
    """Two blocks of one sample, each with the row that is next."""
    section = [28, 2, 0, 1, 63, 1, 63, rows, 1, 1]
    sent = np.array([2, *[0] * 5, len(section), *section, 0, 0], np.uint8)
    other = message(np.random.default_rng(0), rank=1)
    if why:
        with pytest.raises(tf.errors.DataLossError, match=why):
            decode(sent, other)
    else:
        assert list(decode(sent, other)[1][:2]) == [0, 1]


def test_bad_id_of_no_feature_is_refused():
    record = [0x42, 0, 0, 0, 0, 0, 4, *[0] * 16]
    other = message(np.random.default_rng(0), rank=1)
    with pytest.raises(tf.errors.DataLossError, match="of no feature"):
        decode(np.array(record, np.uint8), other)


def test_misrouted_message_is_refused():
    rng = np.random.default_rng(0)
    with pytest.raises(tf.errors.DataLossError, match="another rank"):
        decode(message(rng, rank=1), message(rng, rank=1))


@pytest.mark.parametrize("sizes", [[-1, 1], [5, 5], [1, 1], [10**15, 0], [1]])
def test_splits_that_do_not_fit_are_refused(sizes):
    with pytest.raises(REFUSED):
        id_ops.decode_ids(
            np.zeros(3, np.uint8), np.array(sizes), rank=0, **TABLES
        )


@pytest.mark.parametrize(
    "splits,weights,text",
    [
        ([0, 3], 0, "from 0 to the number of ids"),
        ([1, 2], 0, "from 0 to the number of ids"),
        ([0, 3, 1, 2], 0, "from 0 to the number of ids"),
        ([], 0, "one element more"),
        ([0, 2], 1, "weights must be empty or one per id"),
    ],
)
def test_malformed_lists_are_refused(splits, weights, text):
    inputs = (
        [np.array([1, 2])],
        [np.array(splits, np.int64)],
        [np.ones(weights, np.float32)],
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match=text):
        id_ops.merge_ids(*inputs, vocabulary_size=5)
    with pytest.raises(tf.errors.InvalidArgumentError, match=text):
        encode_one(*inputs)


def encode_one(*inputs, **options):
    attributes = {
        "placements": [FeaturePlacement("emb", 5, 8, 2, 1, (0, 1))],
        "rank": 0,
        "world_size": 2,
        "list_features": [0],
        "out_of_range": ["error"],
        "unique": [False],
    }
    return id_ops.encode_ids(*inputs, 1.0, **(attributes | options))


@pytest.mark.parametrize(
    "options,text",
    [
        ({"rank": 2}, "rank must be .*Received: 2"),
        ({"list_features": [1]}, "list_features"),
        ({"list_features": []}, "list_features"),
        ({"out_of_range": []}, "element per feature"),
        ({"unique": []}, "element per feature"),
    ],
)
def test_malformed_attributes_are_refused(options, text):
    inputs = [np.array([1])], [np.array([0, 1])], [np.zeros(0, np.float32)]
    with pytest.raises(tf.errors.InvalidArgumentError, match=text):
        encode_one(*inputs, **options)


def test_bytes_left_over_are_refused():
    rng = np.random.default_rng(0)
    good = [message(rng, rank=rank) for rank in (0, 1)]
    with pytest.raises(tf.errors.InvalidArgumentError, match="3 bytes of pay"):
        id_ops.decode_ids(
            np.concatenate([*good, np.zeros(3, np.uint8)]),
            np.array([len(each) for each in good]),
            rank=0,
            **TABLES,
        )


@pytest.mark.parametrize("matrix", ["ids", "row_splits", "weights"])
def test_lists_of_other_shapes_are_refused(matrix):
    """Vectors they are, also where a matrix has the right numbers."""
    given = {
        "ids": np.array([1, 2]),
        "row_splits": np.array([0, 2]),
        "weights": np.ones([2], np.float32),
    }
    given[matrix] = given[matrix][:, None]
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"vectors.*,1\]"):
        id_ops.encode_ids(
            *([given[name]] for name in given),
            1.0,
            rank=0,
            list_features=[0],
            out_of_range=["error"],
            unique=[False],
            placements=PLACEMENTS[:1],
            world_size=2,
        )
