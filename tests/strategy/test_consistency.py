# SPDX-License-Identifier: Apache-2.0
"""Arguments of `consistency`, and what it does in one process."""

import numpy as np
import pytest
import tensorflow as tf

import tfdist_ext
from tfdist_ext import consistency

keras = tf.keras


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: consistency.Accumulate(0), ValueError, r"`k`.*k=0.*Accumul"),
        (lambda: consistency.Accumulate(2.0), ValueError, r"integer.*k=2\.0"),
        (lambda: consistency.Accumulate(True), ValueError, r"k=True"),
        (lambda: consistency.LocalSteps(-1), ValueError, r"k=-1.*LocalSteps"),
        (
            lambda: consistency.LocalSteps(2, outer="sgd"),
            TypeError,
            r"`outer`.*Nesterov.*outer='sgd'",
        ),
        (
            lambda: consistency.Nesterov(momentum=1.0),
            ValueError,
            r"`momentum`.*below 1.*momentum=1\.0",
        ),
        (
            lambda: consistency.Nesterov(learning_rate=0),
            ValueError,
            r"`learning_rate`.*learning_rate=0",
        ),
        (
            lambda: tfdist_ext.HybridParallelStrategy(consistency="bsp"),
            TypeError,
            r"`consistency`.*Accumulate\(k\).*consistency='bsp'",
        ),
    ],
)
def test_wrong_arguments_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


def _model(mode, loss="mse", optimizer=None):
    strategy = tfdist_ext.HybridParallelStrategy(consistency=mode)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input([2]),
                keras.layers.Dense(
                    1, kernel_initializer=keras.initializers.Constant(0.5)
                ),
            ]
        )
        model.compile(optimizer or keras.optimizers.SGD(0.1), loss)
    return strategy, model


def _batch(samples=8):
    rng = np.random.default_rng(0)
    return rng.normal(size=[samples, 2]), rng.normal(size=[samples, 1])


def test_bsp_adds_no_op_to_a_step():
    ops = []
    for mode in (None, consistency.BSP()):
        strategy, model = _model(mode)
        with strategy:
            step = tf.function(
                lambda x, y, s=strategy, m=model: s.run(m.train_step, ((x, y),))
            )
            graph = step.get_concrete_function(*map(tf.constant, _batch()))
            functions = graph.graph.as_graph_def().library.function
            counts = [
                sorted(node.op for node in each.node_def) for each in functions
            ]
            ops.append((len(graph.graph.get_operations()), counts))
    assert ops[0] == ops[1]


def test_accumulate_waits_for_the_last_step():
    strategy, model = _model(consistency.Accumulate(2))
    with strategy:
        x, y = _batch()
        model.train_on_batch(x[:4], y[:4])
        np.testing.assert_array_equal(model.layers[-1].kernel, [[0.5]] * 2)
        model.train_on_batch(x[4:], y[4:])
        found = np.array(model.layers[-1].kernel)
    strategy, model = _model(None)
    with strategy:
        model.train_on_batch(x, y)
        np.testing.assert_allclose(found, model.layers[-1].kernel, rtol=1e-5)


def test_a_summed_loss_is_refused():
    loss = keras.losses.MeanSquaredError(reduction="sum")
    strategy, model = _model(consistency.Accumulate(2), loss)
    with (
        strategy,
        pytest.raises(ValueError, match=r"reduction='sum'.*Accumulate"),
    ):
        model.train_on_batch(*_batch())


def test_the_outer_step_follows_its_formula():
    """One rank: its own update is the outer gradient."""
    outer = consistency.Nesterov(learning_rate=0.5, momentum=0.8)
    strategy, model = _model(consistency.LocalSteps(1, outer=outer))
    x, y = _batch()
    with strategy:
        for _ in range(3):
            model.train_on_batch(x, y)
        found = np.array(model.layers[-1].kernel)
    weight, bias = np.full([2, 1], 0.5), np.zeros(1)
    velocity = [np.zeros([2, 1]), np.zeros(1)]
    for _ in range(3):
        error = x @ weight + bias - y
        moves = [0.2 * x.T @ error / len(x), 0.2 * error.mean(0)]
        velocity = [
            0.8 * v + move for v, move in zip(velocity, moves, strict=True)
        ]
        weight = weight - 0.5 * (moves[0] + 0.8 * velocity[0])
        bias = bias - 0.5 * (moves[1] + 0.8 * velocity[1])
    np.testing.assert_allclose(found, weight, rtol=1e-5)
