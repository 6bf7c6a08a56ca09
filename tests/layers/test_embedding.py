# SPDX-License-Identifier: Apache-2.0
"""Embedding in one process: what Keras's layer does, and what it refuses."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist_ext.layers import Embedding

keras = tf.keras
ROWS, DIM = 50, 6
MATRIX = np.random.default_rng(0).normal(size=[ROWS, DIM]).astype(np.float32)
START = keras.initializers.Constant(MATRIX)
IDS = [[3, 7, 0], [49, 0, 0]]

INPUTS = {
    "scalar": tf.constant(3),
    "vector": tf.constant([3, 0]),
    "matrix": tf.constant(IDS),
    "more": tf.constant([IDS, IDS], tf.int64),
    "array": np.array(IDS, np.uint8),
    "floats": tf.constant(IDS, tf.float32),
    "halves": tf.constant(IDS, tf.float16),
    "bools": tf.constant([[True], [False]]),
    "ragged": tf.ragged.constant([[3, 7, 0], [], [1]]),
    "uniform": tf.ragged.constant([[[1, 2]], []], inner_shape=(2,)),
    "twice": tf.ragged.constant([[[1], []], [[2, 3]]]),
    "sparse": tf.SparseTensor([[0, 1], [1, 0]], [5, 6], [2, 2]),
    "no_samples": tf.zeros([0, 3], tf.int64),
    "no_ids": tf.zeros([2, 0], tf.int64),
}


# Keras 3 makes no masks of these.
UNMASKED = ("ragged", "uniform", "twice", "sparse")


def pair(**options):
    """Our layer and Keras's, equal."""
    stock = keras.layers.Embedding(ROWS, DIM, **options)
    stock.build((None, None))
    stock.set_weights([MATRIX])
    return Embedding(ROWS, DIM, weights=[MATRIX], **options), stock


def plain(value):
    return value.to_list() if isinstance(value, tf.RaggedTensor) else value


@pytest.mark.parametrize("kind", INPUTS)
def test_rows_and_masks_are_those_of_keras(kind):
    ours, stock = pair(mask_zero=kind not in UNMASKED)
    found, expected = ours(INPUTS[kind]), stock(INPUTS[kind])
    assert found.dtype == expected.dtype
    assert found.shape.as_list() == expected.shape.as_list()
    assert str(plain(found)) == str(plain(expected))
    if ours.mask_zero:
        ours_mask, mask = found._keras_mask, expected._keras_mask
        np.testing.assert_array_equal(ours_mask, mask)


def test_masks_of_ragged_ids():
    ours, _ = pair(mask_zero=True)
    mask = ours.compute_mask(INPUTS["ragged"])
    assert mask.to_list() == [[True, True, False], [], [True]]
    assert Embedding(ROWS, DIM).compute_mask(tf.constant(IDS)) is None


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "bfloat16"])
def test_dtypes_are_those_of_keras(policy):
    ours, stock = pair(dtype=policy)
    found, expected = ours(tf.constant(IDS)), stock(tf.constant(IDS))
    assert found.dtype == expected.dtype == tf.bfloat16
    assert ours.embeddings.dtype == stock.embeddings.dtype
    np.testing.assert_array_equal(
        tf.cast(found, tf.float32), tf.cast(expected, tf.float32)
    )


def test_a_length_that_is_not_known():
    ours, stock = pair(mask_zero=True)

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int64)])
    def look_up(ids):
        found = ours(ids)
        assert found.shape.as_list() == [None, None, DIM]
        return found, found._keras_mask

    for shape in ([2, 3], [1, 5], [0, 2], [3, 0]):
        ids = tf.random.uniform(shape, 0, ROWS, tf.int64)
        rows, mask = look_up(ids)
        np.testing.assert_array_equal(rows, stock(ids))
        np.testing.assert_array_equal(mask, ids != 0)


def test_gradients_are_those_of_keras():
    gradients = []
    for layer in pair():
        with tf.GradientTape() as tape:
            rows = layer(tf.constant(IDS))
            loss = tf.reduce_sum(rows**3)
        (found,) = tape.gradient(loss, layer.trainable_variables)
        gradients.append(tf.convert_to_tensor(found))
    np.testing.assert_allclose(*gradients, rtol=1e-6, atol=1e-7)


def sequential(kind):
    ids = keras.Input([None], dtype="int64")
    table = kind(ROWS, DIM, START, mask_zero=True, name="rows")
    state = keras.layers.GRU(3, kernel_initializer="ones", name="gru")
    return keras.Sequential([ids, table, state])


