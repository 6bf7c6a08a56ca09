# SPDX-License-Identifier: Apache-2.0
"""Nothing writes into arrays that a user's Python code hands to tf.data.

TensorFlow takes an aligned NumPy array of a Python function as a tensor,
without a copy. A slice of its rows passes for memory of TensorFlow's own, and
the next op writes its result there.
"""

import types

import numpy as np
import pytest
import tensorflow as tf

from tfdist_ext import batches
from tfdist_ext.embedding import id_layout
from tfdist_ext.embedding import prefetched_ids
from tfdist_ext.embedding.feature import Ids
from tfdist_ext.strategy import input

ROWS, WIDTH = 16, 16  # rows of 64 bytes
Policy = tf.data.experimental.AutoShardPolicy


class Alone:
    """Collectives of rank 0 of some whose datasets have the same length."""

    def __init__(self, world_size=2):
        self.group = types.SimpleNamespace(rank=0, world_size=world_size)

    def all_gather(self, tensor, label):
        return tf.concat([tensor] * self.group.world_size, 0)

    def all_reduce(self, tensors, label, weighted=False):
        return tensors


def aligned(shape, dtype=np.float32):
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    array = raw[start : start + size].view(dtype).reshape(shape)
    array[:] = np.arange(array.size).reshape(shape)
    return array


def array_of(kind, folder):
    """An array of `kind`: aligned, or in a file of which pages are memory."""
    if kind == "aligned":
        return aligned([ROWS, WIDTH])
    path = folder / "array.npy"
    np.save(path, aligned([ROWS, WIDTH]))
    return np.load(path, mmap_mode=kind).reshape(ROWS, WIDTH)


def from_python(*arrays, batches=6):
    """A dataset of tensors that share the memory of `arrays`."""

    def read(_):
        found = tf.numpy_function(
            lambda: arrays, [], [array.dtype for array in arrays]
        )
        return tuple(
            tf.ensure_shape(tensor, array.shape)
            for tensor, array in zip(found, arrays, strict=True)
        )

    return tf.data.Dataset.range(batches).map(read)


def consume(dataset):
    """Reads a dataset as a step does that writes wherever it may."""

    def step(*batch):
        flat = tf.nest.flatten(batch, expand_composites=True)
        return [part + tf.cast(1, part.dtype) for part in flat]

    for _ in dataset.prefetch(4).map(step):
        pass


def with_policy(dataset, policy):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    return dataset.with_options(options)


def test_the_danger_is_real():
    array = aligned([ROWS, WIDTH])
    before = array.copy()
    consume(from_python(array).map(lambda x: x[:8]))
    assert (array != before).any(), "copies are no longer needed"


@pytest.mark.parametrize("policy", [Policy.AUTO, Policy.DATA, Policy.OFF])
@pytest.mark.parametrize("kind", ["aligned", "r", "r+"])
def test_arrays_of_a_generator_stay_as_they_are(policy, kind, tmp_path):
    array = array_of(kind, tmp_path)
    before = array.copy()
    dataset = tf.data.Dataset.from_generator(
        lambda: iter([array] * 6),
        output_signature=tf.TensorSpec([ROWS, WIDTH]),
    )
    dataset = with_policy(dataset, policy)
    for world_size in (2, 3, ROWS):
        consume(input.distribute(dataset, Alone(world_size), "input"))
        np.testing.assert_array_equal(array, before)


def test_files_of_a_rank(tmp_path):
    paths = [str(tmp_path / name) for name in "ab"]
    for path in paths:
        tf.io.write_file(path, "x")
    array = aligned([ROWS, WIDTH])
    before = array.copy()

    def read(_):
        found = tf.numpy_function(lambda: array, [], tf.float32)
        return tf.ensure_shape(found, array.shape)

    dataset = tf.data.Dataset.list_files(paths, shuffle=False)
    dataset = dataset.interleave(
        lambda path: tf.data.TextLineDataset(path).map(read)
    )
    dataset = with_policy(dataset, Policy.FILE)
    consume(input.distribute(dataset, Alone(), "input"))
    np.testing.assert_array_equal(array, before)


def test_a_ranks_own_dataset():
    splits = aligned([9], np.int64)
    before = splits.copy()
    dataset = from_python(splits, np.arange(8))
    dataset = dataset.map(
        lambda splits, values: tf.RaggedTensor.from_row_splits(
            values, splits, validate=False
        )
    )
    local = input.own_batches(dataset, Alone(), "input")
    consume(local.map(lambda ragged: ragged.row_splits[:8]))
    np.testing.assert_array_equal(splits, before)


def test_ragged_ids_of_any_depth():
    inner, outer = aligned([17], np.int64), aligned([17], np.int64)
    values = aligned([16, WIDTH])
    before = [array.copy() for array in (inner, outer, values)]
    dataset = from_python(inner, outer, values).map(
        lambda inner, outer, values: tf.RaggedTensor.from_nested_row_splits(
            values, [outer, inner], validate=False
        )
    )
    consume(input.distribute(dataset, Alone(), "input"))
    for array, expected in zip((inner, outer, values), before, strict=True):
        np.testing.assert_array_equal(array, expected)


def test_sparse_and_prefetched_ids():
    indices, values = aligned([16, 2], np.int64), aligned([16], np.int64)
    indices[:] = np.stack([np.arange(16), np.zeros(16)], 1)
    splits, weights = aligned([17], np.int64), aligned([16])
    arrays = (indices, values, splits, weights)
    before = [array.copy() for array in arrays]

    def bundle(indices, values, splits, weights):
        return (
            tf.SparseTensor(indices, values, [16, 8]),
            prefetched_ids.bundle(
                [[Ids(values, splits, weights)]],
                [id_layout.dense(tf.constant([16], tf.int64), [16])],
            ),
        )

    dataset = from_python(*arrays).map(bundle)
    consume(input.distribute(dataset, Alone(), "input"))
    for array, expected in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("rows", [0, 1, 7, 8])
@pytest.mark.parametrize("dtype", [tf.string, tf.bool, tf.uint16, tf.bfloat16])
def test_a_copy_is_equal(rows, dtype):
    value = tf.cast(tf.reshape(tf.range(rows * 3) % 2, [rows, 3]), tf.int32)
    if dtype == tf.string:
        value = tf.strings.as_string(value)
    value = tf.cast(value, dtype)
    np.testing.assert_array_equal(batches.copied(value), value)


def test_nested_ragged_rows_are_those_of_the_rank():
    ragged = tf.ragged.constant([[[1], [2, 3]], [], [[4]], [[], [5]], [[6]]])
    pieces = [batches.slice_of_rank(ragged, rank, 2) for rank in range(2)]
    joined = tf.concat(pieces, 0)
    assert joined.to_list() == ragged.to_list()
    uniform = tf.RaggedTensor.from_uniform_row_length(ragged, 1)
    piece = batches.slice_of_rank(uniform, 1, 2)
    assert piece.to_list() == uniform[2:].to_list()
