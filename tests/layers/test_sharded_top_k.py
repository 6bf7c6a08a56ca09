# SPDX-License-Identifier: Apache-2.0
"""An index of one process, against those of stock; its SavedModel."""

import json

import numpy as np
import pytest
import tensorflow as tf

from tfdist_ext.layers import Embedding
from tfdist_ext.layers import ShardedTopK

keras = tf.keras
RNG = np.random.default_rng(3)
ROWS = RNG.normal(size=[50, 6]).astype(np.float32)
QUERIES = tf.constant(RNG.normal(size=[4, 3, 6]).astype(np.float32))


def test_finds_what_keras_rs_finds():
    keras_rs = pytest.importorskip("keras_rs")  # needs Python 3.11
    ids = np.arange(50, dtype=np.int32) * 3
    ours = ShardedTopK(ROWS, ids, k=7)
    theirs = keras_rs.layers.BruteForceRetrieval(ROWS, ids, k=7)
    for found, expected in zip(ours(QUERIES), theirs(QUERIES), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    ours.update_candidates(ROWS[::-1].copy(), ids)
    theirs.update_candidates(ROWS[::-1].copy(), ids)
    np.testing.assert_array_equal(ours(QUERIES)[1], theirs(QUERIES)[1])


def test_half_precision_is_scored_in_single():
    scores, _ = ShardedTopK(ROWS, k=3)(tf.cast(QUERIES, tf.bfloat16))
    assert scores.dtype == tf.float32


def test_is_a_layer_of_a_functional_model_and_its_config():
    inputs = keras.Input([], dtype="int64")
    table = Embedding(50, 6)
    index = ShardedTopK(table, k=4, return_scores=False, query_model=None)
    model = keras.Model(inputs, index(table(inputs)))
    assert model.output.shape == (None, 4)
    found = model.predict(np.arange(50), verbose=0)
    assert found.dtype == np.int64
    again = ShardedTopK.from_config(index.get_config())
    assert (again.k, again.return_scores) == (4, False)


def test_a_config_has_the_query_model():
    query = keras.Sequential([keras.Input([5]), keras.layers.Dense(6)])
    index = ShardedTopK(ROWS, k=4, query_model=query)
    again = ShardedTopK.from_config(json.loads(json.dumps(index.get_config())))
    assert again.query_model.output_shape == (None, 6)
    assert again.query_model.layers[-1].units == 6


def finding(index):
    signature = [tf.TensorSpec([None, 6])]
    return tf.function(lambda queries: index(queries), signature)


def test_is_a_saved_model_in_one_process(tmp_path):
    table = Embedding(50, 6)
    users = keras.Sequential([keras.layers.Dense(6)])
    titles = np.array([f"title {i}" for i in range(50)])
    table(tf.constant([1]))
    for index in (ShardedTopK(table, titles), ShardedTopK(ROWS, titles)):
        index.query_model = users
        module = tf.Module()
        module.index = index
        module.find = finding(index)
        expected = module.find(QUERIES[0])
        tf.saved_model.save(module, str(tmp_path / index.name))
        loaded = tf.saved_model.load(str(tmp_path / index.name))
        for found, value in zip(loaded.find(QUERIES[0]), expected, strict=True):
            np.testing.assert_array_equal(found, value)
