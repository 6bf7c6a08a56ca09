# SPDX-License-Identifier: Apache-2.0
"""Kernels in the hands of who takes a part for the whole table."""

import contextlib
import io

import numpy as np
import pytest
import tensorflow as tf
from overlap_scenarios import DIM
from overlap_scenarios import ROWS
from overlap_scenarios import make_layer

from tfdist_ext.layers import FullSparse

keras = tf.keras
IDS = np.array([1, 4, 9])  # every rank has that many rows

READS = {
    "gather": lambda kernel: tf.gather(kernel, IDS),
    "gather_nd": lambda kernel: tf.gather_nd(kernel, IDS[:, None]),
    "lookup": lambda kernel: tf.nn.embedding_lookup(kernel, IDS),
    "matmul": lambda kernel: tf.matmul(
        tf.ones([1, kernel.shape[1]]), kernel, transpose_b=True
    ),
    "slice": lambda kernel: kernel[3],
    "dataset": tf.data.Dataset.from_tensor_slices,
}
# Called eagerly, TensorFlow or Keras 3 reads the handle of some.
IN_GRAPHS = {
    "sum": tf.reduce_sum,
    "operator": lambda kernel: 2 * kernel,
    "transpose": tf.transpose,
    "top_k": lambda kernel: tf.math.top_k(kernel, 2),
}
if hasattr(keras, "ops"):
    READS["ops.take"] = lambda kernel: keras.ops.take(kernel, IDS, 0)
    READS["ops.matmul"] = lambda kernel: keras.ops.matmul(
        kernel, keras.ops.ones([kernel.shape[1], 1])
    )


def in_graph(read):
    return tf.function(read, autograph=False)


def into_index(kernel):
    """As a layer of retrieval takes its candidates."""
    layer = keras.layers.Layer()
    index = layer.add_weight(name="index", shape=kernel.shape)
    index.assign(kernel)


def kernels_read(strategy, folder):
    """By ops that are not the layer's: refused, with the remedy."""
    remedy = r"'full_sparse.*strategy.gather_table\(layer\)"
    for sharding in ("row", "column"):
        layer, table = make_layer(strategy, sharding)
        for read in (
            into_index,
            *READS.values(),
            *map(in_graph, READS.values()),
            *map(in_graph, IN_GRAPHS.values()),
        ):
            with pytest.raises(ValueError, match=remedy):
                pytest.fail(f"read: {read(layer.kernel)}")
        # Who asks for numbers gets this rank's part.
        part = layer.kernel.numpy()
        assert part.shape == tuple(layer.kernel.shape) != table.shape
        np.testing.assert_array_equal(np.array(layer.kernel), part)
        np.testing.assert_array_equal(layer.get_weights()[0], part)
        np.testing.assert_array_equal(strategy.gather_table(layer), table)


def kernels_read_by_keras(strategy, folder):
    """Row by row, which a part is as good for as the whole table."""
    tables = {}
    for sharding in ("row", "replicated"):
        with strategy.scope():
            layer = FullSparse(
                DIM, ROWS, kernel_initializer="ones", sharding=sharding
            )
            model = keras.Sequential(
                [keras.Input([3], dtype="int64"), layer, keras.layers.Dense(1)]
            )
            model.layers[-1].set_weights([np.ones([DIM, 1]), np.zeros(1)])
            optimizer = keras.optimizers.SGD(
                0.005,
                weight_decay=0.1,
                use_ema=True,
                ema_momentum=0.7,
            )
            model.compile(optimizer, "mse")
        ids = np.arange(96).reshape([-1, 3]) * 7 % ROWS
        data = tf.data.Dataset.from_tensor_slices((ids, ids[:, :1] % 2 + 9))
        logs = keras.callbacks.TensorBoard(
            str(folder / f"{sharding}{strategy.rank}"),
            histogram_freq=1,
            write_images=True,
        )
        model.fit(data.batch(8), epochs=2, callbacks=[logs], verbose=0)
        with contextlib.redirect_stdout(io.StringIO()):
            model.summary()
        tables[sharding] = np.array(strategy.gather_table(layer))
    assert np.abs(tables["row"] - 1).max() > 1e-2
    np.testing.assert_allclose(tables["row"], tables["replicated"], rtol=1e-5)
