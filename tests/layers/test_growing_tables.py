# SPDX-License-Identifier: Apache-2.0
"""Layers whose vocabularies grow, in one process."""

import numpy as np
import pytest
import tensorflow as tf

import tfdist_ext
from tfdist_ext.layers import DistributedEmbedding
from tfdist_ext.layers import DynamicVocabulary
from tfdist_ext.layers import Embedding
from tfdist_ext.layers import FeatureConfig
from tfdist_ext.layers import FullSparse
from tfdist_ext.layers import ShardedTopK
from tfdist_ext.layers import TableConfig
from tfdist_ext.ops import vocabulary_ops

keras = tf.keras
DIM = 4


class InTwoBuckets(DynamicVocabulary):
    """Of few keys all the same."""

    buckets = 2


def layer_of(vocabulary, combiner="sum", initializer="ones", **kwargs):
    table = TableConfig(
        "t",
        embedding_dim=DIM,
        combiner=combiner,
        initializer=initializer,
        vocabulary=vocabulary,
    )
    config = FeatureConfig("a", table, (None, None), (None, DIM))
    return DistributedEmbedding({"a": config}, **kwargs)


def learn(layer, keys, optimizer=None):
    """A step on keys; the results, one number of each sample."""
    with tf.GradientTape() as tape:
        found = layer({"a": keys})["a"]
        loss = tf.reduce_sum(found)
    # Which ends the step: its keys may be evicted.
    optimizer = optimizer or tfdist_ext.optimizers.SGD(0.0)
    weights = layer.trainable_variables
    optimizer.apply_gradients(
        zip(tape.gradient(loss, weights), weights, strict=True)
    )
    return found.numpy()[:, 0].tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity": 0}, "capacity=0"),
        ({"capacity": float("nan")}, "capacity=nan"),
        ({"capacity": 2**31 - 1}, "at most 2147483646"),
        ({"min_count": 0}, "min_count=0"),
        ({"evict": "random"}, r"\('lru', 'lfu'\).*evict='random'"),
        ({"steps_to_live": 0}, "steps_to_live=0"),
        ({"steps_to_live": 1.5}, "steps_to_live=1.5"),
        ({"key_dtype": "int32"}, "key_dtype='int32'"),
        ({"full": None}, "full=None"),
        ({"unadmitted": "ones"}, "unadmitted='ones'"),
        ({"keep_text": 1}, "keep_text=1"),
        ({"keep_text": True}, "not strings.*key_dtype='int64'"),
    ],
)
def test_wrong_vocabularies_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        DynamicVocabulary(**{"capacity": 10, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"vocabulary": 10}, "must be a DynamicVocabulary.*vocabulary=10"),
        ({"vocabulary_size": 10}, r"left out.*capacity=10 \(table 't'\)"),
        ({"out_of_range": "ignore"}, "every key is in range"),
        ({"embedding_dim": 0}, "embedding_dim=0"),
    ],
)
def test_wrong_tables_are_refused(arguments, message):
    right = {"embedding_dim": 4, "vocabulary": DynamicVocabulary(10)}
    with pytest.raises(ValueError, match=message):
        TableConfig("t", **{**right, **arguments})


def test_layers_of_one_table_name_the_one_that_grows():
    for make in (
        lambda: Embedding(DynamicVocabulary(10), 4),
        lambda: FullSparse(4, DynamicVocabulary(10)),
    ):
        with pytest.raises(ValueError, match="DistributedEmbedding"):
            make()


def test_keys_get_rows_in_training_and_others_get_none():
    layer = layer_of(DynamicVocabulary(9), combiner="mean")
    keys = tf.constant([[7, -(2**62)], [2**62, 7]])
    assert layer({"a": keys})["a"].numpy().tolist() == [[0.0] * DIM] * 2
    assert learn(layer, keys) == [1.0, 1.0]
    # A key without a row has one of zeros, in the mean as well.
    assert layer({"a": tf.constant([[7, 5]])})["a"].numpy()[0, 0] == 0.5
    found = layer.get_vocabularies()["t"]
    assert found["keys"].tolist() == [-(2**62), 7, 2**62]
    assert found["rows"].tolist() == [1, 2, 3]
    assert found["counts"].tolist() == [1, 2, 1]
    counts = layer.vocabulary_counts()["t"]
    assert counts["rows"] == counts["admitted"] == 3 and counts["step"] == 1
    training = layer({"a": tf.constant([[8, 8]])}, training=True)["a"]
    assert training.numpy()[0, 0] == 1.0  # without a tape


