# SPDX-License-Identifier: Apache-2.0
"""Philox 4x32 with 10 rounds, made of stock TensorFlow ops."""

from __future__ import annotations

import tensorflow as tf

_MASK = 0xFFFFFFFF


def bits(seed: tf.Tensor, ids: tf.Tensor, columns: tf.Tensor) -> tf.Tensor:
    """32 random bits for every element of a table.

    Args:
        seed: int64 scalar.
        ids: int64 `[n, 1]`, rows of the table.
        columns: int64 `[1, m]`.

    Returns:
        int64 `[n, m]`: of the four words that Philox draws for (id, column //
        4), the one that column mod 4 tells.
    """
    zero = tf.zeros_like(ids + columns)
    x = [_low(ids), _high(ids), _low(columns // 4), _high(columns // 4)]
    x = [word + zero for word in x]
    k0, k1 = _low(seed), _high(seed)
    for _ in range(10):
        first, second = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [
            tf.bitwise.bitwise_xor(_high(second), _xor(x[1], k0)),
            _low(second),
            tf.bitwise.bitwise_xor(_high(first), _xor(x[3], k1)),
            _low(first),
        ]
        k0, k1 = _low(k0 + 0x9E3779B9), _low(k1 + 0xBB67AE85)
    lane = columns % 4 + zero
    return tf.gather(tf.stack(x, -1), lane, batch_dims=2)


def _xor(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return tf.bitwise.bitwise_xor(x, y + tf.zeros_like(x))


def _low(x: tf.Tensor) -> tf.Tensor:
    return tf.bitwise.bitwise_and(x, tf.constant(_MASK, tf.int64))


def _high(x: tf.Tensor) -> tf.Tensor:
    return _low(tf.bitwise.right_shift(x, tf.constant(32, tf.int64)))
