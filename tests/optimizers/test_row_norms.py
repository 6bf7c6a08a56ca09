# SPDX-License-Identifier: Apache-2.0
"""Rows that may only be so long, and rates that follow the batch."""

import numpy as np
import pytest
import tensorflow as tf
import toy_problem

import tfdist_ext
from tfdist_ext import optimizers
from tfdist_ext.keras_internals import KERAS_3
from tfdist_ext.optimizers import row_optimizer

LONGEST = 1.1


def one_step(make, gradients, limited):
    variables = toy_problem.make_variables()
    if limited:
        row_optimizer.limit_row_norms(variables[0], LONGEST)
    optimizer = make()
    if KERAS_3:
        optimizer.build(variables)
    ((rows, grads),) = toy_problem.make_steps(1)
    pairs = zip(gradients(rows, grads), variables, strict=True)
    optimizer.apply_gradients(list(pairs))
    return [variable.numpy() for variable in variables], np.unique(rows)


@pytest.mark.parametrize(
    "make",
    [
        lambda: optimizers.SGD(0.5, momentum=0.9),
        lambda: optimizers.Adagrad(0.5),
        lambda: optimizers.RowWiseAdagrad(0.5),
        lambda: optimizers.Adam(0.5),
        lambda: optimizers.Adam(0.5, lazy=False),
        lambda: optimizers.Ftrl(0.5),
    ],
    ids=["sgd", "adagrad", "row_wise", "lazy_adam", "adam", "ftrl"],
)
@pytest.mark.parametrize(
    "gradients", [toy_problem.sparse_gradients, toy_problem.dense_gradients]
)
def test_rows_of_an_update_are_scaled_down(make, gradients):
    free, rows = one_step(make, gradients, limited=False)
    limited, _ = one_step(make, gradients, limited=True)
    norms = np.linalg.norm(free[0], axis=1, keepdims=True)
    if gradients is toy_problem.sparse_gradients and make().get_config().get(
        "lazy", True
    ):
        untouched = np.setdiff1d(np.arange(len(norms)), rows)
        norms[untouched] = 0.0
    assert 0 < (norms > LONGEST).sum() < len(norms)
    free[0] *= np.minimum(1.0, LONGEST / np.maximum(norms, 1e-9))
    toy_problem.assert_same(limited, free)


def test_optimizers_that_would_ignore_it_are_refused():
    variables = toy_problem.make_variables()
    row_optimizer.limit_row_norms(variables[0], LONGEST)
    kinds = [tf.keras.optimizers.Adagrad]
    if not KERAS_3:
        kinds.append(tf.keras.optimizers.legacy.Adagrad)
    for kind in kinds:
        rows, grads = toy_problem.make_steps(1)[0]
        gradients = toy_problem.sparse_gradients(rows, grads)
        with pytest.raises(ValueError, match=r"max_norm=1\.1.*Adagrad would"):
            kind(0.1).apply_gradients(zip(gradients, variables, strict=True))


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), "1"])
def test_a_limit_is_a_positive_number(wrong):
    with pytest.raises(ValueError, match=r"max_norm.*positive.*'users'"):
        tfdist_ext.TableConfig("users", 10, 4, max_norm=wrong)
    with pytest.raises(ValueError, match=r"max_norm.*positive.*'words'"):
        tfdist_ext.layers.Embedding(10, 4, max_norm=wrong, name="words")


def test_a_rate_follows_the_batch():
    assert tfdist_ext.scaled_rate(0.1, 1024, 8192) == 0.8
    assert tfdist_ext.scaled_rate(0.1, 1024, 4096, "sqrt") == 0.2
    rate = tfdist_ext.scaled_rate(0.1, 1024, 8192, warmup_steps=10)
    rate = tf.keras.optimizers.schedules.deserialize(
        tf.keras.optimizers.schedules.serialize(rate)
    )
    found = [float(rate(step)) for step in (0, 5, 10, 99)]
    np.testing.assert_allclose(found, [0.1, 0.45, 0.8, 0.8], rtol=1e-6)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rule": "cubic"},
        {"base": -0.1},
        {"reference_batch": 0},
        {"batch": float("inf")},
        {"warmup_steps": 1.5},
        {"warmup_steps": -1},
    ],
)
def test_rates_that_nobody_means(wrong):
    right = {"base": 0.1, "reference_batch": 8, "batch": 16}
    (name,) = wrong
    with pytest.raises(ValueError, match=f"`{name}`.*Received: {name}="):
        tfdist_ext.scaled_rate(**{**right, **wrong})
