# SPDX-License-Identifier: Apache-2.0
"""An optimizer for dense layers and one for tables, in one process."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist_ext import optimizers
from tfdist_ext.layers import FullSparse
from tfdist_ext.optimizers import Split

keras = tf.keras
KERAS_3 = hasattr(keras, "ops")
KIND = keras.optimizers.Lamb if KERAS_3 else keras.optimizers.Adafactor
IDS = np.random.default_rng(0).integers(0, 9, [16, 3])
LABELS = np.random.default_rng(1).normal(size=[16, 1]).astype(np.float32)


def make_model():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input([3], dtype="int64"),
            FullSparse(4, 9, use_bias=True),
            keras.layers.Dense(5, activation="relu"),
            keras.layers.Dense(1),
        ]
    )


def gradients(model):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(IDS) - LABELS) ** 2)
    return loss, tape.gradient(loss, model.trainable_variables)


def parts():
    options = {"weight_decay": 0.1, "clipnorm": 0.05}
    return KIND(0.02, **options), optimizers.Adagrad(0.1, clipvalue=0.001)


def weights(model):
    return [np.array(each) for each in model.get_weights()]


def trained(model, apply, steps=4):
    for _ in range(steps):
        apply(zip(gradients(model)[1], model.trainable_variables, strict=True))
    return weights(model)


def test_each_optimizer_trains_as_alone():
    """The table is the first variable; the bias of its layer is dense."""
    dense, tables = parts()

    def by_hand(pairs):
        first, *others = pairs
        tables.apply_gradients([first])
        dense.apply_gradients(others)

    expected = trained(make_model(), by_hand)
    split = Split(*parts())
    found = trained(make_model(), split.apply_gradients)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        np.testing.assert_allclose(a, b, 1e-6, 1e-7, err_msg=f"weight {i}")
    for each in (split, split.dense, split.tables):
        assert int(each.iterations) == 4


def test_averages_are_taken_at_the_end():
    """Dense variables become their averages, and the table does not."""
    found = []
    for averages in ({"use_ema": True, "ema_momentum": 0.5}, {}):
        model = make_model()
        model.compile(Split(KIND(0.02, **averages), "adagrad"), "mse")
        model.fit(IDS, LABELS, shuffle=False, epochs=2, verbose=0)
        found.append(weights(model))
    same = [np.array_equal(a, b) for a, b in zip(*found, strict=True)]
    assert same == [True, *[False] * 5]


def test_rate_of_the_model_is_that_of_dense_layers():
    split = Split(KIND(0.02), optimizers.Adagrad(0.1))
    assert float(split.learning_rate) == pytest.approx(0.02)
    split.learning_rate = 0.5
    assert float(split.dense.learning_rate) == pytest.approx(0.5)
    assert float(split.tables.learning_rate) == pytest.approx(0.1)


def test_config_round_trip():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.5)
    split = Split(KIND(schedule), optimizers.Adam(0.1, lazy=False), name="two")
    again = keras.optimizers.deserialize(keras.optimizers.serialize(split))
    assert isinstance(again, Split)
    assert again.get_config() == split.get_config()
    assert again.tables.lazy is False
    assert Split.from_config(split.get_config()).dense.name == split.dense.name


def test_a_file_of_keras_has_both_optimizers(tmp_path):
    model = make_model()
    model.compile(Split(*parts()), "mse")
    model.fit(IDS, LABELS, shuffle=False, epochs=3, verbose=0)
    path = str(tmp_path / "model.keras")
    model.save(path)
    again = keras.models.load_model(path)
    for each in (model, again):
        each.fit(IDS, LABELS, shuffle=False, epochs=1, verbose=0)
    for a, b in zip(weights(model), weights(again), strict=True):
        np.testing.assert_allclose(a, b, 1e-6, 1e-7)
    slots, others = model.optimizer.variables, again.optimizer.variables
    assert len(slots) == len(others) > 10
    for a, b in zip(slots, others, strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), 1e-6, 1e-7)


def test_a_loss_scale_optimizer_around_both():
    module = keras.optimizers if KERAS_3 else keras.mixed_precision
    expected = trained(make_model(), Split(*parts()).apply_gradients)
    model = make_model()
    scaled = module.LossScaleOptimizer(Split(*parts()), initial_scale=8.0)
    for _ in range(4):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(IDS) - LABELS) ** 2)
            scale = scaled.scale_loss if KERAS_3 else scaled.get_scaled_loss
            loss = scale(loss)
        found = tape.gradient(loss, model.trainable_variables)
        found = found if KERAS_3 else scaled.get_unscaled_gradients(found)
        scaled.apply_gradients(
            zip(found, model.trainable_variables, strict=True)
        )
    for a, b in zip(weights(model), expected, strict=True):
        np.testing.assert_allclose(a, b, 1e-5, 1e-6)


@pytest.mark.parametrize(
    ("dense", "tables", "message"),
    [
        (KIND, lambda: keras.optimizers.Nadam(), "`tables` of Split.*Adagrad"),
        (lambda: Split("sgd", "sgd"), lambda: "sgd", "`dense` of Split"),
        (KIND, lambda: "lamb", "`tables` of Split.*Received: 'lamb'"),
    ],
)
def test_what_cannot_be_a_part(dense, tables, message):
    with pytest.raises(ValueError, match=message):
        Split(dense(), tables())


@pytest.mark.skipif(not KERAS_3, reason="an argument of Keras 3")
@pytest.mark.parametrize("part", ["dense", "tables"])
def test_the_loss_is_scaled_once(part):
    given = {"dense": "sgd", "tables": "sgd"}
    given[part] = optimizers.SGD(loss_scale_factor=2.0)
    with pytest.raises(ValueError, match=f"`{part}` of Split.*once"):
        Split(**given)
