# SPDX-License-Identifier: Apache-2.0
"""What is refused, and how."""

import contextlib
import warnings

import numpy as np
import tensorflow as tf
from fit_models import BATCH
from fit_models import ROWS
from fit_models import data
from fit_models import make_model
from fit_models import weights

import tfdist_ext
from tfdist_ext.layers import FullSparse
from tfdist_ext.optimizers import Adagrad
from tfdist_ext.strategy.gradients import ErrorFeedback

keras = tf.keras


def bad_id(strategy, folder):
    """One rank's bad id fails the step on all, and nothing has changed."""
    model = make_model(strategy)
    model.fit(data(), epochs=1, verbose=0)
    before = weights(strategy, model)
    slots = [strategy.gather_table(v) for v in model.optimizer.variables]
    ids = np.zeros([BATCH, 3], np.int64)
    ids[BATCH - 1, 2] = ROWS + 5  # in the last rank's part
    dataset = tf.data.Dataset.from_tensors((ids, np.ones([BATCH, 1])))
    try:
        model.fit(dataset, epochs=1, verbose=0)
        raise AssertionError("a bad id was accepted")
    except tf.errors.InvalidArgumentError as error:
        message = str(error)
    rank = strategy.world_size - 1
    for part in ("sparse", f"id {ROWS + 5}", f"{ROWS}", f"rank {rank}"):
        assert part in message, (part, message)
    after = weights(strategy, model)
    for a, b in zip(after, before, strict=True):
        np.testing.assert_array_equal(a, b)
    for variable, slot in zip(model.optimizer.variables, slots, strict=True):
        np.testing.assert_array_equal(strategy.gather_table(variable), slot)
    model.fit(data(), epochs=1, verbose=0)


def bad_id_and_error_feedback(strategy, folder):
    """What is kept for the next step stays, though no id is needed for it."""
    good = np.zeros([8, 3], np.int64)
    bad = good.copy()
    if strategy.rank == strategy.world_size - 1:
        bad[7, 2] = ROWS + 5
    first, second, third = (tf.range(1.0, 101.0) / k for k in (3, 7, 11))
    with strategy.scope():
        layer = FullSparse(4, ROWS, sharding="row")

    def sums(*steps):
        """The gradients summed in the last step."""
        feedback = ErrorFeedback(strategy.collectives)
        strategy.extended.error_feedback = feedback

        @tf.function
        def step(ids, gradient):
            def replica():
                layer(ids)
                context = tf.distribute.get_replica_context()
                return context.all_reduce("sum", [gradient])

            return strategy.run(replica)

        for ids, gradient in steps:
            try:
                (total,) = step(tf.constant(ids), gradient)
                assert ids is not bad, "a bad id was accepted"
            except tf.errors.InvalidArgumentError:
                assert ids is bad
        return total.numpy()

    strategy.collectives.gradient_dtype = tf.bfloat16
    try:
        expected = sums((good, first), (good, third))
        with_failed = sums((good, first), (bad, second), (good, third))
        with_good = sums((good, first), (good, second), (good, third))
        alone = sums((good, third))
    finally:
        strategy.extended.error_feedback = None
        strategy.collectives.gradient_dtype = tf.float32
    np.testing.assert_array_equal(with_failed, expected)
    for other in (with_good, alone):
        assert (other != expected).any()


def refusals(strategy, folder):
    """Options that would train shards wrongly say so."""
    refused = {"clipnorm": lambda: keras.optimizers.SGD(clipnorm=1.0)}
    if hasattr(keras, "ops"):
        refused["LossScaleOptimizer"] = lambda: (
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
        )
    for name, make in refused.items():
        with strategy.scope():
            optimizer = make()
        model = make_model(strategy, optimizer=optimizer)
        try:
            model.fit(data(), epochs=1, verbose=0)
            raise AssertionError(f"{name} was accepted")
        except ValueError as error:
            assert name in str(error), error


class Late(keras.Model):
    """Makes its variables when it is called first."""

    def __init__(self):
        super().__init__()
        self.sparse = FullSparse(4, ROWS)
        self.top = keras.layers.Dense(1)

    def call(self, inputs):
        return self.top(self.sparse(inputs))


def built_outside(strategy, folder):
    """A first call outside of the scope is named; inside it trains."""
    ids = next(iter(data()))[0]
    for inside in (False, True):
        with strategy.scope():
            model = Late()
            model.compile(tfdist_ext.optimizers.Adagrad(0.5), "mse")
        with strategy.scope() if inside else contextlib.nullcontext():
            model(ids)
        try:
            model.fit(data(), epochs=1, verbose=0)
            assert inside, "was accepted"
        except ValueError as error:
            assert not inside, error
            assert "kernel" in str(error), error
            assert "outside of strategy.scope()" in str(error), error


def eager_steps(strategy, folder):
    """Sums are not told from means there, which is said of own steps only."""

    class Own(keras.Sequential):
        def train_step(self, batch):
            return super().train_step(batch)

    for kind, expected in ((Own, 1), (keras.Sequential, 0)):
        with strategy.scope():
            model = kind([keras.Input([3]), keras.layers.Dense(1)])
            model.compile("sgd", "mse", run_eagerly=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.fit(np.ones([4, 3]), np.ones([4, 1]), verbose=0)
        found = [
            w
            for w in caught
            if "a sum over the samples cannot" in str(w.message)
        ]
        assert len(found) == expected, caught


def optimizer_made_outside(strategy, folder):
    """It is refused by name, not for what is missing of a half-built one."""
    model = make_model(strategy, optimizer=Adagrad(0.5))
    try:
        model.fit(data(), epochs=1, verbose=0)
        raise AssertionError("slots were made as of any variable")
    except ValueError as error:
        assert "created outside of strategy.scope()" in str(error), error


def plan_mismatch(strategy, folder):
    """Ranks that build different models are told so when they do."""
    name = "ads" if strategy.rank == 0 else "users"
    message = refused_plan(strategy, 4, sharding="row", name=name)
    assert "'ads'" in message and "'users'" in message, message


def refused_plan(strategy, *arguments, **options):
    try:
        with strategy.scope():
            layer = FullSparse(*arguments, input_dim=ROWS, **options)
            layer.build([None, 3])
    except tf.errors.InvalidArgumentError as error:
        return str(error)
    raise AssertionError("different models were accepted")
