# SPDX-License-Identifier: Apache-2.0
"""Ours with sparse gradients against Keras's own with dense ones."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import toy_problem

from tfdist_ext import optimizers

keras = tf.keras

ALL = ["SGD", "Adagrad", "Adam", "Ftrl", "RowWiseAdagrad"]

# Equal whichever rows a step touches.
ANY_ROWS = {
    "sgd": ("SGD", {"learning_rate": 0.1}),
    "adagrad": ("Adagrad", {"learning_rate": 0.1}),
    "adagrad options": (
        "Adagrad",
        {
            "learning_rate": 0.1,
            "initial_accumulator_value": 0.5,
            "epsilon": 1e-3,
        },
    ),
    "sgd clipvalue": ("SGD", {"learning_rate": 0.1, "clipvalue": 0.5}),
    "sgd clipnorm": ("SGD", {"learning_rate": 0.1, "clipnorm": 0.7}),
    "adagrad clipnorm": ("Adagrad", {"learning_rate": 0.1, "clipnorm": 0.7}),
    "global_clipnorm": ("SGD", {"learning_rate": 0.1, "global_clipnorm": 0.9}),
    "global_clipnorm, too small to clip": (
        "SGD",
        {"learning_rate": 0.1, "global_clipnorm": 1e4},
    ),
    "weight_decay": ("SGD", {"learning_rate": 0.1, "weight_decay": 0.05}),
    "adagrad weight_decay": (
        "Adagrad",
        {"learning_rate": 0.1, "weight_decay": 0.05},
    ),
    "ema": ("SGD", {"learning_rate": 0.1, "use_ema": True}),
    "ema overwrites": (
        "Adagrad",
        {
            "learning_rate": 0.1,
            "use_ema": True,
            "ema_momentum": 0.8,
            "ema_overwrite_frequency": 5,
        },
    ),
}
# Equal when every step touches every row: ours are lazy.
EVERY_ROW = {
    "momentum": ("SGD", {"learning_rate": 0.02, "momentum": 0.9}),
    "nesterov": (
        "SGD",
        {"learning_rate": 0.02, "momentum": 0.9, "nesterov": True},
    ),
    "adam": ("Adam", {"learning_rate": 0.1}),
    "adam options": (
        "Adam",
        {"learning_rate": 0.1, "beta_1": 0.7, "beta_2": 0.9, "epsilon": 1e-2},
    ),
    "amsgrad": ("Adam", {"learning_rate": 0.1, "amsgrad": True}),
    "adam clipnorm": ("Adam", {"learning_rate": 0.1, "clipnorm": 0.7}),
    "adam weight_decay": ("Adam", {"learning_rate": 0.1, "weight_decay": 0.1}),
    "ftrl": ("Ftrl", {"learning_rate": 0.1}),
    "ftrl options": (
        "Ftrl",
        {
            "learning_rate": 0.1,
            "initial_accumulator_value": 0.3,
            "l1_regularization_strength": 0.2,
            "l2_regularization_strength": 0.1,
            "l2_shrinkage_regularization_strength": 0.05,
            "beta": 0.1,
        },
    ),
    "ftrl power": (
        "Ftrl",
        {"learning_rate": 0.1, "learning_rate_power": -0.3, "clipnorm": 0.7},
    ),
}


# Equal with lazy=False, whichever rows a step touches.
EXACT = {name: case for name, case in EVERY_ROW.items() if case[0] == "Adam"}


def check(name, arguments, steps, graph, **more):
    ours = getattr(optimizers, name)(**arguments, **more)
    stock = getattr(keras.optimizers, name)(**arguments)
    actual = toy_problem.train(ours, steps, graph=graph)
    expected = toy_problem.train(
        stock, steps, toy_problem.dense_gradients, graph
    )
    # Keras corrects Adam's bias in float32, off by 6e-6 in the first steps.
    atol = 2e-5 if name == "Adam" else 1e-6
    toy_problem.assert_same(actual, expected, atol=atol)


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("case", ANY_ROWS.values(), ids=ANY_ROWS.keys())
def test_any_rows(case, graph):
    check(*case, toy_problem.make_steps(25), graph)


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("case", EVERY_ROW.values(), ids=EVERY_ROW.keys())
def test_every_row(case, graph):
    check(*case, toy_problem.make_steps(25, every_row=True), graph)


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("case", EXACT.values(), ids=EXACT.keys())
def test_exact_any_rows(case, graph):
    check(*case, toy_problem.make_steps(25), graph, lazy=False)


def test_ftrl_any_rows_of_a_table_of_zeros(monkeypatch):
    """Keras's dense step leaves such rows at zero, as a lazy one does."""
    make_variables = toy_problem.make_variables

    def zeros(seed):
        variables = make_variables(seed)
        variables[0].assign(tf.zeros(toy_problem.SHAPES[0]))
        return variables

    monkeypatch.setattr(toy_problem, "make_variables", zeros)
    arguments = {"learning_rate": 0.1, "l1_regularization_strength": 0.2}
    check("Ftrl", arguments, toy_problem.make_steps(25), True)


