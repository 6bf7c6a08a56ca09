# SPDX-License-Identifier: Apache-2.0
"""Features whose rows are kept, and lists of lists, in one process."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist_ext.layers import DistributedEmbedding
from tfdist_ext.layers import FeatureConfig
from tfdist_ext.layers import FullSparse
from tfdist_ext.layers import SharedExchange
from tfdist_ext.layers import TableConfig

keras = tf.keras
ROWS, DIM = 50, 4
MATRIX = np.random.default_rng(0).normal(size=[ROWS, DIM]).astype(np.float32)
START = keras.initializers.Constant(MATRIX)
LISTS = [[3, 7, 3], [], [49]]
RAGGED = tf.ragged.constant(LISTS, dtype=tf.int64)


def layer_of(inner, outer, combiner=None):
    table = TableConfig("t", ROWS, DIM, START, combiner=combiner)
    return DistributedEmbedding(
        FeatureConfig("f", table, (None, *inner), (None, *outer, DIM))
    )


@pytest.mark.parametrize("shape", [[3], [3, 2], [3, 2, 2], [0, 2], [2, 0]])
def test_dense_ids_keep_their_shape(shape):
    ids = np.random.default_rng(1).integers(0, ROWS, shape)
    inner = shape[1:]
    for length in (inner, [None] * len(inner)):
        found = layer_of(inner, length)(tf.constant(ids))
        assert found.shape == (*shape, DIM)
        np.testing.assert_array_equal(found, MATRIX[ids])


def test_ragged_ids_stay_ragged_or_are_filled_or_cut():
    found = layer_of([None], [None])(RAGGED)
    for rows, ids in zip(found, LISTS, strict=True):
        np.testing.assert_array_equal(rows, MATRIX[ids].reshape([-1, DIM]))
    for length in (2, 4):
        found = layer_of([None], [length])(RAGGED)
        assert found.shape == (3, length, DIM)
        for rows, ids in zip(found.numpy(), LISTS, strict=True):
            expected = np.zeros([length, DIM], np.float32)
            expected[: len(ids)] = MATRIX[ids[:length]].reshape([-1, DIM])
            np.testing.assert_array_equal(rows, expected)


def test_weights_of_sequences():
    weights = tf.ragged.constant([[1.0, 2.0, 3.0], [], [4.0]])
    found = layer_of([None], [2])(RAGGED, weights)
    np.testing.assert_allclose(found[0], MATRIX[[3, 7]] * [[1], [2]])
    np.testing.assert_allclose(found[2, 0], MATRIX[49] * 4)
    ids, each = tf.constant([[[1, 2]]]), tf.constant([[[2.0, 3.0]]])
    found = layer_of([1, 2], [1, 2])(ids, each)
    np.testing.assert_allclose(found[0, 0], MATRIX[[1, 2]] * [[2], [3]])


@pytest.mark.parametrize("length", [None, 2, 5])
def test_cells_of_a_sparse_tensor_without_an_id_are_zeros(length):
    cells = [[0, 1], [0, 2], [2, 0], [2, 3]]
    ids = tf.SparseTensor(cells, tf.constant([3, 0, 7, 3], tf.int64), [3, 4])
    weights = tf.SparseTensor(cells, [1.0, 2.0, 3.0, 4.0], [3, 4])
    expected = np.zeros([3, 6, DIM], np.float32)
    rows, columns = zip(*cells, strict=True)
    expected[rows, columns] = MATRIX[[3, 0, 7, 3]] * [[1], [2], [3], [4]]
    layer = layer_of([None], [length])
    found = tf.function(layer)(ids, weights)
    assert found.shape[1:] == [length, DIM] or length is None
    np.testing.assert_allclose(found, expected[:, : length or 4], rtol=1e-6)
    found = layer(tf.sparse.reset_shape(ids, [4, 4]))
    np.testing.assert_array_equal(found[3], np.zeros([length or 4, DIM]))


def test_a_combiner_takes_the_last_dimension():
    ids = np.random.default_rng(2).integers(0, ROWS, [2, 3, 4])
    found = layer_of([3, 4], [3], "mean")(tf.constant(ids))
    np.testing.assert_allclose(found, MATRIX[ids].mean(2), rtol=1e-5)
    nested = tf.ragged.constant([[[1, 2], []], [[3]]], dtype=tf.int64)
    found = layer_of([None, None], [None], "sum")(nested)
    assert found.bounding_shape().numpy().tolist() == [2, 2, DIM]
    np.testing.assert_allclose(found[0, 0], MATRIX[1] + MATRIX[2])
    np.testing.assert_array_equal(found[0, 1], np.zeros(DIM))


def test_full_sparse_has_an_output_for_each_list():
    layer = FullSparse(
        DIM, ROWS, "relu", kernel_initializer=START, bias_initializer=0.5
    )

    def expected(lists):
        sums = [MATRIX[ids].sum(0) for ids in lists]
        return np.maximum(np.array(sums) + 0.5, 0)

    ids = np.random.default_rng(3).integers(0, ROWS, [2, 3, 4])
    wanted = expected(ids.reshape([6, 4])).reshape([2, 3, DIM])
    np.testing.assert_allclose(layer(ids), wanted, rtol=1e-5, atol=1e-6)
    dense = tf.reduce_sum(tf.one_hot(ids, ROWS), 2)
    found = layer(tf.sparse.from_dense(dense))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    nested = tf.RaggedTensor.from_tensor(ids, ragged_rank=2)
    found = layer((nested, tf.ones_like(nested, tf.float32)))
    np.testing.assert_allclose(found.to_tensor(), wanted, rtol=1e-5, atol=1e-6)
    (found,) = SharedExchange([layer])([ids])
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    inputs = keras.Input([3, 4], dtype="int64")
    model = keras.Model(inputs, layer(inputs))
    assert model.output_shape == (None, 3, DIM)
    np.testing.assert_allclose(model(ids), wanted, rtol=1e-5, atol=1e-6)


def test_functional_models_know_the_shapes():
    table = TableConfig("t", ROWS, DIM, START, combiner=None)
    pooled = TableConfig("p", ROWS, DIM, START)
    layer = DistributedEmbedding(
        {
            "seen": FeatureConfig("seen", table, (None, 3), (None, 3, DIM)),
            "any": FeatureConfig("any", table, (None, None), (None, None, DIM)),
            "one": FeatureConfig("one", table, (None,), (None, DIM)),
            "mean": FeatureConfig("mean", pooled, (None, 3), (None, DIM)),
        }
    )
    sizes = {"seen": [3], "any": [None], "one": [], "mean": [3]}
    ids = {
        name: keras.Input(size, dtype="int64", name=name)
        for name, size in sizes.items()
    }
    model = keras.Model(ids, layer(ids))
    shapes = {name: tuple(x.shape) for name, x in model.output.items()}
    assert shapes == {
        "seen": (None, 3, DIM),
        "any": (None, None, DIM),
        "one": (None, DIM),
        "mean": (None, DIM),
    }
    again = DistributedEmbedding.from_config(layer.get_config())
    assert again.get_config() == layer.get_config()


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="`output_shape` says"):
        layer_of([3], [3])(tf.zeros([2, 4], tf.int64))
