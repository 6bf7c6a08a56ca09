# SPDX-License-Identifier: Apache-2.0
"""Numbers in 8 bits: errors within bounds, means exact, damage refused."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tests import fuzzing
from tfdist_ext.ops import id_ops

BLOCK = 64


def round_trip(values, splits=None, **options):
    splits = tf.constant(splits or [len(values)], tf.int64)
    payload, sizes = id_ops.encode_int8(
        tf.constant(values, tf.float32), splits, **options
    )
    found, counts = id_ops.decode_int8(payload, sizes)
    np.testing.assert_array_equal(counts, splits)
    return found.numpy()


def scales(values):
    """The scale of each number, by the blocks of one receiver."""
    blocks = [
        values[i : i + BLOCK].astype(np.float64)
        for i in range(0, len(values), BLOCK)
    ]
    return np.concatenate([np.full(len(b), abs(b).max()) for b in blocks]) / 127


def numbers(count, seed=0):
    """Blocks whose magnitudes differ by powers of ten."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=count) * 10.0 ** rng.integers(-20, 20)
    return values.astype(np.float32)


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 128, 1000, 30_000])
@pytest.mark.parametrize(
    ("rounding", "bound"), [("nearest", 0.5), ("stochastic", 1.0)]
)
def test_errors_are_within_the_stated_bounds(count, rounding, bound):
    for seed in range(5):
        values = numbers(count, seed)
        found = round_trip(values, rounding=rounding, seed=seed)
        error = np.abs(found.astype(np.float64) - values) / scales(values)
        assert error.max() <= bound * (1 + 1e-5), error.max()
    if count > 1000:  # Most of the bound is used, so it is not a loose one.
        assert error.max() > 0.95 * bound


@pytest.mark.parametrize("splits", [[0], [0, 7, 0], [64, 65, 1, 300]])
def test_receivers_have_blocks_of_their_own(splits):
    values = numbers(sum(splits), 3)
    bounds = np.cumsum([0, *splits])
    alone = [round_trip(values[a:b]) for a, b in itertools.pairwise(bounds)]
    np.testing.assert_array_equal(
        round_trip(values, splits), np.concatenate(alone)
    )


def test_bytes_are_those_that_plans_count():
    payload, sizes = id_ops.encode_int8(
        tf.zeros([6400]), tf.constant([640, 5760], tf.int64)
    )
    np.testing.assert_array_equal(sizes, [680, 6120])
    assert len(payload) == 6400 * id_ops.INT8_BYTES


def test_random_rounding_is_unbiased():
    """Deviations of the mean of many seeds, for numbers between two codes."""
    values = np.linspace(-1.0, 1.0, BLOCK).astype(np.float32)
    count = 4000
    found = np.array(
        [
            round_trip(values, rounding="stochastic", seed=s)
            for s in range(count)
        ]
    ).astype(np.float64)
    steps = values.astype(np.float64) * 127
    part = steps - np.floor(steps)
    deviation = np.sqrt(part * (1 - part) / count) / 127
    error = np.abs(found.mean(axis=0) - values)
    assert (error <= 5 * deviation + 1e-7).all()
    nearest = round_trip(values)
    assert np.abs(nearest - values).max() > 15 * error.max()
    # Numbers of a block do not round alike.
    up = found > values
    together = np.corrcoef(up[:, [5, 6, 20, 40]].T)
    assert np.abs(together - np.eye(4)).max() < 0.1


def test_equal_seeds_round_equally():
    values = numbers(1000)
    first, second, other = (
        round_trip(values, rounding="stochastic", seed=seed)
        for seed in (5, 5, 6)
    )
    np.testing.assert_array_equal(first, second)
    assert (first != other).any()


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_numbers_that_are_not_finite_become_nan_alone(rounding):
    values = numbers(3 * BLOCK, 1)
    wrong = [0, 70, 71, 191]
    with_wrong = values.copy()
    with_wrong[wrong] = [np.nan, np.inf, -np.inf, -np.nan]
    found = round_trip(with_wrong, rounding=rounding, seed=3)
    assert np.isnan(found[wrong]).all()
    rest = np.delete(np.arange(len(values)), wrong)
    error = np.abs(found - values)[rest] / scales(values)[rest]
    assert error.max() <= 1 + 1e-5
    nothing = round_trip(np.full(BLOCK, np.nan, np.float32))
    assert np.isnan(nothing).all()