def test_adaptive_epsilon():
    if toy_problem.KERAS_3:
        with pytest.raises(ValueError, match="adaptive_epsilon"):
            optimizers.Adam(adaptive_epsilon=True)
        return
    arguments = {"learning_rate": 0.1, "epsilon": 0.1}
    if not hasattr(keras.optimizers.Adam(), "adaptive_epsilon"):
        pytest.skip("this tf_keras has no adaptive_epsilon")
    arguments["adaptive_epsilon"] = True
    check("Adam", arguments, toy_problem.make_steps(25, every_row=True), True)


@pytest.mark.skipif(not toy_problem.KERAS_3, reason="an argument of Keras 3")
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
def test_loss_scale_factor(graph):
    arguments = {"learning_rate": 0.1, "loss_scale_factor": 64.0}
    check("Adagrad", arguments, toy_problem.make_steps(20, scale=64.0), graph)


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adam", "Ftrl"])
def test_schedule(name):
    def arguments():
        schedule = keras.optimizers.schedules.ExponentialDecay(0.3, 4, 0.5)
        return {"learning_rate": schedule}

    steps = toy_problem.make_steps(20, every_row=True)
    ours = getattr(optimizers, name)(**arguments())
    stock = getattr(keras.optimizers, name)(**arguments())
    toy_problem.assert_same(
        toy_problem.train(ours, steps),
        toy_problem.train(stock, steps, toy_problem.dense_gradients),
        atol=2e-5,
    )


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adam", "Ftrl"])
def test_learning_rate_assigned_between_steps(name):
    results = []
    steps = toy_problem.make_steps(10, every_row=True)
    for module, gradients in (
        (optimizers, toy_problem.sparse_gradients),
        (keras.optimizers, toy_problem.dense_gradients),
    ):
        variables = toy_problem.make_variables()
        optimizer = getattr(module, name)(learning_rate=0.1)
        for step, (rows, grads) in enumerate(steps):
            optimizer.learning_rate = 0.1 / (1 + step)
            optimizer.apply_gradients(
                list(zip(gradients(rows, grads), variables, strict=True))
            )
        results.append([variable.numpy() for variable in variables])
    toy_problem.assert_same(*results, atol=2e-5)


def test_excluded_from_weight_decay():
    results = []
    for module, gradients in (
        (optimizers, toy_problem.sparse_gradients),
        (keras.optimizers, toy_problem.dense_gradients),
    ):
        optimizer = module.SGD(0.1, weight_decay=0.1)
        optimizer.exclude_from_weight_decay(var_names=["table"])
        steps = toy_problem.make_steps(5)
        results.append(toy_problem.train(optimizer, steps, gradients))
    toy_problem.assert_same(*results)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("shape", [(6,), (4, 3, 2)])
def test_tables_of_another_rank_take_the_way_of_keras(name, shape):
    """Slices of vectors and of cubes have no fused op."""
    stock = "Adagrad" if name == "RowWiseAdagrad" else name
    slices = tf.IndexedSlices(
        tf.ones((3, *shape[1:])), tf.constant([3, 0, 3]), tf.constant(shape)
    )
    results = []
    for optimizer, gradient in (
        (getattr(optimizers, name)(0.1), slices),
        (getattr(keras.optimizers, stock)(0.1), tf.convert_to_tensor(slices)),
    ):
        start = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        variable = toy_problem.make_variable(start, "cube")
        for _ in range(3):
            optimizer.apply_gradients([(gradient, variable)])
        results.append(variable.numpy())
    np.testing.assert_allclose(*results, rtol=1e-5)
    assert (results[0] != start).any()


@pytest.mark.parametrize("name", ALL)
def test_fit_with_embedding_in_a_mirrored_strategy(name):
    """Variables and slots are mirrored; one component gets the update."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 30, (64, 4))
    y = rng.normal(size=(64, 1)).astype(np.float32)
    results = []
    for strategy in (
        tf.distribute.get_strategy(),
        tf.distribute.MirroredStrategy(["/cpu:0"]),
    ):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential(
                [
                    keras.Input((4,), dtype="int64"),
                    keras.layers.Embedding(30, 5),
                    keras.layers.Flatten(),
                    keras.layers.Dense(1),
                ]
            )
            optimizer = getattr(optimizers, name)(
                learning_rate=0.05, weight_decay=1e-3, clipnorm=1.0
            )
            model.compile(optimizer, "mse")
        start = model.get_weights()
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
        model.fit(data, epochs=2, verbose=0)
        results.append(model.get_weights())
        assert (results[-1][0] != start[0]).any()
    for plain, mirrored in zip(*results, strict=True):
        np.testing.assert_allclose(mirrored, plain, rtol=1e-5, atol=1e-6)