def test_a_key_is_admitted_when_it_was_seen_often_enough():
    layer = layer_of(DynamicVocabulary(9, 3, unadmitted="shared_row"))
    optimizer = tfdist_ext.optimizers.SGD(1.0)
    keys = tf.constant([[1], [2], [1]])
    assert learn(layer, keys, optimizer) == [1.0, 1.0, 1.0]  # row 0
    assert layer.vocabulary_counts()["t"]["candidates"] == 2
    assert learn(layer, keys, optimizer) == [1.0, -2.0, 1.0]
    assert layer.get_vocabularies()["t"]["keys"].tolist() == [1]


def test_rows_and_slots_of_evicted_keys_begin_anew():
    kinds = {
        "momentum": lambda: tfdist_ext.optimizers.SGD(1.0, momentum=0.5),
        "adagrad": lambda: tfdist_ext.optimizers.RowWiseAdagrad(1.0),
        "adam": lambda: tfdist_ext.optimizers.Adam(1.0),
        "ftrl": lambda: tfdist_ext.optimizers.Ftrl(1.0),
    }
    for name, make in kinds.items():
        layer = layer_of(DynamicVocabulary(2, evict="lru"))
        optimizer = make()
        for key in (1, 1, 2, 1):
            learn(layer, tf.constant([[key]]), optimizer)
        rows = layer.get_embedding_tables()["t"]
        slots = [
            variable.numpy()
            for variable in optimizer.variables
            if tuple(variable.shape[:1]) == (3,)
        ]
        fresh = [slot[0] for slot in slots]
        assert learn(layer, tf.constant([[3]]), None) == [1.0], name
        assert layer.get_vocabularies()["t"]["keys"].tolist() == [1, 3]
        # Nothing but the row of key 2 has changed, which is 3's now.
        again = layer.get_embedding_tables()["t"]
        np.testing.assert_array_equal(again[:2], rows[:2])
        learn(layer, tf.constant([[1]]), optimizer)  # takes the resets
        for variable, first in zip(
            [v for v in optimizer.variables if tuple(v.shape[:1]) == (3,)],
            fresh,
            strict=True,
        ):
            np.testing.assert_array_equal(variable.numpy()[2], first, name)
        assert slots


def test_strings_are_keys_of_any_kind_of_input():
    layer = layer_of(DynamicVocabulary(9, key_dtype="string"))
    ragged = tf.ragged.constant([["a", "b", "a"], [], ["ü"]])
    assert learn(layer, ragged) == [3.0, 0.0, 1.0]
    dense = layer({"a": np.array([["ü", "new"]])})["a"]
    assert dense.numpy()[0, 0] == 1.0
    assert learn(layer, ragged.to_sparse()) == [3.0, 0.0, 1.0]
    assert layer.get_vocabularies()["t"]["counts"].sum() == 8
    with pytest.raises(ValueError, match=r"'string'.*Received.*int32"):
        layer({"a": tf.constant([[1]])})
    with pytest.raises(ValueError, match=r"ids.*Received.*string"):
        layer_of(DynamicVocabulary(9))({"a": tf.constant([["a"]])})


