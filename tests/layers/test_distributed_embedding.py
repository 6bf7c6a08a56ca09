# SPDX-License-Identifier: Apache-2.0
"""DistributedEmbedding in one process: inputs, combiners, errors, saving."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist_ext import HybridParallelStrategy
from tfdist_ext.layers import DistributedEmbedding
from tfdist_ext.layers import FeatureConfig
from tfdist_ext.layers import TableConfig
from tfdist_ext.tables.placement import TablePlacement
from tfdist_ext.tables.plan import plan

keras = tf.keras
ROWS, DIM = 50, 6
IDS = [[3, 7, 3], [], [49], [0, 1, 2, 3]]
WEIGHTS = [[0.5, 1.0, 2.0], [], [1.5], [1.0, 2.0, 3.0, 4.0]]


def table(name="table", **arguments):
    arguments.setdefault("vocabulary_size", ROWS)
    arguments.setdefault("embedding_dim", DIM)
    arguments.setdefault("initializer", keras.initializers.RandomNormal(seed=1))
    return TableConfig(name, **arguments)


def feature(name, of, hotness=None):
    return FeatureConfig(name, of, (None, hotness), (None, of.embedding_dim))


def single(**arguments):
    return DistributedEmbedding(feature("f", table(**arguments), 3))


def expected(rows, ids, weights=None, combiner="mean"):
    result = np.zeros([len(ids), rows.shape[1]])
    for s, sample in enumerate(ids):
        weight = np.ones(len(sample)) if weights is None else weights[s]
        weight = np.asarray(weight, np.float64)
        total = (weight[:, None] * rows[sample]).sum(0) if sample else 0
        divisor = {
            "sum": 1,
            "mean": weight.sum(),
            "sqrtn": np.sqrt((weight**2).sum()),
        }[combiner]
        result[s] = total / divisor if sample else 0
    return result


def ragged(lists, dtype):
    return tf.ragged.constant(lists, dtype=dtype)


def sparse(lists, dtype):
    return ragged(lists, dtype).to_sparse()


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("make", [ragged, sparse])
def test_ids_with_and_without_weights(make, weighted, combiner):
    layer = single(combiner=combiner)
    weights = make(WEIGHTS, tf.float32) if weighted else None
    outputs = layer(make(IDS, tf.int64), weights=weights)
    rows = layer.get_embedding_tables()["table"].numpy()
    wanted = expected(rows, IDS, WEIGHTS if weighted else None, combiner)
    np.testing.assert_allclose(outputs, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64])
def test_dense_ids(dtype):
    layer = single(combiner="mean")
    rows = layer(tf.constant([[4], [0]], dtype))
    one = layer(tf.constant([4, 0], dtype))
    np.testing.assert_array_equal(rows, one)
    many = layer(
        tf.constant([[4, 4], [0, 49]], dtype),
        weights=tf.constant([[1.0, 2.0], [3.0, 1.0]]),
    )
    tables = layer.get_embedding_tables()["table"].numpy()
    wanted = expected(tables, [[4, 4], [0, 49]], [[1, 2], [3, 1]])
    np.testing.assert_allclose(many, wanted, rtol=1e-5, atol=1e-6)


def test_nested_features_share_a_table():
    shared, other = table("shared"), table("other", embedding_dim=2)
    layer = DistributedEmbedding(
        {
            "user": [feature("a", shared), feature("b", other)],
            "item": (feature("c", shared),),
        }
    )
    ids = tf.constant([1, 2, 3])
    outputs = layer({"user": [ids, ids + 1], "item": (ids,)})
    assert set(outputs) == {"user", "item"}
    assert isinstance(outputs["item"], tuple)
    np.testing.assert_array_equal(outputs["user"][0], outputs["item"][0])
    assert outputs["user"][1].shape == (3, 2)
    assert len(layer.trainable_variables) == 2
    assert [v.shape for v in layer.get_embedding_tables().values()] == [
        (ROWS, DIM),
        (ROWS, 2),
    ]


def test_gradients_equal_those_of_gather():
    shared = table("shared")
    layer = DistributedEmbedding(
        [feature("a", shared, 4), feature("b", shared)]
    )
    a, b = tf.constant([[1, 2, 2, 9], [0, 0, 0, 9]]), tf.constant([2, 9])
    layer.build()
    rows = tf.constant(layer.get_embedding_tables()["shared"])
    with tf.GradientTape() as tape:
        outputs = layer([a, b])
        loss = tf.add_n([tf.reduce_sum(o**2) for o in outputs])
    ours = tf.convert_to_tensor(
        tape.gradient(loss, layer.trainable_variables)[0]
    )
    with tf.GradientTape() as tape:
        tape.watch(rows)
        loss = tf.reduce_sum(tf.reduce_mean(tf.gather(rows, a), 1) ** 2)
        loss += tf.reduce_sum(tf.gather(rows, b) ** 2)
    wanted = tf.convert_to_tensor(tape.gradient(loss, rows))
    np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("policy", ["error", "ignore"])
def test_ids_out_of_range(policy):
    layer = single(out_of_range=policy)
    ids = ragged([[3, ROWS], [-1], [7]], tf.int64)
    if policy == "error":
        with pytest.raises(tf.errors.InvalidArgumentError, match="id 50"):
            layer(ids)
        return
    rows = layer.get_embedding_tables
    outputs = layer(ids)
    wanted = expected(rows()["table"].numpy(), [[3], [], [7]])
    np.testing.assert_allclose(outputs, wanted, rtol=1e-5, atol=1e-6)


def test_config_makes_the_same_layer():
    shared = table("shared", placement="row_wise", optimizer="sgd")
    forced = table("forced", placement=TablePlacement.grid(2, 2))
    features = [feature("a", shared, 4), feature("b", forced)]
    made = plan([shared, forced], features, 4)
    layer = DistributedEmbedding(
        {"x": features},
        wire_dtype="bfloat16",
        plan=made,
        name="emb",
    )
    copy = DistributedEmbedding.from_config(layer.get_config())
    assert copy.get_config() == layer.get_config()
    assert copy.plan == made
    ids = {"x": [tf.constant([[1, 2, 3, 4]]), tf.constant([7])]}
    for ours, theirs in zip(layer(ids)["x"], copy(ids)["x"], strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.skipif(not hasattr(keras, "ops"), reason=".keras is of Keras 3")
def test_saved_and_loaded_whole(tmp_path):
    shared = table("shared")
    inputs = {
        "a": keras.Input((4,), dtype="int64"),
        "b": keras.Input((), dtype="int64"),
    }
    outputs = DistributedEmbedding(
        {"a": feature("a", shared, 4), "b": feature("b", shared)}
    )(inputs)
    outputs = keras.layers.Concatenate()([outputs["a"], outputs["b"]])
    model = keras.Model(inputs, keras.layers.Dense(1)(outputs))
    model.save(tmp_path / "model.keras")
    copy = keras.models.load_model(tmp_path / "model.keras")
    ids = {"a": np.arange(8).reshape(2, 4), "b": np.array([1, 2])}
    np.testing.assert_array_equal(model.predict(ids), copy.predict(ids))


def test_preprocess_bundles_weights():
    layer = single(combiner="sum")
    ids, weights = tf.constant([[1, 2, 3]]), tf.constant([[1.0, 2.0, 0.0]])
    np.testing.assert_array_equal(
        layer(layer.preprocess(ids, weights)), layer(ids, weights=weights)
    )
    np.testing.assert_array_equal(layer(layer.preprocess(ids)), layer(ids))


@pytest.mark.parametrize("make", [ragged, sparse])
def test_weights_must_lie_where_their_ids_do(make):
    ids, weights = [[1, 2], [3]], [[0.1], [0.2, 0.3]]
    with pytest.raises(tf.errors.InvalidArgumentError, match="same positions"):
        single()(make(ids, "int64"), weights=make(weights, "float32"))


def test_tuples_may_come_back_as_lists():
    shared = table()
    layer = DistributedEmbedding((feature("a", shared), feature("b", shared)))
    config = {**layer.get_config(), "nest": [0, 1]}  # as JSON has it
    inputs = tf.constant([1]), tf.constant([2])
    for found in (
        layer(inputs),
        DistributedEmbedding.from_config(config)(inputs),
    ):
        assert len(found) == 2


def test_mistakes_are_explained():
    with pytest.raises(ValueError, match="nest of FeatureConfig"):
        DistributedEmbedding({"a": table()})
    with pytest.raises(ValueError, match="Two tables are named 'table'"):
        DistributedEmbedding(
            [feature("a", table()), feature("b", table(combiner="sum"))]
        )
    with pytest.raises(ValueError, match="must be distinct"):
        shared = table()
        DistributedEmbedding([feature("a", shared), feature("a", shared)])
    layer = DistributedEmbedding({"a": feature("a", table())})
    with pytest.raises(ValueError, match="must have the structure"):
        layer({"b": tf.constant([1])})
    with pytest.raises(ValueError, match="only 'ids' and 'weights'"):
        shared = table()
        DistributedEmbedding(
            {"ids": feature("a", shared), "weights": feature("b", shared)}
        )
    with pytest.raises(ValueError, match="has no tables yet"):
        DistributedEmbedding([feature("a", table())]).get_embedding_tables()
    with pytest.raises(ValueError, match="as their ids are"):
        layer(
            {"a": tf.constant([1])}, weights={"a": ragged([[1.0]], "float32")}
        )
    with pytest.raises(ValueError, match="int32 or int64"):
        layer({"a": tf.constant(["1"])})


def test_an_optimizer_that_would_ignore_the_tables_is_refused():
    strategy = HybridParallelStrategy()
    with strategy.scope():
        layer = single(optimizer="sgd")
        ids = keras.Input((3,), dtype="int64")
        model = keras.Sequential([ids, layer, keras.layers.Dense(1)])
        model.compile("adam", "mse")
    data = np.array([[1, 2, 3]]), np.array([[1.0]])
    with pytest.raises(ValueError, match="has an optimizer of its own"):
        model.fit(*data, verbose=0)
