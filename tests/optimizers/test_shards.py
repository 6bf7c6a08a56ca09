# SPDX-License-Identifier: Apache-2.0
"""Updates of a partitioned table equal updates of the whole one.

Ranks are threads here: each trains its shard and the replicated variables
with an optimizer of its own, and sums over ranks meet at a barrier.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading

import numpy as np
import pytest
import tensorflow as tf
import toy_problem

from tfdist_ext import marks
from tfdist_ext import optimizers
from tfdist_ext.optimizers import row_gradients
from tfdist_ext.optimizers import rules
from tfdist_ext.optimizers import supported
from tfdist_ext.tables.placement import ShardSpec
from tfdist_ext.tables.placement import TablePlacement

RANKS = 2
ROWS, DIM = toy_problem.SHAPES[0]
PLACEMENTS = {
    "row": TablePlacement.row_wise(RANKS),
    "column": TablePlacement.column_wise(RANKS),
}


@dataclasses.dataclass
class Exchange:
    """Sums over threads that stand for ranks."""

    barrier: threading.Barrier = dataclasses.field(
        default_factory=lambda: threading.Barrier(RANKS, timeout=60)
    )
    rank: threading.local = dataclasses.field(default_factory=threading.local)
    values: dict = dataclasses.field(default_factory=dict)
    labels: list = dataclasses.field(default_factory=list)

    def sum_over_ranks(self, tensor, label, peers=None):
        assert peers is None or sorted(peers) == list(range(RANKS))
        self.values[self.rank.index] = tensor
        self.barrier.wait()
        total = tf.add_n([self.values[rank] for rank in range(RANKS)])
        self.labels.append(label)
        self.barrier.wait()
        return total


@pytest.fixture
def exchange(monkeypatch):
    ranks = Exchange()
    for module in (row_gradients, rules):
        monkeypatch.setattr(module, "sum_over_ranks", ranks.sum_over_ranks)
    return ranks


def local_part(placement, rank):
    """What rank holds: every second row, or a range of columns."""
    if placement == "row":
        return np.s_[rank::RANKS, :]
    return np.s_[:, rank * DIM // RANKS : (rank + 1) * DIM // RANKS]


def make_rank_variables(placement, rank):
    variables = toy_problem.make_variables()
    part = variables[0].numpy()[local_part(placement, rank)]
    table = toy_problem.make_variable(part, "table")
    native = table.value if toy_problem.KERAS_3 else table
    spec = ShardSpec.of("t", ROWS, DIM, PLACEMENTS[placement], rank, RANKS)
    marks.set_shard_spec(native, spec)
    return [table, *variables[1:]]


def rank_gradients(placement, rank, rows, grads):
    """The shard's gradient: unique ascending local rows, summed."""
    whole = toy_problem.dense_gradients(rows, grads)[0].numpy()
    touched = np.unique(rows)
    part = local_part(placement, rank)
    if placement == "column":
        values = whole[touched][part]
    else:
        touched = touched[touched % RANKS == rank]
        values = whole[touched]
        touched = touched // RANKS
    shape = tf.constant(whole[part].shape, tf.int64)
    slices = tf.IndexedSlices(tf.constant(values), tf.constant(touched), shape)
    return [slices, *map(tf.constant, grads[1:])]


def train_rank(exchange, placement, rank, make_optimizer, steps):
    exchange.rank.index = rank
    variables = make_rank_variables(placement, rank)
    optimizer = make_optimizer()
    optimizer.build(variables)
    for rows, grads in steps:
        parts = rank_gradients(placement, rank, rows, grads)
        optimizer.apply_gradients(list(zip(parts, variables, strict=True)))
    return [variable.numpy() for variable in variables]


def train_ranks(exchange, placement, make_optimizer, steps):
    with concurrent.futures.ThreadPoolExecutor(RANKS) as threads:
        futures = [
            threads.submit(
                train_rank, exchange, placement, rank, make_optimizer, steps
            )
            for rank in range(RANKS)
        ]
        ranks = [future.result(timeout=120) for future in futures]
    table = np.zeros((ROWS, DIM), np.float32)
    for rank, values in enumerate(ranks):
        table[local_part(placement, rank)] = values[0]
    for ours, others in zip(ranks[0][1:], ranks[1][1:], strict=True):
        np.testing.assert_array_equal(ours, others)
    return [table, *ranks[0][1:]]


CASES = {
    "sgd": ("SGD", {}),
    "momentum": ("SGD", {"momentum": 0.9}),
    "adagrad": ("Adagrad", {}),
    "row-wise": ("RowWiseAdagrad", {}),
    "adam": ("Adam", {}),
    "exact adam": ("Adam", {"lazy": False}),
    "ftrl": ("Ftrl", {"l1_regularization_strength": 0.01}),
    "clipnorm": ("SGD", {"clipnorm": 0.7}),
    "row-wise clipnorm": ("RowWiseAdagrad", {"clipnorm": 0.7}),
    "global_clipnorm": ("Adagrad", {"global_clipnorm": 0.9}),
    "clipvalue": ("Adam", {"clipvalue": 0.2}),
    "weight_decay": ("Adagrad", {"weight_decay": 0.1}),
    "ema": (
        "SGD",
        {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 4},
    ),
}


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_ranks_equal_one_process(exchange, case, placement):
    name, arguments = case

    def make_optimizer():
        return getattr(optimizers, name)(learning_rate=0.1, **arguments)

    steps = toy_problem.make_steps(15)
    actual = train_ranks(exchange, placement, make_optimizer, steps)
    expected = toy_problem.train(make_optimizer(), steps, graph=False)
    toy_problem.assert_same(actual, expected)


