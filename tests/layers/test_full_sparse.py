# SPDX-License-Identifier: Apache-2.0
"""FullSparse in one process: inputs, values, gradients, errors, saving."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist_ext.layers import FullSparse
from tfdist_ext.layers import TableConfig

keras = tf.keras
ROWS, UNITS = 50, 6
IDS = [[3, 7, 3], [], [49], [0, 1, 2, 3]]
WEIGHTS = [[0.5, -1.0, 2.0], [], [1.5], [1.0, 2.0, 3.0, 4.0]]


def layer(**arguments):
    arguments.setdefault(
        "kernel_initializer", keras.initializers.RandomNormal(seed=1)
    )
    return FullSparse(UNITS, arguments.pop("input_dim", ROWS), **arguments)


def expected(kernel, ids, weights=None, bias=1 / UNITS):
    result = np.full([len(ids), UNITS], bias, np.float64)
    for s, sample in enumerate(ids):
        for k, i in enumerate(sample):
            result[s] += (1 if weights is None else weights[s][k]) * kernel[i]
    return result


def check(made, inputs, ids, weights=None):
    outputs = made(inputs)
    kernel = np.array(made.kernel)
    np.testing.assert_allclose(
        outputs, expected(kernel, ids, weights), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64])
def test_ragged_ids(dtype):
    check(layer(), tf.ragged.constant(IDS, dtype=dtype), IDS)


def test_ragged_ids_with_weights():
    pair = (
        tf.ragged.constant(IDS, dtype=tf.int64),
        tf.ragged.constant(WEIGHTS, dtype=tf.float32),
    )
    check(layer(), pair, IDS, WEIGHTS)


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64])
def test_dense_ids(dtype):
    check(layer(), tf.constant([4, 0, 49], dtype), [[4], [0], [49]])
    check(layer(), tf.constant([[4, 4], [0, 49]], dtype), [[4, 4], [0, 49]])


@pytest.mark.parametrize("binary", [False, True])
def test_sparse_tensor(binary):
    dense = np.zeros([3, ROWS], np.float32)
    dense[0, [3, 9]] = 2.0, -1.0
    dense[2, 49] = 0.25
    ids, weights = [[3, 9], [], [49]], [[2.0, -1.0], [], [0.25]]
    made = layer(input_dim=None, binary_values=binary)
    weights = None if binary else weights
    check(made, tf.sparse.from_dense(dense), ids, weights)
    assert made.input_dim == ROWS


def test_sparse_tensor_out_of_order_counts_the_same():
    ordered = tf.SparseTensor([[0, 1], [0, 5], [1, 2]], [1.0, 2, 3], [2, ROWS])
    mixed = tf.SparseTensor([[1, 2], [0, 5], [0, 1]], [3.0, 2, 1], [2, ROWS])
    made = layer()
    np.testing.assert_array_equal(made(ordered), made(mixed))


def test_list_of_inputs_is_summed():
    ragged = tf.ragged.constant(IDS, dtype=tf.int64)
    dense = tf.constant([[1, 2], [3, 4], [5, 6], [7, 8]], tf.int32)
    both = [a + b for a, b in zip(IDS, dense.numpy().tolist(), strict=True)]
    check(layer(), [ragged, dense], both)


def test_empty_batch():
    made = layer()
    assert made(tf.zeros([0, 3], tf.int64)).shape == (0, UNITS)
    empty = tf.RaggedTensor.from_row_splits(
        tf.zeros([0], tf.int64), tf.zeros([1], tf.int64)
    )
    assert made(empty).shape == (0, UNITS)


def test_activation_without_bias():
    made = layer(activation="relu", use_bias=False)
    outputs = made(tf.ragged.constant(IDS, dtype=tf.int64))
    kernel = np.array(made.kernel)
    reference = np.maximum(expected(kernel, IDS, bias=0), 0)
    np.testing.assert_allclose(outputs, reference, rtol=1e-5, atol=1e-6)
    assert len(made.weights) == 1


def test_gradient_equals_a_dense_layers():
    made = layer()
    dense = np.random.default_rng(0).normal(size=[4, ROWS])
    dense *= np.random.default_rng(1).random([4, ROWS]) < 0.2
    dense = dense.astype(np.float32)
    target = tf.ones([4, UNITS])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum((made(tf.sparse.from_dense(dense)) - target) ** 2)
    kernel, bias = tape.gradient(loss, [made.kernel, made.bias])
    outputs = dense @ np.array(made.kernel) + np.array(made.bias)
    upstream = 2 * (outputs - target.numpy())
    assert isinstance(kernel, tf.IndexedSlices)
    np.testing.assert_allclose(
        tf.convert_to_tensor(kernel), dense.T @ upstream, rtol=1e-5, atol=1e-5
    )
    np.testing.assert_allclose(bias, upstream.sum(0), rtol=1e-5)


def test_called_twice_gradients_add_up():
    made = layer()
    ids = tf.constant([[1], [1]], tf.int64)

    @tf.function
    def gradient():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(made(ids)) + 2 * tf.reduce_sum(made(ids))
        return tf.convert_to_tensor(tape.gradient(loss, made.kernel))

    made(ids)
    np.testing.assert_allclose(gradient()[1], np.full(UNITS, 6.0))


def test_same_seed_same_table_other_name_other_table():
    ids = tf.constant([0], tf.int64)
    tables = []
    for name in ("one", "one", "two"):
        made = layer(name=name)
        made(ids)
        tables.append(np.array(made.kernel))
    np.testing.assert_array_equal(tables[0], tables[1])
    assert np.abs(tables[0] - tables[2]).max() > 0


@pytest.mark.parametrize(
    ("initializer", "low", "high"),
    [
        ("zeros", 0, 0),
        ("ones", 1, 1),
        (keras.initializers.Constant(0.5), 0.5, 0.5),
        (keras.initializers.RandomUniform(-0.2, 0.1), -0.2, 0.1),
        ("glorot_uniform", -np.sqrt(6 / 56), np.sqrt(6 / 56)),
        (keras.initializers.TruncatedNormal(0, 0.1), -0.2, 0.2),
    ],
)
def test_initializers(initializer, low, high):
    made = layer(kernel_initializer=initializer)
    made(tf.constant([0], tf.int64))
    kernel = np.array(made.kernel)
    assert kernel.min() >= low - 1e-6 and kernel.max() <= high + 1e-6
    if low < high:
        assert kernel.std() > (high - low) / 6


def test_bad_id_names_layer_sample_id_and_limit():
    made = layer(name="ads")
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        made(tf.constant([[1], [ROWS]], tf.int64))
    for part in ("ads", "1", str(ROWS)):
        assert part in str(error.value)


def test_out_of_range_ids_can_be_ignored():
    check(
        layer(out_of_range="ignore"),
        tf.constant([[-1, 2], [ROWS, ROWS + 5]], tf.int64),
        [[2], []],
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sharding": "diagonal"}, "sharding"),
        ({"wire_dtype": "int4"}, "wire_dtype"),
        ({"wire_dtype": "int8", "wire_packing": True}, "wire_packing.*int8"),
        ({"out_of_range": "clip"}, "out_of_range"),
        ({"input_dim": 0}, "input_dim"),
        ({"kernel_regularizer": "l2"}, "data_parallel"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        layer(**arguments)


def test_width_of_ids_must_be_given():
    with pytest.raises(ValueError, match="input_dim"):
        FullSparse(3)(tf.constant([1], tf.int64))


def test_what_a_trained_layer_gives_is_refused():
    dense = tf.keras.layers.Dense(ROWS)
    with tf.GradientTape() as tape:
        outputs = layer()(dense(tf.ones([2, 3])))
    with pytest.raises(LookupError, match="what computes them would not"):
        tape.gradient(outputs, dense.trainable_variables)


def test_xla_is_refused_by_name():
    made = layer(name="sparse")
    ids = tf.ragged.constant(IDS, tf.int64)
    message = r"Layer 'sparse' .* Leave jit_compile out"
    with pytest.raises(ValueError, match=message):
        tf.function(lambda: made(ids), jit_compile=True)()
    inner = tf.function(lambda: made(ids))
    with pytest.raises(ValueError, match=message):
        tf.function(lambda: inner(), jit_compile=True)()


def test_regularizers_of_a_replicated_layer():
    made = layer(
        sharding="replicated", kernel_regularizer="l2", bias_regularizer="l1"
    )
    made(tf.constant([1], tf.int64))
    kernel = np.array(made.kernel)
    total = 0.01 * (kernel**2).sum() + 0.01 * UNITS * (1 / UNITS)
    np.testing.assert_allclose(sum(made.losses), total, rtol=1e-5)


def test_mixed_precision_keeps_a_float32_table():
    made = layer(dtype="mixed_bfloat16")
    outputs = made(tf.ragged.constant(IDS, dtype=tf.int64))
    assert outputs.dtype == tf.bfloat16
    assert made.kernel.dtype == "float32" or made.kernel.dtype == tf.float32


@pytest.mark.parametrize(
    ("short", "full"),
    [
        ("row", "row_wise"),
        ("column", "column_wise"),
        ("table", "table_wise"),
        ("replicated", "data_parallel"),
    ],
)
def test_placements_have_two_names(short, full):
    assert layer(sharding=short).get_config()["sharding"] == full
    assert layer(sharding=full).get_config()["sharding"] == full
    assert TableConfig("t", 9, 4, placement=short).placement == full


def test_config_round_trip():
    made = layer(activation="relu", sharding="column", wire_dtype="bfloat16")
    again = FullSparse.from_config(made.get_config())
    assert again.get_config() == made.get_config()


def test_whole_model_saves_and_loads(tmp_path):
    ids = keras.Input([3], dtype="int64")
    model = keras.Sequential([ids, layer(), keras.layers.Dense(1)])
    batch = tf.constant([[1, 2, 3]], tf.int64)
    before = model(batch)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(again(batch), before)


def test_symbolic_inputs_of_every_kind_train():
    sparse = keras.Input([ROWS], sparse=True, name="sparse")
    ragged = keras.Input([None], ragged=True, dtype="int64", name="ragged")
    weights = keras.Input([None], ragged=True, name="weights")
    hidden = keras.layers.Concatenate()(
        [
            layer(input_dim=None, name="a")(sparse),
            layer(name="b")(ragged),
            layer(name="c")([ragged, weights]),
        ]
    )
    model = keras.Model(
        {"sparse": sparse, "ragged": ragged, "weights": weights},
        keras.layers.Dense(1)(hidden),
    )
    model.compile("adam", "mse")
    batch = {
        "sparse": tf.sparse.from_dense(tf.eye(4, ROWS)),
        "ragged": tf.ragged.constant(IDS, dtype=tf.int64),
        "weights": tf.ragged.constant(WEIGHTS, dtype=tf.float32),
    }
    dataset = tf.data.Dataset.from_tensors((batch, tf.ones([4, 1])))
    losses = model.fit(dataset.repeat(20), epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]


def test_learnt_ids_are_refused_and_old_configs_are_read():
    layer = FullSparse(3, 9, name="old")
    config = {**layer.get_config(), "learn_frequent_ids": False}
    assert FullSparse.from_config(config).get_config() == layer.get_config()
    message = "`learn_frequent_ids` was removed.*layer 'old'.*wire_packing"
    with pytest.raises(ValueError, match=message):
        FullSparse(3, 9, name="old", learn_frequent_ids=True)
    with pytest.raises((ValueError, TypeError), match=message):  # of Keras
        FullSparse.from_config({**config, "learn_frequent_ids": True})
