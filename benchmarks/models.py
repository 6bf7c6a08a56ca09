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
    """Sparse layers and the workload's head (`workloads.Head`) on top."""

    def __init__(
        self,
        workload: workloads.Workload,
        make_layer: SparseLayerFactory,
        join: Callable[[list[Any]], Any] | None = None,
    ):
        """`join` makes one layer, on a list of inputs, of the sparse ones."""
        super().__init__()
        self.head = workload.head
        self.sparse_layers = [
            make_layer(table, index)
            for index, table in enumerate(workload.tables)
        ]
        self.joined = join(self.sparse_layers) if join else None
        self.concatenate = tf.keras.layers.Concatenate()
        self.towers = [
            _make_tower(layers, 10 * index, self.head == "tower")
            for index, layers in enumerate(workload.layers)
        ]
        self.bias = None
        if self.head == "linear":
            self.bias = self.add_weight(
                shape=(1,), initializer=_bias_initializer(), name="bias"
            )

    def build(self, input_shape: Any = None) -> None:
        """Every layer is built already: the sparse ones by their factory."""
        del input_shape
        self.built = True

    @property
    def dense_variables(self) -> list[Any]:
        """Kernels and biases of the towers in order, or the head's bias."""
        towers = [v for t in self.towers for v in t.trainable_variables]
        return towers if self.bias is None else [self.bias]

    def call(self, inputs: tuple[Any, ...]) -> tf.Tensor:
        """Maps per-table inputs to logits, float32 `[batch_size, 1]`."""
        pooled = self._lookup(inputs)
        if self.head == "linear":
            return tf.add_n(pooled) + tf.convert_to_tensor(self.bias)
        if self.head == "dot":
            pair = [t(x) for t, x in zip(self.towers, pooled, strict=True)]
            return tf.reduce_sum(pair[0] * pair[1], axis=1, keepdims=True)
        if len(pooled) == 1:
            return self.towers[0](pooled[0])
        return self.towers[0](self.concatenate(pooled))

    def _lookup(self, inputs: tuple[Any, ...]) -> list[tf.Tensor]:
        if self.joined is not None:
            return self.joined(inputs)
        return [
            layer(feature)
            for layer, feature in zip(self.sparse_layers, inputs, strict=True)
        ]


def _make_tower(
    layers: tuple[tuple[int, int], ...], seed: int, logit: bool
) -> tf.keras.Sequential:
    """Dense layers; all but the last, or the `logit`, end in a ReLU."""
    tower = [tf.keras.Input((layers[0][0],))]
    for index, (_, width) in enumerate(layers):
        last = index == len(layers) - 1
        bias = "zeros" if last and logit else _bias_initializer()
        tower.append(
            tf.keras.layers.Dense(
                width,
                activation=None if last else "relu",
                kernel_initializer=_dense_initializer(seed + index),
                bias_initializer=bias,
            )
        )
    return tf.keras.Sequential(tower)


def _bias_initializer() -> tf.keras.initializers.Initializer:
    return tf.keras.initializers.Constant(_INITIAL_BIAS)


def _dense_initializer(seed: int) -> tf.keras.initializers.Initializer:
    return tf.keras.initializers.GlorotUniform(seed=seed)