def test_texts_are_kept_as_long_as_their_keys():
    def make(capacity):
        vocabulary = DynamicVocabulary(
            capacity, evict="lru", key_dtype="string", keep_text=True
        )
        return layer_of(vocabulary)

    layer = make(3)
    learn(layer, tf.constant([["old"], ["ü"], [""]]))
    layer({"a": tf.constant([["not seen in training"]])})
    learn(layer, tf.constant([["ü"], ["a" * 99], [""]]))
    kept = {"ü".encode(), b"a" * 99, b""}
    found = layer.get_vocabularies()["t"]
    assert set(found["texts"]) == kept and len(found["rows"]) == 3
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"\[1\], \[2\]"):
        keys = layer.keys_t
        vocabulary_ops.store_texts(keys.handle, [1], ["x", "y"])
    files = {}
    layer.save_own_variables(files)
    other = make(3)
    learn(other, tf.constant([["other"]]))
    other.load_own_variables(files)
    again = other.get_vocabularies()["t"]
    assert again["texts"].tolist() == found["texts"].tolist()
    copied = other.keys_t.copy()
    learn(other, tf.constant([["b"], ["c"], ["d"]]))
    assert set(other.get_vocabularies()["t"]["texts"]) == {b"b", b"c", b"d"}
    other.keys_t.put_back(copied)
    assert set(other.get_vocabularies()["t"]["texts"]) == kept


def test_rows_of_a_step_that_has_failed_begin_anew():
    layer = layer_of(DynamicVocabulary(2, evict="lru"))
    optimizer = tfdist_ext.optimizers.SGD(1.0)
    assert learn(layer, tf.constant([[1], [2]]), optimizer) == [1.0, 1.0]
    # Two of these get the rows of 1 and 2.
    with pytest.raises(tf.errors.FailedPreconditionError, match="no row"):
        learn(layer, tf.constant([[3], [4], [5]]))
    layer({"a": tf.constant([[6]])})
    assert learn(layer, tf.constant([[3], [4]])) == [1.0, 1.0]
    learn(layer, tf.constant([[3], [4]]), optimizer)
    assert learn(layer, tf.constant([[3], [4]])) == [0.0, 0.0]  # once only


def test_keys_that_are_no_numbers_are_refused():
    layer = layer_of(DynamicVocabulary(9))
    for bad in (float("nan"), 0.5):
        with pytest.raises(tf.errors.InvalidArgumentError, match="whole"):
            layer({"a": tf.constant([[bad]])})


def test_a_model_is_saved_with_its_keys(tmp_path):
    def make():
        ids = keras.Input([2], dtype="int64")
        layer = layer_of(
            DynamicVocabulary(50, 2), initializer="uniform", name="e"
        )
        rows = layer({"a": ids})["a"]
        model = keras.Model(ids, keras.layers.Dense(1)(rows))
        model.compile(tfdist_ext.optimizers.Adagrad(0.1), "mse")
        return model

    model = make()
    ids = np.array([[5, 6], [6, 7], [5, 5], [8, 9]])
    model.fit(ids, np.ones([4, 1]), verbose=0)
    path = str(tmp_path / "model.keras")
    model.save(path)
    other = make()
    model.save_weights(tmp_path / "x.weights.h5")
    other.load_weights(tmp_path / "x.weights.h5")
    for again in (keras.models.load_model(path), other):
        np.testing.assert_array_equal(again.predict(ids), model.predict(ids))
        found = again.get_layer("e").get_vocabularies()["t"]
        assert found["keys"].tolist() == [5, 6]
        counts = again.get_layer("e").vocabulary_counts()["t"]
        assert counts["candidates"] == 3


def test_what_cannot_be_is_refused_by_name():
    vocabulary = DynamicVocabulary(9, evict="lru")
    matrix = keras.initializers.Constant(np.ones([10, DIM]))
    with pytest.raises(ValueError, match=r"Table 't' gives the rows.*evict"):
        layer_of(vocabulary, initializer=matrix).build()
    layer = layer_of(DynamicVocabulary(9))
    layer.build()
    with pytest.raises(ValueError, match="rows without a key"):
        ShardedTopK(k=2).index(layer)(tf.ones([1, DIM]))


def forget_secret(layer):
    """Makes the vocabulary as empty as earlier versions made it."""
    layer.build()
    handle = layer.keys_t.handle
    arrays = [
        tf.zeros_like(each) for each in vocabulary_ops.export_keys(handle)
    ]
    buckets = len(arrays[1])
    zeros = tf.zeros([2], tf.int64)
    vocabulary_ops.import_keys(handle, buckets, zeros, 0, arrays)


