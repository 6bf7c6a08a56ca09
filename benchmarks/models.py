# SPDX-License-Identifier: Apache-2.0
"""The Keras model that every variant trains; only its sparse layers differ."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from benchmarks import workloads

# Sums of 100 rows stay near zero, and updates are large against the rounding
# of the rows, so that a wrong update shows.
INITIAL_RANGE = 1e-2

# Hidden units start active: rounding on the wire (16 bits) then changes a
# gradient a little, instead of switching a unit near zero on or off.
_INITIAL_BIAS = 0.5

# (table, its index) -> a built layer.
SparseLayerFactory = Callable[[workloads.Table, int], tf.keras.layers.Layer]


def row_initializer(seed: int) -> tf.keras.initializers.Initializer:
    """Initializer of a table; small, and different in every row."""
    return tf.keras.initializers.RandomUniform(
        -INITIAL_RANGE, INITIAL_RANGE, seed=seed
    )


class SparseTower(tf.keras.Model):
    """Sparse layers, their results concatenated, then dense layers."""

    def __init__(
        self, workload: workloads.Workload, make_layer: SparseLayerFactory
    ):
        super().__init__()
        self.sparse_layers = [
            make_layer(table, index)
            for index, table in enumerate(workload.tables)
        ]
        self.concatenate = tf.keras.layers.Concatenate()
        self.tower = tf.keras.Sequential(
            [
                tf.keras.Input((workload.pooled_width,)),
                *(
                    tf.keras.layers.Dense(
                        width,
                        activation="relu",
                        kernel_initializer=_dense_initializer(index),
                        bias_initializer=_bias_initializer(),
                    )
                    for index, width in enumerate(workload.hidden)
                ),
                tf.keras.layers.Dense(
                    1, kernel_initializer=_dense_initializer(100)
                ),
            ]
        )

    def build(self, input_shape: Any = None) -> None:
        """Every layer is built already: the sparse ones by their factory."""
        del input_shape
        self.built = True

    def call(self, inputs: tuple[Any, ...]) -> tf.Tensor:
        """Maps per-table inputs to logits, float32 `[batch_size, 1]`."""
        pooled = [
            layer(feature)
            for layer, feature in zip(self.sparse_layers, inputs, strict=True)
        ]
        if len(pooled) == 1:
            return self.tower(pooled[0])
        return self.tower(self.concatenate(pooled))


def _bias_initializer() -> tf.keras.initializers.Initializer:
    return tf.keras.initializers.Constant(_INITIAL_BIAS)


def _dense_initializer(seed: int) -> tf.keras.initializers.Initializer:
    return tf.keras.initializers.GlorotUniform(seed=seed)
