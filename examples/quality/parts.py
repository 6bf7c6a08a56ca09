# SPDX-License-Identifier: Apache-2.0
"""What differs between a program with tfdist_ext and one of stock Keras."""

from __future__ import annotations

import contextlib
from typing import Any

import tensorflow as tf

import tfdist_ext

keras = tf.keras


class Parts:
    """Tables, optimizers and the scope.

    Args:
      stock: Whether to use Keras only, in one process.
    """

    def __init__(self, stock: bool) -> None:
        self.strategy = None if stock else tfdist_ext.HybridParallelStrategy()

    @property
    def is_first(self) -> bool:
        """Whether this process prints."""
        return self.strategy is None or self.strategy.rank == 0

    def scope(self) -> Any:
        """Where models are created."""
        if self.strategy is None:
            return contextlib.nullcontext()
        return self.strategy.scope()

    def table(
        self, rows: int, dim: int, stddev: float, seed: int, **options: Any
    ) -> Any:
        """A layer with a table of embeddings.

        Args:
          rows: Rows of the table.
          dim: Columns of the table.
          stddev: Of the initial rows; 0 for zeros.
          seed: Of the initial rows.
          **options: Other arguments of Keras's Embedding.
        """
        start = keras.initializers.RandomNormal(stddev=stddev, seed=seed)
        kind = keras.layers.Embedding
        if self.strategy is not None:
            kind = tfdist_ext.layers.Embedding
            options = {"sharding": "row_wise", **options}
        return kind(rows, dim, embeddings_initializer=start, **options)

    def adam(self, rate: float) -> Any:
        """Adam as Keras defines it: moments of all rows decay in every step."""
        if self.strategy is None:
            return keras.optimizers.Adam(rate)
        return tfdist_ext.optimizers.Adam(rate, lazy=False)
