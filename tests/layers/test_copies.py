# SPDX-License-Identifier: Apache-2.0
"""Copies of models and layers in one process."""

import contextlib
import copy
import pickle

import numpy as np
import pytest
import tensorflow as tf

import tfdist_ext
from tfdist_ext.layers import DistributedEmbedding
from tfdist_ext.layers import FeatureConfig
from tfdist_ext.layers import FullSparse
from tfdist_ext.layers import TableConfig

keras = tf.keras
IDS = np.array([[1, 2], [3, 99]])
WAYS = [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))]


def make_model():
    ids = keras.Input((2,), dtype="int64")
    table = TableConfig("t", 100, 4)
    feature = FeatureConfig("f", table, (None, 2), (None, 4))
    one = DistributedEmbedding(feature, name="embedding")(ids)
    other = FullSparse(4, 100, name="sparse")(ids)
    hidden = keras.layers.Add()([one, other])
    model = keras.Model(ids, keras.layers.Dense(1)(hidden))
    model.compile(tfdist_ext.optimizers.Adagrad(0.1), "mse")
    model.fit(IDS, np.ones([2, 1]), verbose=0)
    return model


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("strategy", [False, True])
def test_models(way, strategy):
    scope = contextlib.nullcontext()
    if strategy:
        scope = tfdist_ext.HybridParallelStrategy().scope()
    with scope:
        model = make_model()
        again = way(model)
        before = model.predict(IDS, verbose=0)
        np.testing.assert_array_equal(again.predict(IDS, verbose=0), before)
        again.fit(IDS, np.zeros([2, 1]), verbose=0)
    np.testing.assert_array_equal(model.predict(IDS, verbose=0), before)
    assert not np.allclose(again.predict(IDS, verbose=0), before)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["embedding", "sparse"])
def test_layers(way, name):
    layer = make_model().get_layer(name)
    np.testing.assert_array_equal(way(layer)(IDS), layer(IDS))


def test_clones_have_fresh_weights():
    model = make_model()
    clone = keras.models.clone_model(model)
    before = model.predict(IDS, verbose=0)
    assert not np.allclose(clone.predict(IDS, verbose=0), before)
    clone.set_weights(model.get_weights())
    np.testing.assert_array_equal(clone.predict(IDS, verbose=0), before)
