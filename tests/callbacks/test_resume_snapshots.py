# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of one process that are written while training goes on."""

import time

import numpy as np
import pytest
import tensorflow as tf

import tfdist_ext
from tfdist_ext.callbacks import Resume
from tfdist_ext.embedding import checkpoint_slices
from tfdist_ext.saving.checkpoint_index import Index

keras = tf.keras


class Noted(keras.callbacks.Callback):
    """Notes the variables after a batch."""

    def __init__(self, batch):
        super().__init__()
        self.batch = batch

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.batch:
            variables = [*self.model.weights, *self.model.optimizer.variables]
            self.values = [v.numpy().copy() for v in variables]


@pytest.mark.parametrize("optimizer", ["ours", "of Keras"])
def test_large_variables_are_written_in_pieces(
    tmp_path, monkeypatch, optimizer
):
    """With the values of one step, while later steps change them."""
    monkeypatch.setattr(checkpoint_slices, "PIECE", 256)
    write = tf.raw_ops.SaveV2

    def slow(**kwargs):
        time.sleep(0.01)
        return write(**kwargs)

    monkeypatch.setattr(tf.raw_ops, "SaveV2", slow)
    make = {
        "ours": tfdist_ext.optimizers.Adam,
        "of Keras": keras.optimizers.Adam,
    }
    with tfdist_ext.HybridParallelStrategy().scope():
        layer = tfdist_ext.layers.FullSparse(3, 99)
        inputs = keras.Input([2], dtype="int64")
        model = keras.Model(inputs, keras.layers.Dense(1)(layer(inputs)))
        model.compile(make[optimizer](0.1), "mse")
    ids = np.arange(60).reshape(30, 2)
    noted, saved = Noted(2), Resume(tmp_path, every=3, keep=9)
    model.fit(ids, ids[:, :1], 3, verbose=0, callbacks=[saved, noted])
    path = f"{tmp_path}/ckpt-3"
    reader = tf.train.load_checkpoint(path)
    shapes = reader.get_variable_to_shape_map()
    found = list(map(reader.get_tensor, shapes))
    for value in noted.values:
        assert any(np.array_equal(value, each) for each in found)
    tables = [key for key, shape in shapes.items() if shape == [99, 3]]
    assert len(tables) >= 3  # the table and two slots
    assert max(map(Index(path).most_bytes, tables)) <= 256
    expected = [v.numpy().copy() for v in model.weights]
    for variable in model.weights:
        variable.assign(np.zeros(variable.shape))
    model.fit(ids, ids[:, :1], 3, verbose=0, callbacks=[saved])  # resumes
    for variable, value in zip(model.weights, expected, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
