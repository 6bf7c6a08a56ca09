# SPDX-License-Identifier: Apache-2.0
"""A lossless, shorter form of numbers for the wire."""

from __future__ import annotations

import tensorflow as tf

from tfdist_ext.ops.library import library


def pack_numbers(
    values: tf.Tensor, splits: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Packs numbers for several receivers, without loss.

    Numbers of similar size share the upper bits of their exponents: 32 bits
    become about 27, 16 bits of bfloat16 about 11 (see `number_codec.h`).

    Args:
        values: float32, bfloat16 or float16 `[n]`, receiver by receiver.
        splits: int64 `[receivers]`, how many numbers each gets.

    Returns:
        uint8 `[m]`, the messages, and int64 `[receivers]`, their bytes.

    Raises:
        tf.errors.InvalidArgumentError: if splits do not add up.
    """
    payload, byte_splits = library().tfdist_pack_numbers(values, splits)
    return payload, byte_splits


def unpack_numbers(
    payload: tf.Tensor, byte_splits: tf.Tensor, dtype: tf.DType
) -> tuple[tf.Tensor, tf.Tensor]:
    """The inverse of `pack_numbers`.

    Args:
        payload: uint8 `[m]`, messages of several senders.
        byte_splits: int64 `[senders]`, their bytes.
        dtype: of the numbers.

    Returns:
        `[n]` of `dtype`, bit for bit what was packed, and int64 `[senders]`,
        how many came from each.

    Raises:
        tf.errors.DataLossError: malformed bytes.
    """
    values, splits = library().tfdist_unpack_numbers(
        payload, byte_splits, T=dtype
    )
    return values, splits
