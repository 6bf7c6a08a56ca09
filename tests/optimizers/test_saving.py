# SPDX-License-Identifier: Apache-2.0
"""Configurations and states survive saving."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import toy_problem

from tfdist_ext import optimizers

keras = tf.keras
OPTIONS = {
    "SGD": {"learning_rate": 0.3, "momentum": 0.5, "nesterov": True},
    "Adagrad": {"learning_rate": 0.3, "epsilon": 1e-3, "weight_decay": 0.1},
    "RowWiseAdagrad": {
        "learning_rate": 0.3,
        "initial_accumulator_value": 0.2,
        "clipnorm": 1.0,
        "stochastic_rounding": False,
    },
    "Ftrl": {
        "learning_rate": 0.3,
        "learning_rate_power": -0.6,
        "l1_regularization_strength": 0.1,
        "beta": 0.2,
    },
    "Adam": {
        "learning_rate": 0.3,
        "beta_1": 0.8,
        "amsgrad": True,
        "lazy": False,
    },
}
NAMES = list(OPTIONS)


def make(name):
    return getattr(optimizers, name)(**OPTIONS[name])


@pytest.mark.parametrize("name", NAMES)
def test_config_round_trip(name):
    config = make(name).get_config()
    again = getattr(optimizers, name).from_config(dict(config))
    assert again.get_config() == config
    for option, value in OPTIONS[name].items():
        assert config[option] == pytest.approx(value), option


@pytest.mark.parametrize("name", NAMES)
def test_defaults_are_those_of_keras(name):
    stock_name = "Adagrad" if name == "RowWiseAdagrad" else name
    stock = getattr(keras.optimizers, stock_name)().get_config()
    ours = getattr(optimizers, name)().get_config()
    for config in (stock, ours):
        config.pop("name")
    assert ours.pop("stochastic_rounding")
    assert ours.pop("lazy") if name == "Adam" else True
    assert ours == stock


@pytest.mark.parametrize("name", NAMES)
def test_serialize_and_deserialize(name):
    serialized = keras.optimizers.serialize(make(name))
    assert serialized["registered_name"] == f"tfdist_ext>{name}"
    again = keras.optimizers.deserialize(serialized)
    assert type(again) is getattr(optimizers, name)
    assert again.get_config() == make(name).get_config() | {"name": again.name}


def test_schedule_round_trip():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.3, 4, 0.5)
    config = optimizers.Adagrad(schedule).get_config()
    again = optimizers.Adagrad.from_config(dict(config))
    assert again.get_config()["learning_rate"] == config["learning_rate"]


def make_model(name):
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((4,), dtype="int64"),
            keras.layers.Embedding(30, 5),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    model.compile(make(name), "mse")
    return model


def data():
    rng = np.random.default_rng(0)
    x = rng.integers(0, 30, (64, 4))
    y = rng.normal(size=(64, 1)).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(16)


@pytest.mark.parametrize("name", NAMES)
def test_saved_model_trains_on_as_if_never_saved(name, tmp_path):
    model = make_model(name)
    model.fit(data(), epochs=1, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is getattr(optimizers, name)
    for trained in (model, loaded):
        trained.fit(data(), epochs=1, verbose=0)
    for ours, theirs in zip(
        loaded.get_weights(), model.get_weights(), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", [*NAMES, "SGD without momentum"])
def test_checkpoint_restores_slots(name, tmp_path):
    def make_optimizer():
        if name == "SGD without momentum":
            return optimizers.SGD(0.1)
        return make(name)

    steps = toy_problem.make_steps(6)
    variables = toy_problem.make_variables()
    optimizer = make_optimizer()
    optimizer.build(variables)
    checkpoint = tf.train.Checkpoint(optimizer=optimizer)
    apply(optimizer, variables, steps[:3])
    path = checkpoint.save(tmp_path / "checkpoint")
    values = [variable.numpy() for variable in variables]
    apply(optimizer, variables, steps[3:])

    restored = toy_problem.make_variables()
    for variable, value in zip(restored, values, strict=True):
        variable.assign(value)
    again = make_optimizer()
    again.build(restored)
    tf.train.Checkpoint(optimizer=again).restore(path).assert_consumed()
    apply(again, restored, steps[3:])
    toy_problem.assert_same(
        [variable.numpy() for variable in restored],
        [variable.numpy() for variable in variables],
    )


def apply(optimizer, variables, steps):
    for rows, grads in steps:
        parts = toy_problem.sparse_gradients(rows, grads)
        optimizer.apply_gradients(list(zip(parts, variables, strict=True)))
