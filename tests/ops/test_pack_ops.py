# SPDX-License-Identifier: Apache-2.0
"""Packed numbers: bit for bit what they were, and shorter."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist_ext.ops import id_ops

DTYPES = [tf.float32, tf.bfloat16, tf.float16]
WORDS = {4: tf.uint32, 2: tf.uint16}


def bits(values):
    return tf.bitcast(values, WORDS[values.dtype.size]).numpy()


def round_trip(values, splits):
    splits = tf.constant(splits, tf.int64)
    payload, byte_splits = id_ops.pack_numbers(values, splits)
    result, counts = id_ops.unpack_numbers(payload, byte_splits, values.dtype)
    np.testing.assert_array_equal(bits(result), bits(values))
    np.testing.assert_array_equal(counts, splits)
    return len(payload)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [[0], [1], [0, 3, 0], [255, 256, 257, 1000]])
def test_normal_numbers(splits, dtype):
    values = np.random.default_rng(1).normal(size=sum(splits))
    round_trip(tf.cast(values, dtype), splits)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kind_of_number(dtype):
    edge = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 3e38, -6e4, 6e-8, 1.0]
    values = np.random.default_rng(2).choice(edge, 700).astype(np.float32)
    round_trip(tf.cast(values, dtype), [300, 400])
    words = np.random.default_rng(3).integers(0, 2 ** (8 * dtype.size), 999)
    word = WORDS[dtype.size]
    random = tf.bitcast(tf.constant(words.astype(word.as_numpy_dtype)), dtype)
    round_trip(random, [333, 666])


@pytest.mark.parametrize(
    "dtype,most", [(tf.float32, 27.3), (tf.bfloat16, 11.3)]
)
def test_numbers_of_similar_size_become_shorter(dtype, most):
    values = np.random.default_rng(4).normal(size=20000) * 1e-3
    size = round_trip(tf.cast(values, dtype), [5000] * 4)
    assert size * 8 / 20000 < most
    zeros = round_trip(tf.zeros([4096], dtype), [4096])
    assert zeros < 4096 * dtype.size


def test_wrong_splits_are_refused():
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"left|over"):
        id_ops.pack_numbers(tf.zeros([4]), tf.constant([1, 2], tf.int64))
    with pytest.raises(tf.errors.InvalidArgumentError, match="are left"):
        id_ops.pack_numbers(tf.zeros([4]), tf.constant([9], tf.int64))
    none = tf.zeros([0], tf.int64)
    with pytest.raises(tf.errors.InvalidArgumentError, match="every rank"):
        id_ops.pack_numbers(tf.zeros([0]), none)
    with pytest.raises(tf.errors.InvalidArgumentError, match="every rank"):
        id_ops.unpack_numbers(tf.zeros([0], tf.uint8), none, tf.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_malformed_bytes_are_refused(dtype):
    rng = np.random.default_rng(5)
    values = tf.cast(rng.normal(size=600), dtype)
    payload, sizes = id_ops.pack_numbers(values, tf.constant([600], tf.int64))
    whole = payload.numpy()
    refused = 0
    for trial in range(300):
        broken = (
            whole[: rng.integers(0, len(whole))]
            if trial % 2
            else (np.where(rng.random(len(whole)) < 0.02, 255 - whole, whole))
        )
        try:
            found, _ = id_ops.unpack_numbers(
                tf.constant(broken), tf.constant([len(broken)], tf.int64), dtype
            )
            assert len(found) <= len(whole)
        except tf.errors.DataLossError as error:
            assert "rank 0" in error.message
            refused += 1
    assert refused > 150
    with pytest.raises(tf.errors.InvalidArgumentError):
        id_ops.unpack_numbers(payload, sizes + 1, dtype)


def test_in_a_graph_as_many_splits_come_as_go():
    @tf.function(input_signature=[tf.TensorSpec([None])])
    def through(values):
        splits = tf.constant([2, 1], tf.int64)
        payload, sizes = id_ops.pack_numbers(values, splits)
        assert payload.shape.rank == 1 and sizes.shape == [2]
        values, splits = id_ops.unpack_numbers(payload, sizes, tf.float32)
        assert values.shape.rank == 1 and splits.shape == [2]
        return values

    np.testing.assert_array_equal(through([1.0, 2.0, 3.0]), [1, 2, 3])
