# SPDX-License-Identifier: Apache-2.0
"""The hashes of custom_ops/vocabulary/key_table.h in stock ops."""

from __future__ import annotations

import tensorflow as tf

_LENGTH_SHIFT = 56


def sip_hash(words: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
    """SipHash-1-3 of whole words, uint64 `[n]`.

    Args:
        words: uint64 `[n, words]`.
        key: uint64 `[2]`.
    """
    a = key[0] ^ _number(0x736F6D6570736575)
    b = key[1] ^ _number(0x646F72616E646F6D)
    c = key[0] ^ _number(0x6C7967656E657261)
    d = key[1] ^ _number(0x7465646279746573)
    length = _number(8 * words.shape[1] << _LENGTH_SHIFT)
    for word in (*tf.unstack(words, axis=1), length):
        a, b, c, d = _round(a, b, c, d ^ word)
        a ^= word
    c ^= _number(0xFF)
    for _ in range(3):
        a, b, c, d = _round(a, b, c, d)
    return a ^ b ^ c ^ d


def without_secret(words: tf.Tensor) -> tf.Tensor:
    """The hash of vocabularies of earlier versions, uint64 `[n]`.

    Args:
        words: uint64 `[n, words]`.
    """
    x = words[:, 0]
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53, 1):
        x = (x ^ tf.bitwise.right_shift(x, _number(33))) * _number(factor)
    return x


def _round(
    a: tf.Tensor, b: tf.Tensor, c: tf.Tensor, d: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    a += b
    b = _rotated(b, 13) ^ a
    a = _rotated(a, 32)
    c += d
    d = _rotated(d, 16) ^ c
    a += d
    d = _rotated(d, 21) ^ a
    c += b
    b = _rotated(b, 17) ^ c
    return a, b, _rotated(c, 32), d


def _rotated(x: tf.Tensor, bits: int) -> tf.Tensor:
    upper = tf.bitwise.left_shift(x, _number(bits))
    return upper | tf.bitwise.right_shift(x, _number(64 - bits))


def _number(value: int) -> tf.Tensor:
    return tf.constant(value, tf.uint64)
