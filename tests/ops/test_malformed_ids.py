# SPDX-License-Identifier: Apache-2.0
"""Malformed inputs are refused.

Messages come from the network: any bytes decode in bounds or are refused.
"""

import numpy as np
import pytest
import tensorflow as tf

from tfdist_ext.ops import embedding_ops

LIMIT = 1000
REFUSED = (tf.errors.DataLossError, tf.errors.InvalidArgumentError)


def message(rng, weighted=False, rank=0, samples=20):
    splits = np.concatenate([[0], np.cumsum(rng.integers(0, 9, samples))])
    ids = rng.integers(0, LIMIT, splits[-1])
    weights = rng.normal(size=len(ids) * weighted).astype(np.float32)
    outputs = embedding_ops.encode_ids(
        [ids],
        [splits],
        [weights],
        3.0,
        rank=rank,
        world_size=2,
        vocabulary_size=LIMIT,
        placement="column",
    )
    return outputs[0].numpy()


def decode(*messages):
    return embedding_ops.decode_ids(
        np.concatenate(messages),
        np.array([len(each) for each in messages]),
        rank=0,
        world_size=2,
        vocabulary_size=LIMIT,
        placement="column",
        layer="emb",
    )


def check_decoded(outputs):
    """What was accepted must be usable without further checks."""
    row_splits, rows, weights, sample_splits, _ = (x.numpy() for x in outputs)
    assert row_splits[0] == 0 and row_splits[-1] == len(rows)
    assert (np.diff(row_splits) > 0).all()
    assert sample_splits.sum() == len(row_splits) - 1
    assert ((rows >= 0) & (rows < LIMIT)).all()
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
        result[rng.integers(min(len(result), 24))] = rng.integers(256)
        return result
    if kind == 3:
        return rng.integers(0, 256, rng.integers(0, 60), np.uint8)
    for _ in range(rng.integers(1, 4)):
        result[rng.integers(len(result))] ^= 1 << rng.integers(8)
    return result


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_changed_bytes(seed, weighted):
    rng = np.random.default_rng(seed)
    refused = 0
    for _ in range(300):
        good = message(rng, weighted)
        other = message(rng, rng.integers(2) == 1, rank=1)
        try:
            check_decoded(decode(changed(rng, good), other))
        except REFUSED as error:
            assert "emb" in error.message
            refused += 1
    assert refused > 100


def test_valid_messages_are_accepted():
    rng = np.random.default_rng(0)
    check_decoded(decode(message(rng), message(rng, rank=1)))


def test_every_truncation_is_refused():
    rng = np.random.default_rng(0)
    for weighted in (False, True):
        whole, other = message(rng, weighted), message(rng, rank=1)
        for size in range(len(whole)):
            with pytest.raises(tf.errors.DataLossError, match="rank 0 sent"):
                decode(whole[:size], other)


def test_claimed_sizes_do_not_allocate():
    # A header of 2^40 entries in a message of a few bytes.
    rng = np.random.default_rng(0)
    good = message(rng)
    huge = [good[0] & 0x0F, 0, 0, 0, 0, 0, *[0xFF] * 5, 0x7F, 1, 63, 1, 0]
    with pytest.raises(tf.errors.DataLossError, match="ends before"):
        decode(np.array(huge, np.uint8), message(rng, rank=1))


def test_misrouted_message_is_refused():
    rng = np.random.default_rng(0)
    with pytest.raises(tf.errors.DataLossError, match="another rank"):
        decode(message(rng, rank=1), message(rng, rank=1))


@pytest.mark.parametrize("sizes", [[-1, 1], [5, 5], [1, 1], [10**15, 0], [1]])
def test_splits_that_do_not_fit_are_refused(sizes):
    with pytest.raises(REFUSED):
        embedding_ops.decode_ids(
            np.zeros(3, np.uint8),
            np.array(sizes),
            rank=0,
            world_size=2,
            vocabulary_size=LIMIT,
            placement="row",
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
        embedding_ops.merge_ids(*inputs, vocabulary_size=5)
    with pytest.raises(tf.errors.InvalidArgumentError, match=text):
        embedding_ops.encode_ids(
            *inputs,
            1.0,
            rank=0,
            world_size=2,
            vocabulary_size=5,
            placement="row",
        )
