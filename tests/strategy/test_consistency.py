# SPDX-License-Identifier: Apache-2.0
"""Arguments of `consistency`, and what it does in one process."""

import numpy as np
import pytest
import tensorflow as tf

import tfdist_ext
from tfdist_ext import consistency
from tfdist_ext import optimizers

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
            lambda: consistency.LocalSteps(2, tables=1),
            ValueError,
            r"`tables`.*tables=1.*LocalSteps",
        ),
        (
            lambda: consistency.LocalSteps(2, tables=True, row_cache=None),
            ValueError,
            r"`row_cache`.*row_cache=None.*LocalSteps",
        ),
        (
            lambda: consistency.SSP(2, "inverse", row_cache=True),
            ValueError,
            r'`stale_scale` is "inverse".*row_cache=True \(SSP\)',
        ),
        (
            lambda: consistency.LocalSteps(2, row_cache=True),
            ValueError,
            r"`row_cache`.*tables=False.*Use tables=True",
        ),
        (lambda: consistency.ASP(-0.1), ValueError, r"`significance`.*ASP"),
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
        model.compile(
            optimizer() if optimizer else keras.optimizers.SGD(0.1), loss
        )
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


def test_two_optimizers_update_in_the_last_step():
    def make():
        return optimizers.Split(
            keras.optimizers.Adafactor(0.1), optimizers.SGD(0.1)
        )

    strategy, model = _model(consistency.Accumulate(2), optimizer=make)
    x, y = _batch()
    with strategy:
        model.train_on_batch(x[:4], y[:4])
        model.train_on_batch(x[4:], y[4:])
        found = np.array(model.layers[-1].kernel)
        assert int(model.optimizer.dense.iterations) == 1
    alone = _model(None, optimizer=make)
    with alone[0]:
        alone[1].train_on_batch(x, y)
        np.testing.assert_allclose(found, alone[1].layers[-1].kernel, 1e-5)


def test_a_summed_loss_is_refused():
    loss = keras.losses.MeanSquaredError(reduction="sum")
    strategy, model = _model(consistency.Accumulate(2), loss)
    with (
        strategy,
        pytest.raises(ValueError, match=r"reduction='sum'.*Accumulate"),
    ):
        model.train_on_batch(*_batch())


KERAS_3 = hasattr(keras, "ops")


@pytest.mark.parametrize(
    ("mode", "make", "message"),
    [
        pytest.param(
            consistency.Accumulate(2),
            lambda: keras.optimizers.SGD(gradient_accumulation_steps=2),
            r"`gradient_accumulation_steps`.*Accumulate\(k=2\)",
            marks=pytest.mark.skipif(not KERAS_3, reason="of Keras 3"),
        ),
        (
            consistency.Accumulate(2),
            lambda: optimizers.SGD(row_clip=optimizers.CowClip()),
            r"`row_clip`.*Accumulate\(k=2\)",
        ),
        (
            consistency.LocalSteps(2, tables=True),
            lambda: optimizers.SGD(row_clip=optimizers.CowClip()),
            r"`row_clip`.*tables=True",
        ),
        pytest.param(
            consistency.Accumulate(2),
            lambda: keras.optimizers.legacy.SGD(),
            r"SGD of tf_keras.optimizers.legacy.*Accumulate",
            marks=pytest.mark.skipif(KERAS_3, reason="of tf_keras"),
        ),
        pytest.param(
            consistency.LocalSteps(2),
            lambda: keras.mixed_precision.LossScaleOptimizer(
                keras.optimizers.SGD()
            ),
            r"LossScaleOptimizer.*LocalSteps.*mixed_bfloat16",
            marks=pytest.mark.skipif(KERAS_3, reason="of tf_keras"),
        ),
        (
            consistency.LocalSteps(2),
            lambda: optimizers.Split("sgd", "sgd"),
            r"Split has two optimizers.*LocalSteps.*Accumulate\(k\)",
        ),
    ],
)
def test_optimizers_that_do_not_fit_are_refused(mode, make, message):
    strategy, model = _model(mode, optimizer=make)
    with strategy, pytest.raises(ValueError, match=message):
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
