# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of one process that are written while training goes on."""

import time

import numpy as np
import pytest
import tensorflow as tf

import tfdist_ext
from tfdist_ext.callbacks import Resume
from tfdist_ext.embedding import checkpoint_slices
from tfdist_ext.saving import saved_variable
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
    variables = [*model.weights, *model.optimizer.variables]
    expected = [v.numpy().copy() for v in variables]
    for variable in model.weights:
        variable.assign(np.zeros(variable.shape))
    read = count_pieces(monkeypatch)
    model.fit(ids, ids[:, :1], 3, verbose=0, callbacks=[saved])  # resumes
    for variable, value in zip(variables, expected, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    assert len(read) == 5 * len(tables)


def count_pieces(monkeypatch):
    """A list of the pieces that are read as they are in a file."""
    read, found = saved_variable.read_piece, []

    def counted(stored, *args):
        found.append(stored)
        return read(stored, *args)

    monkeypatch.setattr(saved_variable, "read_piece", counted)
    return found


class Scale(keras.layers.Layer):
    """Multiplies by the sum of a large weight."""

    def __init__(self, shape):
        super().__init__()
        initializer = keras.initializers.RandomNormal(0.01)
        self.large = self.add_weight(
            name="large", shape=shape, initializer=initializer
        )

    def call(self, x):
        return x * tf.reduce_sum(self.large)


@pytest.mark.parametrize("shape", [(40, 40), (3, 3, 8, 9), (999,)])
def test_a_damaged_piece_is_found(tmp_path, monkeypatch, shape):
    """Resume then takes the checkpoint before."""
    monkeypatch.setattr(checkpoint_slices, "PIECE", 1024)
    with tfdist_ext.HybridParallelStrategy().scope():
        model = keras.Sequential([keras.Input([2]), Scale(shape)])
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    x, batches = np.ones([30, 2], np.float32), []
    count = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: batches.append(batch)
    )

    def train(**settings):
        batches.clear()
        callbacks = [Resume(tmp_path, **settings), count]
        model.fit(x, x, 3, verbose=0, callbacks=callbacks)
        variables = [*model.weights, *model.optimizer.variables]
        return [v.numpy().copy() for v in variables]

    expected = train(every=8)
    read = count_pieces(monkeypatch)
    equal(train(), expected)
    assert not batches
    assert len(read) == 2 * -(-4 * np.prod(shape) // 1024)
    stored = read[-1]
    with open(stored.file, "r+b") as file:
        file.seek(stored.offset)
        file.write(b"damage")
    with pytest.warns(UserWarning, match="is damaged.*Checksum"):
        equal(train(), expected)
    assert batches == [8, 9]


@pytest.mark.parametrize(
    ("slices", "in_pieces"),
    [
        (["0,5:-", "5,17:-", "22,10:-", "32,32:-"], True),
        (["32,32:0,4", "0,32:-"], True),
        (["0,32:-", "32,32:0,3", "32,32:3,1"], False),
        (["-:0,1", "-:1,3"], False),
    ],
)
def test_slices_that_several_ranks_have_written(
    tmp_path, monkeypatch, slices, in_pieces
):
    """Those of rows are read one by one, others by TensorFlow."""
    monkeypatch.setattr(checkpoint_slices, "PIECE", 256)
    with tfdist_ext.HybridParallelStrategy().scope():
        model = keras.Sequential([keras.Input([2]), Scale((64, 4))])
        model.compile("sgd", "mse")
    x = np.ones([3, 2], np.float32)
    model.fit(x, x, verbose=0, callbacks=[Resume(tmp_path)])
    expected = model.weights[0].numpy().copy()
    path = tf.train.latest_checkpoint(tmp_path)
    tensors = write_slices(path, [64, 4], slices)
    model.weights[0].assign(np.zeros([64, 4]))
    read = count_pieces(monkeypatch)
    model.fit(x, x, verbose=0, callbacks=[Resume(tmp_path)])
    np.testing.assert_array_equal(model.weights[0].numpy(), expected)
    assert len(read) == (len(slices) * tensors if in_pieces else 0)


def write_slices(path, shape, slices):
    """Writes a checkpoint anew, the tensors of a shape in slices.

    Returns:
        The number of these tensors: the weight, and a slot of tf_keras.
    """
    reader = tf.train.load_checkpoint(path)
    names, specs, tensors = [], [], []
    for name, each in reader.get_variable_to_shape_map().items():
        value = reader.get_tensor(name)
        sizes = " ".join(map(str, shape))
        for spec in [f"{sizes} {s}" for s in slices] if each == shape else [""]:
            names.append(name)
            specs.append(spec)
            tensors.append(value[part(spec)] if spec else value)
    tf.raw_ops.SaveV2(
        prefix=path,
        tensor_names=names,
        shape_and_slices=specs,
        tensors=tensors,
    )
    return sum(map(bool, specs)) // len(slices)


def part(spec):
    """The index of a slice in TensorFlow's notation."""
    pairs = [each.split(",") for each in spec.split(" ")[-1].split(":")]
    return tuple(
        slice(int(pair[0]), int(pair[0]) + int(pair[1]))
        if len(pair) == 2
        else slice(None)
        for pair in pairs
    )


def test_a_variable_of_another_size_is_not_restored(tmp_path, monkeypatch):
    """The file has all slices of the smaller variable, among others."""
    monkeypatch.setattr(checkpoint_slices, "PIECE", 256)
    x = np.ones([3, 2], np.float32)
    for shape in (64, 4), (32, 4):
        with tfdist_ext.HybridParallelStrategy().scope():
            model = keras.Sequential([keras.Input([2]), Scale(shape)])
            model.compile("sgd", "mse")
        if shape == (64, 4):
            model.fit(x, x, verbose=0, callbacks=[Resume(tmp_path)])
            continue
        before = model.weights[0].numpy().copy()
        with pytest.raises(ValueError, match=r"[Ss]hape"):
            model.fit(x, x, verbose=0, callbacks=[Resume(tmp_path)])
        np.testing.assert_array_equal(model.weights[0].numpy(), before)


def equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
