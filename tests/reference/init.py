# SPDX-License-Identifier: Apache-2.0
"""The function of `lookup_ops.py`, made of stock TensorFlow ops."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tests.reference import ids as reference_ids
from tests.reference import random as reference_random

_TAIL = 0.022750131948179195  # P(X < -2) of a standard normal variable X


def init_rows(
    *,
    rows: int,
    row_part: int,
    row_parts: int,
    local_rows: int,
    first_column: int,
    local_dim: int,
    seed: Any,
    distribution: str,
    a: float = 0.0,
    b: float = 0.0,
) -> tf.Tensor:
    """See `lookup_ops.init_rows`."""
    ids = tf.range(rows, dtype=tf.int64)
    columns = tf.range(first_column, first_column + local_dim, dtype=tf.int64)
    bits = reference_random.bits(
        tf.cast(seed, tf.int64), ids[:, None], columns[None]
    )
    uniform = (tf.cast(bits, tf.float64) + 0.5) / 2.0**32
    table = {
        "zeros": lambda: tf.zeros_like(uniform),
        "constant": lambda: tf.fill(uniform.shape, tf.cast(a, tf.float64)),
        "uniform": lambda: a + (b - a) * uniform,
        "normal": lambda: a + b * tf.math.ndtri(uniform),
        "truncated_normal": lambda: (
            a + b * tf.math.ndtri(_TAIL + (1 - 2 * _TAIL) * uniform)
        ),
    }[distribution]()
    mine = tf.boolean_mask(
        table, reference_ids.owner_of(ids, row_parts) == row_part
    )
    mine = tf.cast(mine, tf.float32)[:local_rows]
    return tf.pad(mine, [[0, local_rows - mine.shape[0]], [0, 0]])