def test_norms_take_one_exchange_per_step(exchange):
    def make_optimizer():
        return optimizers.SGD(0.1, clipnorm=1.0)

    train_ranks(exchange, "row", make_optimizer, toy_problem.make_steps(3))
    assert exchange.labels == ["gradient norms"] * 3 * RANKS


def test_a_rank_that_is_clipped_alone_would_be_wrong(exchange):
    """The norm that counts is the whole table's: the test can fail."""
    steps = [
        (
            np.array([0, 1]),
            [np.ones((2, DIM), np.float32)]
            + [np.zeros(shape, np.float32) for shape in toy_problem.SHAPES[1:]],
        )
    ]
    start = toy_problem.make_variables()[0].numpy()
    table, *_ = train_ranks(
        exchange, "row", lambda: optimizers.SGD(1.0, clipnorm=1.0), steps
    )
    np.testing.assert_allclose(
        start[:2] - table[:2], np.full((2, DIM), 1 / np.sqrt(2 * DIM)), 1e-5
    )


@pytest.mark.parametrize("option", ["clipnorm", "global_clipnorm", "clipvalue"])
def test_clipping_by_keras_is_refused(option):
    stock = tf.keras.optimizers.Adagrad(0.1, **{option: 1.0})
    with pytest.raises(ValueError, match=f"Adagrad: argument `{option}`"):
        supported.check_supported(stock)
    supported.check_supported(optimizers.Adagrad(0.1, **{option: 1.0}))


@pytest.mark.parametrize("name", ["Adafactor", "Lamb", "Muon"])
def test_optimizers_that_need_the_whole_table_are_refused(name):
    if not hasattr(tf.keras.optimizers, name):
        pytest.skip(f"this Keras has no {name}")
    with pytest.raises(ValueError, match=f"{name} cannot train a partitioned"):
        supported.check_supported(getattr(tf.keras.optimizers, name)(0.1))


def test_optimizers_that_nobody_knows_are_refused_until_they_are_declared():
    stock, keras_3 = tf.keras.optimizers.SGD, hasattr(tf.keras, "ops")

    class LARS(stock):
        def update_step(self, gradient, variable, *rate):
            super().update_step(gradient, variable, *rate)

    class Renamed(stock):
        def build(self, variables):
            super().build(variables)

        def get_config(self):
            return super().get_config()

    class NovoGrad(tf.keras.optimizers.Optimizer):
        def __init__(self, rate):
            # tf_keras: the name; the rate is the subclass's own.
            super().__init__(rate if keras_3 else "novograd")

    for kind, reason in (
        (LARS, "LARS overrides `update_step`"),
        (type("Clips", (Renamed,), {"apply_gradients": print}), "overrides"),
        (NovoGrad, "not an optimizer of Keras"),
    ):
        with pytest.raises(ValueError, match=reason) as error:
            supported.check_supported(kind(0.1))
        assert "tfdist_ext.optimizers.element_wise" in str(error.value)
    supported.check_supported(Renamed(0.1))
    declared = optimizers.element_wise(LARS)
    supported.check_supported(declared(0.1))
    again = type("Again", (declared,), {"update_step": stock.update_step})
    with pytest.raises(ValueError, match="Again overrides `update_step`"):
        supported.check_supported(again(0.1))
    with pytest.raises(ValueError, match="clipnorm"):
        supported.check_supported(declared(0.1, clipnorm=1.0))
    with pytest.raises(TypeError, match="class of optimizers"):
        optimizers.element_wise(declared(0.1))


def test_loss_scale_optimizer_is_refused():
    if toy_problem.KERAS_3:
        wrapper = tf.keras.optimizers.LossScaleOptimizer
    else:
        wrapper = tf.keras.mixed_precision.LossScaleOptimizer
    with pytest.raises(ValueError, match="LossScaleOptimizer"):
        supported.check_supported(wrapper(optimizers.Adam()))


@pytest.mark.parametrize(
    "name", ["SGD", "Adagrad", "Adam", "RMSprop", "Ftrl", "Nadam", "Adamax"]
)
def test_elementwise_optimizers_of_keras_pass(name):
    supported.check_supported(getattr(tf.keras.optimizers, name)())


KERAS_CASES = [
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("SGD", {"weight_decay": 0.1}),
    ("Adagrad", {}),
    ("Adam", {}),
    ("AdamW", {}),
    ("RMSprop", {}),
    ("Ftrl", {}),
    ("Adam", {"use_ema": True}),
]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("name", "arguments"), KERAS_CASES)
def test_optimizers_of_keras_on_shards(exchange, name, arguments, placement):
    def make_optimizer():
        return getattr(tf.keras.optimizers, name)(0.05, **arguments)

    steps = toy_problem.make_steps(10)
    actual = train_ranks(exchange, placement, make_optimizer, steps)
    expected = toy_problem.train(
        make_optimizer(), steps, toy_problem.dense_gradients, graph=False
    )
    toy_problem.assert_same(actual, expected)