def functional(kind):
    ids = keras.Input([None], dtype="int64")
    rows = kind(ROWS, DIM, START, mask_zero=True, name="rows")(ids)
    start = keras.initializers.GlorotUniform(seed=3)
    attend = keras.layers.MultiHeadAttention(2, 3, kernel_initializer=start)
    mean = keras.layers.GlobalAveragePooling1D()(attend(rows, rows))
    return keras.Model(ids, mean)


@pytest.mark.parametrize("make", [sequential, functional])
def test_models_train_as_with_keras(make):
    ids = np.random.default_rng(1).integers(0, 9, [8, 4])
    found = []
    for kind in (keras.layers.Embedding, Embedding):
        keras.utils.set_random_seed(1)
        if kind is Embedding:
            start = START
        else:
            start = lambda shape, dtype=None: tf.constant(MATRIX)  # noqa: E731
        model = make(lambda n, d, _, k=kind, s=start, **o: k(n, d, s, **o))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        history = model.fit(
            ids, np.ones([8, model.output_shape[-1]]), 3, 2, verbose=0
        )
        found.append([*history.history["loss"], *model.predict(ids, 8, 0)])
    for expected, value in zip(*found, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)


def test_configs_and_files_are_exchanged_with_keras(tmp_path):
    models = [sequential(Embedding), sequential(keras.layers.Embedding)]
    layers = [model.get_layer("rows") for model in models]
    for source, target in (models, models[::-1]):
        layer, other = source.get_layer("rows"), target.get_layer("rows")
        layer.set_weights([MATRIX * 2])
        path = str(tmp_path / "of.weights.h5")
        source.save_weights(path)
        other.set_weights([MATRIX])
        target.load_weights(path)
        np.testing.assert_array_equal(other.get_weights()[0], MATRIX * 2)
        layer.set_weights([MATRIX * 3])
    taken = Embedding.from_config(layers[1].get_config())
    assert (taken.input_dim, taken.output_dim) == (ROWS, DIM)
    assert taken.mask_zero and taken.name == "rows"
    models[0].save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    ids = np.array(IDS)
    np.testing.assert_array_equal(again.predict(ids), models[0].predict(ids))
    config = layers[0].get_config()
    assert Embedding.from_config(config).get_config() == config


def test_ids_out_of_range():
    layer = Embedding(ROWS, DIM, START)
    for bad in (-1, ROWS):
        with pytest.raises(tf.errors.InvalidArgumentError, match="range"):
            layer(tf.constant([[1, bad]]))
    found = Embedding(ROWS, DIM, START, out_of_range="ignore")(
        tf.constant([[1, -1, ROWS]])
    )
    np.testing.assert_array_equal(found[0, 1:], np.zeros([2, DIM]))
    np.testing.assert_array_equal(found[0, 0], MATRIX[1])


def test_looked_up_rows_are_regularized():
    layer = Embedding(ROWS, DIM, START, embeddings_regularizer="l2")
    with pytest.warns(UserWarning, match="embedding.*whole table in every"):
        layer(tf.constant([[1, 1, 2]]))
    expected = 0.01 * (MATRIX[[1, 1, 2]] ** 2).sum()
    np.testing.assert_allclose(sum(layer.losses), expected, rtol=1e-5)
    whole = Embedding(
        ROWS,
        DIM,
        START,
        embeddings_regularizer="l2",
        embeddings_constraint="non_neg",
        sharding="data_parallel",
    )
    whole(tf.constant([[1]]))
    expected = 0.01 * (MATRIX**2).sum()
    np.testing.assert_allclose(sum(whole.losses), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embeddings_constraint": "non_neg"}, "`embeddings_constraint`"),
        ({"lora_rank": 4}, "`lora_rank`"),
        ({"quantization_config": "int8"}, "`quantization_config`"),
        ({"dtype": "float64"}, "dtype=.*float64"),
        ({"sharding": "rows"}, "`sharding`"),
        ({"out_of_range": "clip"}, "`out_of_range`"),
        ({"input_dim": 0}, "`input_dim`"),
        ({"output_dim": 2.5}, "`output_dim`"),
    ],
)
def test_what_it_cannot_do_is_refused(options, message):
    arguments = {"input_dim": ROWS, "output_dim": DIM, **options}
    with pytest.raises(ValueError, match=message):
        Embedding(**arguments)


def test_arguments_of_keras_without_effect():
    with pytest.warns(UserWarning, match="`input_length`"):
        Embedding(ROWS, DIM, input_length=3)
    Embedding(ROWS, DIM, lora_rank=None, quantization_config=None)
