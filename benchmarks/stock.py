# SPDX-License-Identifier: Apache-2.0
"""What a TensorFlow user has today: stock layers and strategies."""

from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks import models
from benchmarks import workloads

_OPTIMIZERS = {
    "sgd": tf.keras.optimizers.SGD,
    "adagrad": tf.keras.optimizers.Adagrad,
}


class StockSparse(tf.keras.layers.Layer):
    """Sums rows of one replicated table per sample, with stock ops.

    With `dense_gradient` the lookup is `sparse_dense_matmul`, whose gradient
    has the table's size; else it is `embedding_lookup_sparse`, whose gradient
    is an IndexedSlices of the touched rows.
    """

    def __init__(
        self, table: workloads.Table, index: int, dense_gradient: bool
    ):
        super().__init__(name=f"table{index}")
        self.dense_gradient = dense_gradient
        self.table = self.add_weight(
            shape=(table.rows, table.width),
            initializer=models.row_initializer(index),
            name="kernel",
        )

    def call(self, inputs: tf.SparseTensor) -> tf.Tensor:
        """Maps a SparseTensor to float32 `[batch_size, width]`."""
        kernel = self.table
        if hasattr(kernel, "value") and not callable(kernel.value):
            kernel = kernel.value  # Keras 3 wraps the tf.Variable.
        if self.dense_gradient:
            return tf.sparse.sparse_dense_matmul(inputs, kernel)
        return tf.nn.embedding_lookup_sparse(
            kernel, inputs, None, combiner="sum"
        )


class StockVariant:
    """MultiWorkerMirroredStrategy; every rank holds every table."""

    def __init__(self, options: dict[str, Any], ranks: int):
        self.options = options
        self.dense_gradient = options["gradient"] == "dense"
        self.strategy = tf.distribute.get_strategy()
        if ranks > 1:
            self.strategy = tf.distribute.MultiWorkerMirroredStrategy()

    def make_model(self, workload: workloads.Workload) -> models.SparseTower:
        """Builds the model; call inside the strategy's scope."""
        return models.SparseTower(
            workload,
            lambda table, index: StockSparse(table, index, self.dense_gradient),
        )

    def make_optimizer(self) -> tf.keras.optimizers.Optimizer:
        """Makes Keras's own optimizer."""
        return _OPTIMIZERS[self.options["optimizer"]](
            learning_rate=self.options["learning_rate"]
        )

    def exact_lookup(
        self, layer: tf.keras.layers.Layer, feature: tf.SparseTensor
    ) -> tf.Tensor:
        """Calls a sparse layer; nothing rounds its results."""
        return layer(feature)

    def make_feature(
        self, ids: np.ndarray, table: workloads.Table
    ) -> tf.SparseTensor:
        """Turns ids `[n, hotness]` into what the sparse layer takes."""
        samples, hotness = ids.shape
        sample = np.repeat(np.arange(samples), hotness)
        flat = ids.reshape(-1)
        if self.dense_gradient:
            return tf.SparseTensor(
                np.stack([sample, flat], axis=1),
                tf.ones(flat.shape),
                (samples, table.rows),
            )
        column = np.tile(np.arange(hotness), samples)
        return tf.SparseTensor(
            np.stack([sample, column], axis=1), flat, (samples, hotness)
        )
