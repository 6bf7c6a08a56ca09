# SPDX-License-Identifier: Apache-2.0
"""Rounding of float32 to bfloat16, made of stock TensorFlow ops."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def to_bfloat16(values: tf.Tensor, rows: tf.Tensor, seed: Any) -> tf.Tensor:
    """Rounds rows of a table to nearest, or at random with a seed.

    Args:
        values: float32 `[n, dim]`.
        rows: integers `[n]`, which rows of the table these are.
        seed: int64 scalar, or None for nearest.

    Returns:
        bfloat16 `[n, dim]`.
    """
    if seed is None:
        return tf.cast(values, tf.bfloat16)
    words = tf.bitcast(values, tf.uint32)
    columns = tf.range(tf.shape(values)[1])
    noise = _column_bits(_row_bits(seed, rows)[:, tf.newaxis], columns)
    special = tf.logical_not(tf.math.is_finite(values))
    words = tf.where(special, words, words + noise)
    # What is left is a bfloat16 exactly; casting NaN may change its sign.
    kept = tf.bitwise.bitwise_and(words, tf.constant(0xFFFF0000, tf.uint32))
    cut = tf.cast(tf.bitcast(kept, tf.float32), tf.bfloat16)
    return tf.where(special, tf.cast(values, tf.bfloat16), cut)


def _row_bits(seed: Any, rows: tf.Tensor) -> tf.Tensor:
    seed = tf.bitcast(tf.cast(seed, tf.int64), tf.uint64)
    x = seed * _word(0x9E3779B97F4A7C15)
    x += tf.bitcast(tf.cast(rows, tf.int64), tf.uint64)
    x = _fold(x, 30) * _word(0xBF58476D1CE4E5B9)
    x = _fold(x, 27) * _word(0x94D049BB133111EB)
    return tf.cast(
        tf.bitwise.bitwise_and(_fold(x, 31), _word(0xFFFFFFFF)), tf.uint32
    )


def _column_bits(row_bits: tf.Tensor, columns: tf.Tensor) -> tf.Tensor:
    x = tf.cast(columns + 1, tf.uint32) * _word(0x9E3779B9, tf.uint32)
    x = _fold(x + row_bits, 16) * _word(0x85EBCA6B, tf.uint32)
    x = _fold(x, 13) * _word(0xC2B2AE35, tf.uint32)
    return tf.bitwise.right_shift(x, _word(16, tf.uint32))


def _fold(x: tf.Tensor, shift: int) -> tf.Tensor:
    return tf.bitwise.bitwise_xor(
        x, tf.bitwise.right_shift(x, tf.constant(shift, x.dtype))
    )


def _word(value: int, dtype: tf.DType = tf.uint64) -> tf.Tensor:
    return tf.constant(value, dtype)