def test_keys_of_earlier_versions_keep_their_rows():
    def make():
        vocabulary = InTwoBuckets(600, 2)
        return layer_of(vocabulary, initializer="uniform")

    keys = np.arange(300)[:, np.newaxis]
    old = make()
    forget_secret(old)
    for part in (keys[:200], keys[:100]):
        learn(old, part)
    files = {}
    old.save_own_variables(files)
    step = files["keys of t: step"]
    assert step[0].tolist() == [2, 0, 0]
    files["keys of t: step"] = step[:, 0]  # as they saved it
    new = make()
    learn(new, keys)
    new.load_own_variables(files)
    for layer in (old, new):
        learn(layer, keys[100:])
    assert new.vocabulary_counts()["t"]["step"] == 3
    found, expected = (layer.get_vocabularies()["t"] for layer in (new, old))
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)
    assert len(found["keys"]) == 200


@pytest.mark.parametrize("secret", [True, False])
def test_a_served_key_without_a_row_shares_one_where_its_bucket_is_full(
    tmp_path, secret
):
    vocabulary = InTwoBuckets(8192, full="shared_row")
    layer = layer_of(vocabulary, initializer="uniform")
    if not secret:
        forget_secret(layer)
    keys = np.arange(2 * 4096 + 100)[:, np.newaxis]
    layer({"a": keys[:-100]}, training=True)
    model = keras.Sequential([layer])
    rows = model({"a": keys})["a"].numpy()
    tfdist_ext.export(model, tmp_path / "e", inputs={"a": keys})
    served = tf.saved_model.load(str(tmp_path / "e"))
    np.testing.assert_array_equal(served.serve({"a": keys})["a"], rows)
    shared = layer.get_embedding_tables()["t"][0].numpy()
    late = [row.tolist() for row in rows[-100:]]
    assert 20 < late.count(shared.tolist()) < 80
    assert late.count([0.0] * DIM) == 100 - late.count(shared.tolist())


def twice(layer, keys, how):
    """Looks up in two graphs of one step, under the tape of the caller."""

    @tf.function
    def function(part):
        return layer({"a": part})["a"]

    def branch(part):
        return tf.cond(
            tf.size(part) > 0,
            lambda: layer({"a": part})["a"],
            lambda: tf.zeros([tf.shape(part)[0], DIM]),
        )

    def plain(part):
        return layer({"a": part})["a"]

    ways = {
        "eager": (plain, plain),
        "function": (function, function),
        "branch": (plain, branch),
        "branches": (branch, branch),
    }
    return [way(part) for way, part in zip(ways[how], keys, strict=True)]


@pytest.mark.parametrize("how", ["eager", "function", "branch", "branches"])
@pytest.mark.parametrize("graph", [False, True])
def test_keys_of_a_step_are_not_evicted_before_their_gradients(how, graph):
    """Lookups of one step advance the clock once, whatever graphs they are in.

    There are rows for the first lookup only: the second one's keys share one.
    """
    layer = layer_of(DynamicVocabulary(2, evict="lru", full="shared_row"))
    layer.build({"a": (None, 1)})
    optimizer = tfdist_ext.optimizers.SGD(1.0)
    optimizer.build(layer.trainable_variables)

    def step(first, second):
        with tf.GradientTape() as tape:
            found = twice(layer, [first, second], how)
            loss = 3 * tf.reduce_sum(found[0]) + tf.reduce_sum(found[1])
        weights = layer.trainable_variables
        gradients = tape.gradient(loss, weights)
        optimizer.apply_gradients(zip(gradients, weights, strict=True))

    run = tf.function(step) if graph else step
    run(tf.constant([[1], [2]]), tf.constant([[3], [4]]))
    found = layer.get_vocabularies()["t"]
    assert found["keys"].tolist() == [1, 2]
    assert layer.vocabulary_counts()["t"]["step"] == 1
    table = layer.get_embedding_tables()["t"]
    np.testing.assert_allclose(table[1:, 0], [-2.0, -2.0])
    np.testing.assert_allclose(table[0, 0], 1.0 - 2.0)
    run(tf.constant([[5], [6]]), tf.constant([[5], [6]]))
    assert layer.vocabulary_counts()["t"]["step"] == 2
    assert layer.get_vocabularies()["t"]["keys"].tolist() == [5, 6]
