# SPDX-License-Identifier: Apache-2.0
"""Copies of models, by Python's means and by Keras's, at several ranks."""

import copy
import pickle

import numpy as np
import pytest
import tensorflow as tf
from overlap_scenarios import DIM
from overlap_scenarios import ROWS

import tfdist_ext
from tfdist_ext.layers import DistributedEmbedding
from tfdist_ext.layers import FeatureConfig
from tfdist_ext.layers import FullSparse
from tfdist_ext.layers import TableConfig

keras = tf.keras
IDS = np.random.default_rng(5).integers(0, ROWS, [12, 2])


def make_model(strategy, partitioned):
    """A model without tables of its own, or with two partitioned ones."""
    with strategy.scope():
        ids = keras.Input((2,), dtype="int64")
        if partitioned:
            table = TableConfig("t", ROWS, DIM, placement="column_wise")
            feature = FeatureConfig("f", table, (None, 2), (None, DIM))
            one = DistributedEmbedding(feature, name="embedding")(ids)
            other = FullSparse(DIM, ROWS, sharding="row", name="sparse")(ids)
            hidden = keras.layers.Add()([one, other])
        else:
            hidden = keras.layers.Embedding(ROWS, DIM)(ids)
            hidden = keras.layers.Flatten()(hidden)
        model = keras.Model(ids, keras.layers.Dense(1)(hidden))
        model.compile(tfdist_ext.optimizers.Adagrad(0.1), "mse")
    fit(model)
    return model


def fit(model):
    model.fit(IDS, np.ones([12, 1]), batch_size=12, verbose=0)


def results(model):
    return model.predict(IDS, batch_size=12, verbose=0)


def copies(strategy, folder):
    """Partitioned tables are copied by clone_model; others are refused."""
    model = make_model(strategy, partitioned=True)
    layers = [model.get_layer(name) for name in ("embedding", "sparse")]
    for whole in (model, *layers, model.optimizer):
        for way in (copy.deepcopy, copy.copy, pickle.dumps):
            with pytest.raises(ValueError, match="cannot be copied or pick"):
                way(whole)
    with strategy.scope():
        clone = keras.models.clone_model(model)
        clone.compile(tfdist_ext.optimizers.Adagrad(0.1), "mse")
    before = results(model)
    assert not np.allclose(results(clone), before)
    clone.set_weights(model.get_weights())
    # Only nearly: its lookups may take another way, that of its own plan.
    np.testing.assert_allclose(results(clone), before, rtol=1e-6)
    fit(clone)
    assert not np.allclose(results(clone), before)
    np.testing.assert_array_equal(results(model), before)


def copies_without_tables(strategy, folder):
    """Whatever Keras copies in one process it copies on every rank."""
    model = make_model(strategy, partitioned=False)
    before = results(model)
    for way in (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))):
        with strategy.scope():
            again = way(model)
        np.testing.assert_array_equal(results(again), before)
        fit(again)
        np.testing.assert_array_equal(results(model), before)
