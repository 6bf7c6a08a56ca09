# SPDX-License-Identifier: Apache-2.0
"""Rounds of `LocalSteps`: ranks train dense weights, then take their mean."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.consistency import Nesterov
from tfdist_ext.embedding import deferred_rows
from tfdist_ext.embedding.row_copies import RowCopies
from tfdist_ext.embedding.sharded_variable import local_variable
from tfdist_ext.keras_internals import value_of
from tfdist_ext.numbers.model_state import variables_of_optimizer
from tfdist_ext.strategy.accumulated_rounds import GradientSums
from tfdist_ext.strategy.round_base import COUNT
from tfdist_ext.strategy.round_base import Apply
from tfdist_ext.strategy.round_base import Pairs
from tfdist_ext.strategy.round_base import Round
from tfdist_ext.strategy.round_base import Steps
from tfdist_ext.type_names import Gradient
from tfdist_ext.type_names import Optimizer
from tfdist_ext.type_names import Strategy
from tfdist_ext.type_names import Variable

_WEIGHTS = "consistency/weights"
_SLOTS = "consistency/slots"


class LocalRound(Round):
    """The local steps of one optimizer.

    Args:
        steps: what the rounds of the strategy have in common.
        outer: the outer optimizer, or None.
        velocities: velocities of the outer optimizer, by the ids of the
            variables of TensorFlow; empty without one.
    """

    def __init__(
        self,
        steps: Steps,
        outer: Nesterov | None,
        velocities: dict[int, Variable],
    ) -> None:
        super().__init__(steps)
        self._kept = GradientSums()
        self._copies: RowCopies | None = None
        if steps.collectives is not None:
            self._copies = steps.collectives.row_copies
        self._outer = outer
        self._outer_slots = velocities
        self._starts: dict[int, tf.Variable] = {}
        self._trained: dict[int, Variable] = {}
        # Samples since the slots were made equal.
        self._since = local_variable(lambda: tf.zeros([]), "samples_of_slots")

    def step(self, optimizer: Optimizer, pairs: Pairs, apply: Apply) -> None:
        checks = self._begin_step()
        samples = self._steps.samples()
        for gradient, variable in pairs:
            if gradient is not None and marks.shard_spec(variable) is None:
                self._trained.setdefault(id(value_of(variable)), variable)
        self._before_update()
        kept = [
            pair for pair in pairs if marks.deferred_rows(pair[0]) is not None
        ]
        own = [
            (self._own(gradient, samples), variable)
            for gradient, variable in pairs
            if marks.deferred_rows(gradient) is None
        ]
        if all(gradient is None for gradient, _ in own) and kept:
            _count_steps(optimizer, 1)  # Keras refuses to apply nothing.
        else:
            with self._steps.passing(local=True):
                apply(own)
        with tf.control_dependencies(checks):
            self._kept.add(kept, None, None)
            self._samples.assign_add(samples)
            self._since.assign_add(samples)
            self._count.assign_add(1)
        if self._copies is not None:
            self._copies.open()
        self._after_update(kept, samples, optimizer, apply)

    def _before_update(self) -> None:
        if self._outer is not None:
            self._note_starts()

    def _after_update(
        self,
        kept: Pairs,
        samples: tf.Tensor,
        optimizer: Optimizer,
        apply: Apply,
    ) -> None:
        """Exchanges what is to be exchanged after a step.

        Args:
            kept: kept gradients of the step, and their variables.
            samples: samples of this rank in the step.
            optimizer: see `step`.
            apply: see `step`.
        """
        del kept, samples
        last = self._count.read_value() >= self._steps.mode.k
        internals.run_if(last, lambda: self._finish(optimizer, apply))

    def _own(self, gradient: Gradient, samples: tf.Tensor) -> Gradient:
        """The gradient of the whole batch as this rank estimates it."""
        collectives = self._steps.collectives
        if gradient is None or collectives is None:
            return gradient
        if marks.gradient_spec(gradient) is not None:
            return gradient
        # A custom loop computes this rank's part of a sum over the ranks.
        factor = 1 if self._weighted else collectives.group.world_size
        values = getattr(gradient, "values", gradient)
        # Without samples, the mean is NaN.
        values = tf.where(samples > 0, values * factor, tf.zeros_like(values))
        if not isinstance(gradient, tf.IndexedSlices):
            return values
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)

    def _note_starts(self) -> None:
        """Copies the weights before the first step of a round."""
        for key, variable in self._trained.items():
            if key not in self._starts:
                native = component(variable)
                self._starts[key] = local_variable(
                    native.read_value,
                    "start_of_round",
                    beside=variable,
                )

        def note() -> None:
            for key, start in self._starts.items():
                start.assign(component(self._trained[key]).read_value())

        first = tf.equal(self._count.read_value(), 0)
        internals.run_if(first, note)

    def _finish(self, optimizer: Optimizer, apply: Apply) -> None:
        """Gives all ranks the mean of their weights, and starts a round."""
        self._apply_rows(self._kept.pairs(), optimizer, apply)
        self._kept.clear()
        components = {k: component(v) for k, v in self._trained.items()}
        means = self._means(
            [each.read_value() for each in components.values()],
            self._samples.read_value(),
            _WEIGHTS,
        )
        outer = self._outer
        for (key, weight), mean in zip(components.items(), means, strict=True):
            if outer is not None:
                start = self._starts[key].read_value()
                gradient = start - mean
                velocity = component(self._outer_slots[key])
                moved = outer.momentum * velocity.read_value() + gradient
                velocity.assign(moved)
                gradient += outer.momentum * moved
                mean = start - outer.learning_rate * gradient
            weight.assign(mean)
        self._count.assign(0)
        self._samples.assign(0)
        if self._copies is not None:
            self._copies.clear()

    def _apply_rows(
        self, pairs: Pairs, optimizer: Optimizer, apply: Apply
    ) -> None:
        """Sends kept gradients of rows to their owners, which apply them."""
        collectives = self._steps.collectives
        if collectives is None or not pairs:
            return
        sent = deferred_rows.sent_to_owners(pairs, collectives)
        _count_steps(optimizer, -1)  # The last step has been counted already.
        with self._steps.passing(local=True):
            apply(sent)

    def _means(
        self, values: Sequence[tf.Tensor], samples: tf.Tensor, label: str
    ) -> list[tf.Tensor]:
        """Means over the ranks, weighted by samples, equal on all ranks."""
        collectives = self._steps.collectives
        if collectives is None:
            return list(values)
        (total,) = collectives.all_reduce([samples], COUNT)
        share = tf.math.divide_no_nan(samples, total)
        parts = [
            tf.math.multiply_no_nan(x, tf.cast(share, x.dtype)) for x in values
        ]
        return collectives.all_reduce(parts, label)

    def clear(self) -> None:
        """Forgets sums of rows; the next end makes dense weights equal."""
        self._kept.clear()
        if self._copies is not None:
            self._copies.clear()

    def variables(self) -> list[Variable]:
        return list(self._trained.values()) + self._kept.variables()

    def end(self, strategy: Strategy, optimizer: Optimizer) -> None:
        collectives = self._steps.collectives
        mine = [self._count.numpy(), self._since.numpy()]
        everyone = np.array([mine], np.float64)
        if collectives is not None:
            # After a failure, ranks may have made different numbers of steps.
            everyone = collectives.all_gather(
                tf.constant(everyone), COUNT
            ).numpy()
        if everyone[:, 0].any():
            # This round must not keep the optimizer alive.
            alive = weakref.ref(optimizer)

            def finish() -> None:
                found: Any = alive()
                self._finish(found, found.apply_gradients)

            key = len(self.variables()), self._weighted
            self._run_alone(strategy, key, finish)
        if collectives is not None and everyone[:, 1].any():
            with collectives.joint_call("end of a round"):
                self._equalize(optimizer, collectives, everyone[:, 1])

    def _equalize(
        self,
        optimizer: Optimizer,
        collectives: Collectives,
        samples: np.ndarray,
    ) -> None:
        """Gives all ranks the mean of their slots."""
        since = self._since.read_value()
        slots = self._slots_of(optimizer)
        scalars = [each for each in slots if each.shape.rank == 0]
        slots = [each for each in slots if each.shape.rank]
        means = self._means(
            [each.read_value() for each in slots], since, _SLOTS
        )
        for slot, mean in zip(slots, means, strict=True):
            slot.assign(mean)
        if scalars:
            mine = tf.stack([tf.cast(x, tf.float64) for x in scalars])
            found = collectives.all_gather(mine[tf.newaxis], _SLOTS).numpy()
            shares = samples / samples.sum()
            for i, scalar in enumerate(scalars):
                # A learning rate is equal, and a mean would round it.
                if np.any(found[:, i] != found[0, i]):
                    scalar.assign(shares @ found[:, i])
        self._since.assign(0)

    def _slots_of(self, optimizer: Optimizer) -> list[tf.Variable]:
        """Variables of an optimizer that a step of one rank changes."""
        equal = {id(value_of(each)) for each in self._outer_slots.values()}
        slots = variables_of_optimizer(optimizer)
        for own in getattr(optimizer, "table_optimizers", ()):
            slots += variables_of_optimizer(own)
        return [
            component(each)
            for each in slots
            if value_of(each).dtype.is_floating
            and id(value_of(each)) not in equal
            and internals.is_mirrored(value_of(each))
        ]


def component(variable: Variable) -> tf.Variable:
    """The variable of TensorFlow that has the value of this rank."""
    native = value_of(variable)
    return internals.components(native)[0]


def _count_steps(optimizer: Optimizer, steps: int) -> None:
    """Adds to the counters of an optimizer and of those of single tables."""
    for each in (optimizer, *getattr(optimizer, "table_optimizers", ())):
        counter = component(each.iterations)
        counter.assign_add(tf.constant(steps, counter.dtype))
