# SPDX-License-Identifier: Apache-2.0
"""The functions of `id_ops.py`, made of stock TensorFlow ops."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist_ext.tables.checks import Rounding

_WORD = 0xFFFFFFFF


def to_wire(
    x: tf.Tensor,
    dtype: tf.DType,
    *,
    rounding: Rounding = "nearest",
    seed: tf.Tensor | int = 0,
) -> tf.Tensor:
    """See `id_ops.to_wire`."""
    if rounding == "nearest" or dtype == tf.float32:
        return tf.cast(x, dtype)
    return _to_wire(x, tf.cast(seed, tf.int64), dtype)


def _to_wire(x: tf.Tensor, seed: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    @tf.custom_gradient
    def run(x: tf.Tensor, seed: tf.Tensor) -> Any:
        def grad(upstream: tf.Tensor) -> tuple[tf.Tensor, None]:
            return tf.cast(upstream, tf.float32), None

        indices = tf.reshape(tf.range(tf.size(x, tf.int64)), tf.shape(x))
        rounded = _round(x, _random_bits(seed, indices), dtype)
        return tf.cast(rounded, dtype), grad

    return run(x, seed)


def from_wire(
    x: tf.Tensor,
    *,
    rounding: Rounding = "nearest",
    seed: tf.Tensor | int = 0,
) -> tf.Tensor:
    """See `id_ops.from_wire`."""
    dtype = x.dtype

    @tf.custom_gradient
    def run(x: tf.Tensor) -> Any:
        def grad(upstream: tf.Tensor) -> tf.Tensor:
            return to_wire(upstream, dtype, rounding=rounding, seed=seed)

        return tf.cast(x, tf.float32), grad

    return run(x)


def _round(x: tf.Tensor, random: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Rounds to a float32 that is a number of `dtype`.

    The lower bits of a float32, those that are cut off, count steps towards
    the next number of `dtype`. Adding as many random bits carries as often as
    it should.
    """
    bits = tf.cast(tf.bitcast(x, tf.int32), tf.int64) & _WORD
    cut = 0xFFFF if dtype == tf.bfloat16 else 0x1FFF
    carried = (bits + (random & cut)) & (_WORD ^ cut)
    # As int32: bits above 2^31 are negative numbers.
    signed = tf.where(carried >= 2**31, carried - 2**32, carried)
    rounded = tf.bitcast(tf.cast(signed, tf.int32), tf.float32)
    if dtype == tf.float16:
        # Below 2^-14 the numbers of float16 are 2^-24 apart.
        steps = tf.abs(x) * 2.0**24
        fraction = tf.cast(_shift(random, 9), tf.float32) * 2.0**-23 + 2.0**-24
        whole = tf.floor(steps)
        up = tf.cast(fraction < steps - whole, tf.float32)
        subnormal = tf.sign(x) * (whole + up) * 2.0**-24
        rounded = tf.where(tf.abs(x) < 2.0**-14, subnormal, rounded)
    return tf.where(tf.math.is_finite(x), rounded, x)


def _random_bits(seed: tf.Tensor, indices: tf.Tensor) -> tf.Tensor:
    """32 bits of a hash of the seed and each index, as int64."""
    key = seed + _signed(0x9E3779B97F4A7C15)
    key = (key ^ _shift(key, 30)) * _signed(0xBF58476D1CE4E5B9)
    key = (key ^ _shift(key, 27)) * _signed(0x94D049BB133111EB)
    key = key ^ _shift(key, 31)
    x = (indices ^ key) & _WORD
    x = ((x ^ _shift(x, 16)) * 0x7FEB352D) & _WORD
    x = (x + _shift(key, 32)) & _WORD
    x = ((x ^ _shift(x, 15)) * 0x846CA68B) & _WORD
    return x ^ _shift(x, 16)


def _signed(word: int) -> tf.Tensor:
    return tf.constant(word - 2**64, tf.int64)


def _shift(x: tf.Tensor, bits: int) -> tf.Tensor:
    """Right, filled up with zeros."""
    shifted = tf.bitwise.right_shift(x, tf.constant(bits, tf.int64))
    return shifted & tf.constant(2 ** (64 - bits) - 1, tf.int64)
