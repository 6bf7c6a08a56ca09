# SPDX-License-Identifier: Apache-2.0
"""Updates of a lookup's rows are one op, where nothing else needs gradients."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfdist_ext.layers import FullSparse
from tfdist_ext.layers import SharedExchange
from tfdist_ext.optimizers import SGD
from tfdist_ext.optimizers import Adagrad
from tfdist_ext.optimizers import Adam
from tfdist_ext.optimizers import CowClip
from tfdist_ext.optimizers import RowWiseAdagrad
from tfdist_ext.optimizers.rules import attach_optimizer

IDS = np.random.default_rng(0).integers(0, 30, (8, 2))


def make(optimizer, max_norm=None, own=None):
    """Two tables that share an exchange; an optimizer; a step."""
    layers = [
        FullSparse(4, input_dim=30, use_bias=False, max_norm=norm, name=f"t{i}")
        for i, norm in enumerate([max_norm, None])
    ]
    for layer in layers:
        layer.build((None, 2))
        layer.kernel.assign(np.random.default_rng(1).random((30, 4)))
    if own is not None:
        attach_optimizer(layers[1].kernel, own)
    joined = SharedExchange(layers)
    variables = [layer.kernel for layer in layers]

    @tf.function
    def step(use=None):
        with tf.GradientTape() as tape:
            loss = tf.add_n(
                [tf.reduce_sum(x**2) for x in joined([IDS, IDS + 0])]
            )
        grads = tape.gradient(loss, variables)
        seen = use(grads) if use is not None else tf.zeros([])
        optimizer.apply_gradients(zip(grads, variables, strict=True))
        return seen

    return step, variables


def ops_of(step, *args):
    graph = step.get_concrete_function(*args).graph
    types = [op.type for op in graph.get_operations()]
    return [t.removeprefix("Tfdist>") for t in types if "Apply" in t]


@pytest.mark.parametrize(
    "optimizer, op",
    [
        (SGD, "Sgd"),
        (lambda rate: SGD(rate, momentum=0.9), "Momentum"),
        (Adagrad, "Adagrad"),
        (RowWiseAdagrad, "RowWiseAdagrad"),
        (Adam, "Adam"),
        (lambda rate: Adam(rate, amsgrad=True), "Adam"),
    ],
)
def test_one_op_for_the_tables_of_a_lookup(optimizer, op):
    step, _ = make(optimizer(0.1))
    assert ops_of(step) == [f"ApplyLookupGrad{op}"]


def norm_of(grads):
    return tf.linalg.global_norm(grads)


def test_gradients_that_something_else_uses_are_computed_once():
    step, variables = make(SGD(0.1))
    assert ops_of(step, norm_of) == ["ApplyRowSgd", "ApplyRowSgd"]
    assert step(norm_of) > 0
    expected, others = make(SGD(0.1))
    expected()
    for mine, other in zip(variables, others, strict=True):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize(
    "optimizer",
    [
        SGD(0.1, clipnorm=1.0),
        SGD(0.1, global_clipnorm=1.0),
        Adam(0.1, lazy=False),
        SGD(0.1, row_clip=CowClip()),
    ],
    ids=["clipnorm", "global_clipnorm", "all rows", "row_clip"],
)
def test_what_changes_gradients_or_needs_all_rows_has_an_op_per_table(
    optimizer,
):
    step, _ = make(optimizer)
    assert [op[:8] for op in ops_of(step)] == ["ApplyRow"] * 2


def test_a_limit_of_norms_holds_after_the_update():
    """Its table has an update of its own, before the rows are limited."""
    step, variables = make(SGD(10.0), max_norm=0.5)
    assert ops_of(step) == ["ApplyRowSgd", "ApplyRowSgd"]
    step()
    norms = np.linalg.norm(variables[0].numpy(), axis=1)
    assert abs(norms[np.unique(IDS)].max() - 0.5) < 1e-5


def test_a_table_with_an_optimizer_of_its_own():
    step, _ = make(SGD(0.1), own=Adagrad(0.1))
    assert sorted(ops_of(step)) == ["ApplyRowAdagrad", "ApplyRowSgd"]