def test_smallest_and_largest_numbers():
    for value in (0.0, -0.0, 1e-45, 1e-38, -1.4e-36):
        np.testing.assert_array_equal(round_trip([value] * 3), [0.0] * 3)
    largest = np.finfo(np.float32).max
    for value in (2e-36, 1.0, largest):
        values = np.array([value, -value, value / 2], np.float32)
        found = round_trip(values)
        assert np.isfinite(found).all()
        np.testing.assert_allclose(found, values, rtol=8e-3)


def test_wrong_sizes_are_refused():
    def encode(count, splits):
        id_ops.encode_int8(tf.zeros([count]), tf.constant(splits, tf.int64))

    for count, splits in ((4, [1, 2]), (4, [9]), (4, [-1, 5]), (0, [])):
        with pytest.raises(tf.errors.InvalidArgumentError):
            encode(count, splits)
    for size in (1, 4, BLOCK + 5, BLOCK + 8):  # A scale without numbers.
        with pytest.raises(tf.errors.DataLossError, match=r"rank 1 .*bytes"):
            id_ops.decode_int8(
                tf.zeros([5 + size], tf.uint8), tf.constant([5, size], tf.int64)
            )
    with pytest.raises(tf.errors.InvalidArgumentError):
        id_ops.decode_int8(tf.zeros([5], tf.uint8), tf.constant([6], tf.int64))


@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0, 1e37])
def test_wrong_scales_are_refused(scale):
    message = np.zeros([2 * (BLOCK + 4)], np.uint8)
    message[BLOCK + 4 : BLOCK + 8] = np.frombuffer(
        np.float32(scale).tobytes(), np.uint8
    )
    with pytest.raises(tf.errors.DataLossError, match=r"rank 0 .*scale"):
        id_ops.decode_int8(
            tf.constant(message), tf.constant([len(message)], tf.int64)
        )


def test_damaged_bytes_are_read_within_bounds_or_refused():
    rng = np.random.default_rng(7)
    payload, _ = id_ops.encode_int8(
        tf.constant(numbers(600)), tf.constant([600], tf.int64)
    )
    whole, refused = payload.numpy(), 0
    trials = fuzzing.inputs(400, parts=1)
    for trial in range(trials):
        broken = whole[: rng.integers(0, len(whole))]
        if trial % 2:
            damage = rng.integers(0, 256, len(whole), np.uint8)
            broken = np.where(rng.random(len(whole)) < 0.05, damage, whole)
        size = tf.constant([len(broken)], tf.int64)
        try:
            found, counts = id_ops.decode_int8(tf.constant(broken), size)
            assert len(found) == counts.numpy()[0] <= len(broken)
            limit = np.finfo(np.float32).max
            assert not (np.abs(found.numpy()) > limit).any()
        except tf.errors.DataLossError as error:
            assert "rank 0" in error.message
            refused += 1
    assert refused > trials / 20


def test_in_a_graph_as_many_splits_come_as_go():
    @tf.function(input_signature=[tf.TensorSpec([None])])
    def through(values):
        splits = tf.constant([2, 1], tf.int64)
        payload, sizes = id_ops.encode_int8(values, splits)
        assert payload.shape.rank == 1 and sizes.shape == [2]
        values, splits = id_ops.decode_int8(payload, sizes)
        assert values.shape.rank == 1 and splits.shape == [2]
        return values

    np.testing.assert_allclose(through([127.0, 2.0, 3.0]), [127, 2, 3], 1e-6)
