# SPDX-License-Identifier: Apache-2.0
"""Samples of a rank are those that a twin of stock ops slices."""

import numpy as np
import pytest
import tensorflow as tf

from tests.reference import batches as reference
from tfdist_ext.ops import collective_ops

DENSE, SPARSE = collective_ops.DENSE, collective_ops.SPARSE


def batch(samples, seed=0):
    """Values of each kind, and the kinds."""
    rng = np.random.default_rng(seed)
    mask = rng.random([samples, 4, 3]) < 0.4
    sparse = tf.sparse.from_dense(np.where(mask, rng.random(mask.shape), 0))
    mixed = rng.permutation(len(sparse.values))  # indices in no order
    text = tf.constant([f"text {i}" * 9 for i in range(len(mixed))], tf.string)
    lists = [
        [list(range(n)) for n in rng.integers(0, 4, rng.integers(0, 3))]
        for _ in range(samples)
    ]
    nested = tf.ragged.constant(lists, tf.float16, ragged_rank=2)
    words = tf.RaggedTensor.from_row_lengths(
        tf.strings.as_string(tf.reshape(nested.flat_values, [-1, 1])),
        nested.values.row_lengths(),
    )
    words = words.with_row_splits_dtype(tf.int32)
    with_kinds = [
        (DENSE, [tf.constant(rng.normal(size=[samples, 2, 3]))]),
        (DENSE, [tf.constant([f"sample {i}" for i in range(samples)])]),
        (DENSE, [tf.zeros([samples, 0], tf.bool)]),
        (SPARSE, [sparse.indices, sparse.values, sparse.dense_shape]),
        (
            SPARSE,
            [tf.gather(sparse.indices, mixed), text, sparse.dense_shape],
        ),
        (2, [nested.flat_values, *nested.nested_row_splits]),
    ]
    if words.nrows() == samples:
        with_kinds.append((1, [words.flat_values, words.row_splits]))
    kinds = [kind for kind, _ in with_kinds]
    return [part for _, parts in with_kinds for part in parts], kinds


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("samples", [0, 1, 7, 24])
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_slices_same_as_twin(samples, world_size, graph):
    if samples == 0:
        values = [np.zeros([0, 3]), np.zeros([0], np.int64), np.zeros(1, int)]
        parts, kinds = [tf.constant(v) for v in values], [DENSE, 1]
    else:
        parts, kinds = batch(samples)
    cut = collective_ops.slice_of_rank
    if graph:
        cut = tf.function(cut, autograph=False)
    for rank in range(world_size):
        ours = cut(parts, kinds, rank, world_size)
        twin = reference.slice_of_rank(parts, kinds, rank, world_size)
        for mine, other in zip(ours, twin, strict=True):
            assert mine.dtype == other.dtype
            np.testing.assert_array_equal(mine, other)


def test_shapes_are_known_as_far_as_they_are():
    def cut(dense, wide, indices, shape, splits):
        values = tf.zeros([tf.shape(indices)[0]])
        parts = [dense, wide, indices, values, shape, values, splits]
        found = collective_ops.slice_of_rank(parts, [0, 0, -1, 1], 0, 4)
        return [part.shape.as_list() for part in found]

    specs = [[3, 2], [None, 5], [None, 2], [2], [9]]
    types = [tf.float32, tf.string, tf.int64, tf.int64, tf.int64]
    shapes = []
    tf.function(lambda *a: shapes.extend(cut(*a))).get_concrete_function(
        *map(tf.TensorSpec, specs, types)
    )
    rest = [[None, 5], [None, 2], [None], [2], [None], [None]]
    assert shapes == [[None, 2], *rest]  # of 3 samples rank 0 of 4 has none
    found = collective_ops.slice_of_rank([tf.zeros([8, 2])], [0], 3, 4)
    assert found[0].shape == (2, 2)


@pytest.mark.parametrize(
    ("parts", "kinds", "message"),
    [
        ([np.float32(1)], [DENSE], "Received shape: \\[\\]"),
        ([np.zeros(3), np.array([0, 2, 1])], [1], "must ascend from 0 to 3"),
        ([np.zeros(3), np.array([0, 4, 4])], [1], "must ascend from 0 to 3"),
        ([np.zeros(3), np.array([-1, 2, 3])], [1], "must ascend from 0 to 3"),
        (
            [np.zeros(3), np.array([0, 1, 2]), np.array([0, 3])],
            [2],
            "from 0 to 1. Received: 2 at position 2 after 1",
        ),
        ([np.zeros(3), np.zeros(0, int)], [1], "must not be empty"),
        ([np.zeros(3), np.array([0.0, 1, 3])], [1], "int32 or int64"),
        ([np.zeros(3)] * 2, [DENSE], "1 tensors.*Received: 2 tensors"),
        ([np.zeros(3)], [SPARSE], "3 tensors|more than the 1"),
        ([np.zeros(3)], [-2], "at least -1|more than"),
        (
            [np.zeros([2, 2], int), np.zeros(3), np.array([2, 2])],
            [SPARSE],
            "a SparseTensor must have",
        ),
        (
            [np.zeros([2, 2], int), np.zeros(2), np.array([2, 2, 2])],
            [SPARSE],
            "a SparseTensor must have",
        ),
    ],
)
def test_malformed_batches_are_errors(parts, kinds, message):
    tensors = [tf.constant(part) for part in parts]
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError)) as error:
        collective_ops.slice_of_rank(tensors, kinds, 0, 1)
    error.match(message)
