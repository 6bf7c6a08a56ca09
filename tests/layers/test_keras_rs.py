# SPDX-License-Identifier: Apache-2.0
"""Programs and configs of keras-rs, whose classes have the same names."""

import copy
import json

import numpy as np
import pytest
import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext import optimizers
from tfdist_ext.keras_internals import value_of
from tfdist_ext.layers import DistributedEmbedding
from tfdist_ext.layers import FeatureConfig
from tfdist_ext.layers import TableConfig

keras = tf.keras
# The initializer of its default, and an optimizer, as Keras 3 writes them.
SCALED = {
    "module": "keras.initializers",
    "class_name": "VarianceScaling",
    "config": {
        "scale": 1.0,
        "mode": "fan_out",
        "distribution": "truncated_normal",
        "seed": None,
    },
    "registered_name": None,
}
ADAGRAD = {
    "module": "keras.optimizers",
    "class_name": "Adagrad",
    "config": {"name": "adagrad", "learning_rate": 0.25},
    "registered_name": None,
}
TABLE = {
    "name": "words",
    "vocabulary_size": 100,
    "embedding_dim": 4,
    "initializer": SCALED,
    "optimizer": ADAGRAD,
    "combiner": "sum",
    "placement": "auto",
    "max_ids_per_partition": 256,
    "max_unique_ids_per_partition": 256,
}
OTHER = {**TABLE, "name": "other", "optimizer": "adam"}
FEATURE = {
    "name": "title",
    "table": TABLE,
    "input_shape": [None, 2],
    "output_shape": [None, 4],
}
# Tables are a list, and a feature has the number of its own.
LAYER = {
    "name": "embedding",
    "trainable": True,
    "feature_configs": {
        "title": {**FEATURE, "table": 0},
        "more": [
            {**FEATURE, "name": "body", "table": 0},
            {**FEATURE, "name": "user", "table": 1},
        ],
    },
    "tables": [TABLE, OTHER],
    "table_stacking": "auto",
}
IDS = np.array([[1, 2], [3, 99]])

only_keras_3 = pytest.mark.skipif(
    not hasattr(keras, "ops"), reason="keras-rs is for Keras 3"
)


def check(layer, ids, title):
    found = title(layer(ids))
    rows = layer.get_embedding_tables()["words"].numpy()
    np.testing.assert_allclose(found, rows[IDS].sum(1), rtol=1e-5)
    assert 0.3 < rows.std() < 0.7  # 1 / sqrt(embedding_dim)


@only_keras_3
def test_a_feature_of_a_config():
    config = copy.deepcopy(FEATURE)
    feature = FeatureConfig.from_config(config)
    assert config == FEATURE
    layer = DistributedEmbedding(feature)
    again = DistributedEmbedding.from_config(layer.get_config())
    for each in (layer, again):
        check(each, IDS, lambda outputs: outputs)
        (table,) = each.table_variables()
        own = marks.own_optimizer(value_of(table))
        assert isinstance(own, optimizers.Adagrad)
        assert float(own.learning_rate) == 0.25


@only_keras_3
def test_a_layer_of_a_config():
    config = json.loads(json.dumps(LAYER))
    layer = DistributedEmbedding.from_config(config)
    assert config == LAYER and layer.name == "embedding"
    ids = {"title": IDS, "more": [IDS, IDS]}
    check(layer, ids, lambda outputs: outputs["title"])
    check(layer, ids, lambda outputs: outputs["more"][0])
    assert list(layer.get_embedding_tables()) == ["words", "other"]
    again = DistributedEmbedding.from_config(layer.get_config())
    assert again.get_config() == layer.get_config()


@pytest.mark.parametrize(
    ("kind", "config"), [(TableConfig, TABLE), (FeatureConfig, FEATURE)]
)
def test_unknown_fields_are_named(kind, config):
    with pytest.raises(ValueError, match=r"does not know \['sparse_core'\]"):
        kind.from_config({**config, "sparse_core": 1})


def test_there_are_no_sparsecores():
    assert DistributedEmbedding.has_sparsecores() is False


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_ids_and_weights_are_one_input_of_a_model(dtype):
    table = TableConfig("t", 100, 4, combiner="sum")
    layer = DistributedEmbedding(
        {"a": FeatureConfig("a", table, (None, 2), (None, 4))}
    )
    ids = keras.Input((2,), dtype="int64")
    given = keras.Input((2,), dtype=dtype)
    outputs = layer({"ids": {"a": ids}, "weights": {"a": given}})
    model = keras.Model([ids, given], outputs["a"])
    weights = np.array([[2, 1], [0, 3]], dtype)
    found = model.predict([IDS, weights], verbose=0)
    rows = layer.get_embedding_tables()["t"].numpy()
    expected = (rows[IDS] * weights[..., None]).sum(1)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("combiner", ["mean", "sqrtn"])
def test_weights_that_cancel_out(combiner):
    table = TableConfig("t", 100, 4, combiner=combiner)
    layer = DistributedEmbedding(FeatureConfig("f", table, (None,), (None, 4)))
    found = layer(np.array([5, 5, 5]), np.array([2.0, 0.0, -2.0]))
    row = layer.get_embedding_tables()["t"].numpy()[5]
    sign = 1 if combiner == "mean" else -1
    np.testing.assert_allclose(found, [row, 0 * row, sign * row], rtol=1e-5)
