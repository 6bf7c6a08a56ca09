# SPDX-License-Identifier: Apache-2.0
"""SharedExchange in one process: results, config, checkpoints, errors."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist_ext.layers import FullSparse
from tfdist_ext.layers import SharedExchange
from tfdist_ext.tables.placement import TablePlacement

keras = tf.keras
IDS = [
    tf.constant([[3, 4], [0, 0]], tf.int64),
    tf.ragged.constant([[7], [1, 2, 3]], dtype=tf.int32),
]


def layers(value=0.5):
    initializer = keras.initializers.RandomNormal(0.0, value, seed=1)
    return [
        FullSparse(
            4,
            100,
            activation="relu",
            sharding=TablePlacement.grid(2, 2, True),
            kernel_initializer=initializer,
            name="wide",
        ),
        FullSparse(3, 50, kernel_initializer=initializer, name="deep"),
    ]


def check_equal(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(mine, other)


def test_results_are_those_of_each_layer_alone():
    shared, alone = SharedExchange(layers()), layers()
    outputs = shared(IDS)
    assert [output.shape[1] for output in outputs] == [4, 3]
    pairs = zip(alone, IDS, strict=True)
    check_equal(outputs, [layer(ids) for layer, ids in pairs])
    assert len(shared.trainable_variables) == 4


def test_config_makes_the_same_layer():
    layer = SharedExchange(layers(), name="both")
    copy = SharedExchange.from_config(layer.get_config())
    assert copy.get_config() == layer.get_config()
    assert [part.name for part in copy.layers] == ["wide", "deep"]
    assert copy.layers[0].sharding == TablePlacement.grid(2, 2, True)
    check_equal(copy(IDS), layer(IDS))


def test_checkpoints_hold_its_layers(tmp_path):
    layer, other = SharedExchange(layers()), SharedExchange(layers(0.1))
    wanted = layer(IDS)
    other(IDS)
    path = tf.train.Checkpoint(layer).write(str(tmp_path / "saved"))
    tf.train.Checkpoint(other).read(path).assert_consumed()
    check_equal(other(IDS), wanted)


@pytest.mark.skipif(not hasattr(keras, "ops"), reason=".keras is of Keras 3")
def test_saved_and_loaded_whole(tmp_path):
    inputs = [keras.Input([2], dtype="int64") for _ in range(2)]
    model = keras.Model(inputs, SharedExchange(layers())(inputs))
    model.save(tmp_path / "model.keras")
    copy = keras.models.load_model(tmp_path / "model.keras")
    ids = [np.array([[1, 2]]), np.array([[3, 4]])]
    check_equal(model.predict(ids), copy.predict(ids))


def test_mistakes_are_explained():
    with pytest.raises(ValueError, match="with an `input_dim`"):
        SharedExchange([FullSparse(3)])
    with pytest.raises(ValueError, match="with an `input_dim`"):
        SharedExchange([keras.layers.Dense(3)])
    with pytest.raises(ValueError, match="at least one layer"):
        SharedExchange([])
    with pytest.raises(ValueError, match="all with equal"):
        SharedExchange([FullSparse(3, 9), FullSparse(3, 9, wire_packing=True)])
    with pytest.raises(ValueError, match="one input for each of its 2"):
        SharedExchange(layers())([*IDS, IDS[0]])
