# SPDX-License-Identifier: Apache-2.0
"""Batches of columns in memory."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def of_columns(
    columns: Any, batch: int, seed: int | None = None
) -> tf.data.Dataset:
    """Batches of the rows of arrays.

    Only their positions are shuffled, and a batch reads its rows at once.

    Args:
      columns: A nest of arrays `[n, ...]`.
      batch: Samples of a batch, over all ranks.
      seed: Of an order that is new in every epoch; None for the given order.
    """
    tensors = tf.nest.map_structure(tf.constant, columns)
    count = len(tf.nest.flatten(columns)[0])
    positions = tf.data.Dataset.range(count)
    if seed is not None:
        positions = positions.shuffle(count, seed=seed)

    def rows(chosen: tf.Tensor) -> Any:
        return tf.nest.map_structure(lambda x: tf.gather(x, chosen), tensors)

    return positions.batch(batch).map(rows).prefetch(2)
