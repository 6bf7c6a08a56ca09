# SPDX-License-Identifier: Apache-2.0
"""Rounding to 16 bits against stock TensorFlow, and its mean."""

import numpy as np
import pytest
import tensorflow as tf

from tests.reference import wire as reference_wire
from tfdist_ext.ops import id_ops

DTYPES = [tf.bfloat16, tf.float16]
SPECIAL = np.array(
    [0.0, -0.0, 1.0, -2.0, np.inf, -np.inf, np.nan, 1e38, -1e38, 65504, 65536],
    np.float32,
)


def numbers(count=4000, seed=0):
    """Of all magnitudes that matter, both signs, and special ones."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=count) * 2.0 ** rng.integers(-40, 20, count)
    return np.concatenate([x.astype(np.float32), SPECIAL])


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", [*DTYPES, tf.float32])
@pytest.mark.parametrize("seed", [0, 7, -1, 2**62])
def test_same_as_twin(seed, dtype, rounding):
    x = tf.constant(numbers())
    options = {"rounding": rounding, "seed": tf.constant(seed, tf.int64)}
    upstream = tf.cast(tf.random.stateless_normal(x.shape, [1, 2]), dtype)

    def there(module):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = module.to_wire(x, dtype, **options)
        return y, tape.gradient(y, x, upstream)

    def back(module):
        y = tf.cast(x, dtype)
        with tf.GradientTape() as tape:
            tape.watch(y)
            z = module.from_wire(y, **options)
        return z, tape.gradient(z, y, x)

    for way in (there, back):
        for mine, twin in zip(
            tf.function(way)(id_ops), way(reference_wire), strict=True
        ):
            assert mine.dtype == twin.dtype
            np.testing.assert_array_equal(
                tf.cast(mine, tf.float32), tf.cast(twin, tf.float32)
            )


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_numbers(dtype):
    x = tf.constant(np.tile(SPECIAL, 100))
    y = id_ops.to_wire(x, dtype, rounding="stochastic")
    exact = np.isin(SPECIAL, [0, 1, -2, np.inf, -np.inf]) | np.isnan(SPECIAL)
    rows = tf.cast(y, tf.float32).numpy().reshape(100, -1)
    for column in np.flatnonzero(exact):
        np.testing.assert_array_equal(rows[:, column], SPECIAL[column])
    assert np.signbit(rows[0, 1])
    if dtype == tf.float16:
        np.testing.assert_array_equal(
            rows[0, 7:], [np.inf, -np.inf, 65504, np.inf]
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "value", [1.001, -3.14159, 0.1, 1e-3, 3e-5, -2e-6, 2e-8, 1e-9, -1.5e-10]
)
def test_mean_is_the_number(value, dtype):
    count = 1 << 20
    x = tf.fill([count], tf.constant(value, tf.float32))
    y = id_ops.to_wire(x, dtype, rounding="stochastic", seed=3)
    y = tf.cast(y, tf.float64).numpy()
    low, high = np.unique(y)
    exact = np.float64(x[0].numpy())
    assert low < exact < high
    assert high - low <= max(abs(exact) * 2.0**-7, 2.0**-24)
    # The two neighbours are a coin's sides: six standard deviations.
    deviation = np.sqrt((exact - low) * (high - exact) / count)
    assert abs(y.mean() - exact) < 6 * deviation


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_differ_between_elements_and_seeds(dtype):
    x = tf.fill([1 << 16], 1.0 + 2.0**-12)

    def ups(seed):
        y = id_ops.to_wire(x, dtype, rounding="stochastic", seed=seed)
        return (y.numpy() > 1).astype(np.float64)

    np.testing.assert_array_equal(ups(5), ups(5))
    rate = ups(5).mean()
    for seed in (6, 5 + 2**32, -5):
        other = ups(seed)
        noise = 6 * rate / np.sqrt(len(other))
        for shift in range(4):
            both = (ups(5) * np.roll(other, shift)).mean()
            assert abs(both - rate * other.mean()) < noise
    one = ups(5)
    for shift in (1, 2, 16, 1024):
        both = (one * np.roll(one, shift)).mean()
        assert abs(both - rate**2) < 6 * rate / np.sqrt(len(one))


def test_any_number_of_threads_gives_the_same():
    x = np.tile(numbers(), 100)
    y = id_ops.to_wire(x, tf.bfloat16, rounding="stochastic", seed=1)
    first = id_ops.to_wire(x[:5000], tf.bfloat16, rounding="stochastic", seed=1)
    np.testing.assert_array_equal(
        tf.bitcast(y, tf.uint16)[:5000], tf.bitcast(first, tf.uint16)
    )


def test_bad_arguments_are_refused():
    for run in (
        lambda: id_ops.to_wire(tf.ones([2]), tf.float16, rounding="up"),
        lambda: id_ops.from_wire(tf.ones([2]), rounding="up"),
    ):
        with pytest.raises(ValueError, match="rounding='up'"):
            run()
    with pytest.raises(tf.errors.InvalidArgumentError, match="scalar"):
        id_ops.to_wire(
            tf.ones([2]), tf.float16, rounding="stochastic", seed=[1, 2]
        )
