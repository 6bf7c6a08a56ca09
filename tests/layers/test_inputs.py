# SPDX-License-Identifier: Apache-2.0
"""Ids of other dtypes, and shapes that say little."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist_ext.layers import DistributedEmbedding
from tfdist_ext.layers import FeatureConfig
from tfdist_ext.layers import FullSparse
from tfdist_ext.layers import TableConfig

keras = tf.keras
IDS = [[1, 2], [3, 99]]


def make_layer():
    layer = FullSparse(4, 100, kernel_initializer="normal", use_bias=False)
    layer.build((None, 2))
    return layer


@pytest.mark.parametrize(
    "dtype",
    ["int8", "int16", "uint8", "uint16", "uint32", "float32", "float64"],
)
def test_ids_of_any_dtype(dtype):
    layer = make_layer()
    expected = layer(np.array(IDS, np.int64))
    np.testing.assert_array_equal(layer(np.array(IDS, dtype)), expected)
    if "int" in dtype:
        ragged = tf.ragged.constant(IDS, dtype=dtype)
        np.testing.assert_array_equal(layer(ragged), expected)


@pytest.mark.parametrize("bad", [0.5, 2.0**24, np.nan])
@pytest.mark.parametrize("graph", [False, True])
def test_floats_that_are_no_ids(bad, graph):
    layer = make_layer()
    ids = np.array([[1.0, bad]], np.float32)
    look_up = tf.function(layer) if graph else layer
    message = "ids as float32, and some are not whole numbers below 16777216"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        look_up(ids)


@pytest.mark.parametrize("inputs", [[], [keras.Input((2,))]])
def test_sequential_without_a_dtype_trains(inputs):
    model = keras.Sequential([*inputs, make_layer(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    losses = [
        model.fit(np.array(IDS), np.ones([2, 1]), verbose=0).history["loss"][0]
        for _ in range(2)
    ]
    assert losses[1] < losses[0]


@pytest.mark.parametrize(
    "shape",
    [
        None,
        (),
        (None, 3),
        [(None, 3), (None,)],
        {"a": (None, 3), "b": (None, 2)},
        tf.TensorShape(None),
        tf.TensorShape([None, 3]),
        (None, 3, 4),
    ],
)
def test_shapes_of_every_kind_build(shape):
    layer = FullSparse(4, 100)
    layer.build(shape)
    assert tuple(layer.kernel.shape) == (100, 4)
    assert layer.describe(shape).table.vocabulary_size == 100
    inner = (3,) if shape == (None, 3, 4) else ()
    assert tuple(layer.compute_output_shape(shape)) == (None, *inner, 4)


def test_arguments_in_the_order_of_an_embedding_warn():
    with pytest.warns(UserWarning, match="order of a Dense layer"):
        FullSparse(100, 4)


def test_embedding_takes_float_inputs_of_keras():
    table = TableConfig("t", 100, 4)
    layer = DistributedEmbedding(
        FeatureConfig("f", table, (None, 2), (None, 4))
    )
    ids = np.array(IDS)
    expected = layer(ids)
    np.testing.assert_array_equal(layer(ids.astype(np.float32)), expected)
    with pytest.raises(ValueError, match="as wide as the table has rows"):
        layer(np.zeros([2, 100], np.float32))


@pytest.mark.parametrize("dtype", ["int32", "uint8", "float16", "float64"])
@pytest.mark.parametrize("shape", [(2,), (2, 1)])
@pytest.mark.parametrize("of_weights", [(2,), (2, 1)])
def test_one_weight_a_sample(dtype, shape, of_weights):
    table = TableConfig("t", 100, 4, combiner="sum")
    layer = DistributedEmbedding(FeatureConfig("f", table, shape, (None, 4)))
    weights = np.array([2, 3], dtype)
    found = layer(np.reshape([5, 7], shape), weights.reshape(of_weights))
    (rows,) = layer.get_embedding_tables().values()
    expected = rows.numpy()[[5, 7]] * np.array([[2], [3]], np.float32)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("make", ["dense", "ragged", "sparse"])
def test_whole_weights(make):
    table = TableConfig("t", 100, 4, combiner="sum")
    layer = DistributedEmbedding(
        FeatureConfig("f", table, (None, 2), (None, 4))
    )
    ids, weights = tf.constant(IDS), tf.constant([[2, 3], [4, 5]])
    if make != "dense":
        ids, weights = map(tf.RaggedTensor.from_tensor, (ids, weights))
    if make == "sparse":
        ids, weights = ids.to_sparse(), weights.to_sparse()
    found = layer(ids, weights)
    (rows,) = layer.get_embedding_tables().values()
    expected = rows.numpy()[IDS] * np.array([[[2], [3]], [[4], [5]]])
    np.testing.assert_allclose(found, expected.sum(1), rtol=1e-5, atol=1e-6)


def test_one_weight_for_all_ids_of_a_sample():
    table = TableConfig("t", 100, 4, combiner="sum")
    layer = DistributedEmbedding(
        FeatureConfig("f", table, (None, 2), (None, 4))
    )
    found = layer(np.array(IDS), np.array([2.0, 3.0]))
    expected = layer(np.array(IDS)) * np.array([[2], [3]], np.float32)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)
    with pytest.raises(tf.errors.InvalidArgumentError, match="same positions"):
        layer(np.array(IDS), np.array([2.0, 3.0, 4.0]))
    with pytest.raises(ValueError, match="floats or integers in a"):
        layer(np.array(IDS), np.array([[True, False], [True, False]]))


def test_inputs_of_another_rank_or_kind_are_refused():
    layer = make_layer()
    with pytest.raises(ValueError, match=r"of shape \(\)"):
        layer(np.zeros([], np.int64))
    ragged = tf.ragged.constant(IDS, dtype=tf.int64)
    with pytest.raises(ValueError, match="both be RaggedTensors"):
        layer((ragged, tf.ones([2, 2])))


@pytest.mark.parametrize("binary_values", [False, True])
def test_full_sparse_multiplies_a_matrix_as_a_dense_layer_does(binary_values):
    matrix = np.zeros([2, 3, 100], np.float32)
    matrix[0, 0, [1, 7]] = matrix[1, 2, 99] = 2.5
    layer = FullSparse(4, 100, "relu", binary_values=binary_values)
    layer.build((None, 100))
    layer.kernel.assign(np.random.default_rng(1).normal(size=[100, 4]))
    counted = matrix != 0 if binary_values else matrix
    dense = keras.layers.Dense(4, "relu")
    dense.build((None, 100))
    dense.set_weights(layer.get_weights())
    for inputs in (matrix, matrix[0], tf.constant(matrix), matrix[:0]):
        counted = np.asarray(inputs) != 0 if binary_values else inputs
        expected = dense(tf.cast(counted, tf.float32))
        np.testing.assert_allclose(layer(inputs), expected, atol=1e-6)


def test_whole_numbers_as_wide_as_the_kernel_are_not_guessed_at():
    counts = np.ones([2, 100], np.int64)
    with pytest.raises(ValueError, match="cannot tell ids from a matrix"):
        make_layer()(counts)
    as_ids = make_layer()(tf.RaggedTensor.from_tensor(counts))
    assert as_ids.shape == (2, 4)


@pytest.mark.parametrize("combiner", ["sum", "mean"])
@pytest.mark.parametrize("persistent", [False, True])
def test_weights_that_are_trained_are_refused(combiner, persistent):
    feature = FeatureConfig(
        "f", TableConfig("t", 100, 4, combiner=combiner), (None, 2), (None, 4)
    )
    layer, scale = DistributedEmbedding(feature), tf.Variable(2.0)
    with tf.GradientTape(persistent=persistent) as tape:
        weights = tf.ones([2, 2]) * scale
        loss = tf.reduce_sum(layer(tf.constant(IDS), weights=weights))
    with pytest.raises(LookupError, match="what computes them would not"):
        tape.gradient(loss, [scale, *layer.trainable_variables])
    with tf.GradientTape() as tape:
        weights = tf.stop_gradient(tf.ones([2, 2]) * scale)
        loss = tf.reduce_sum(layer(tf.constant(IDS), weights=weights))
    nothing, *rows = tape.gradient(loss, [scale, *layer.trainable_variables])
    assert nothing is None and None not in rows
