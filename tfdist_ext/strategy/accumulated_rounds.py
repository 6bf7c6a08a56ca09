# SPDX-License-Identifier: Apache-2.0
"""Rounds of `Accumulate`: gradients are summed, and applied once."""

from __future__ import annotations

import weakref
from typing import Any

import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.strategy.gradient_sums import GradientSums
from tfdist_ext.strategy.gradient_sums import Pairs
from tfdist_ext.strategy.round_base import COUNT
from tfdist_ext.strategy.round_base import Apply
from tfdist_ext.strategy.round_base import Round
from tfdist_ext.strategy.round_base import Steps
from tfdist_ext.type_names import Optimizer
from tfdist_ext.type_names import Strategy


class AccumulatedRound(Round):
    """The steps of one optimizer whose gradients are summed."""

    def __init__(self, steps: Steps) -> None:
        super().__init__(steps)
        self._sums = GradientSums()

    def step(self, pairs: Pairs, apply: Apply) -> None:
        with tf.control_dependencies(self._begin_step()):
            self._add(pairs)
            count = tf.convert_to_tensor(self._count.assign_add(1))
        last = count >= self._steps.mode.k
        internals.run_if(last, lambda: self._finish(apply))

    def _add(self, pairs: Pairs) -> None:
        if not self._weighted:
            self._sums.add(pairs, None, None)
            return
        samples = self._steps.samples()
        of_all = samples
        shards = any(marks.gradient_spec(g) is not None for g, _ in pairs)
        collectives = self._steps.collectives
        if shards and collectives is not None:
            # The gradient of a shard is that of the samples of all ranks.
            (of_all,) = collectives.all_reduce([samples], COUNT)
        self._sums.add(pairs, samples, of_all)
        self._samples.assign_add(samples)

    def _finish(self, apply: Apply) -> None:
        """Applies the mean of the steps, and starts a new round."""
        collectives = self._steps.collectives
        # A custom loop divides by a constant batch size, which would be k times
        # larger with k times larger batches.
        total = tf.constant(float(self._steps.mode.k))
        if self._weighted:
            total = self._samples.read_value()
            if collectives is not None:
                (total,) = collectives.all_reduce([total], COUNT)
        pairs = self._sums.pairs()
        gradients = [_divided(gradient, total) for gradient, _ in pairs]
        if self._weighted and collectives is not None:
            gradients = self._steps.reduce(gradients)
        with self._steps.passing():
            apply([(g, v) for g, (_, v) in zip(gradients, pairs, strict=True)])
        self.clear()

    def clear(self) -> None:
        super().clear()
        self._sums.clear()

    def variables(self) -> list[Any]:
        return self._sums.variables()

    def end(self, strategy: Strategy, optimizer: Optimizer) -> None:
        if self.is_complete():
            return

        # This round must not keep the optimizer alive.
        alive = weakref.ref(optimizer)

        def finish() -> None:
            found: Any = alive()
            self._finish(found.apply_gradients)

        key = len(self.variables()), self._weighted
        self._run_alone(strategy, key, finish)


def _divided(gradient: Any, total: tf.Tensor) -> Any:
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.math.divide_no_nan(gradient, tf.cast(total, gradient.dtype))
    values = gradient.values
    values = tf.math.divide_no_nan(values, tf.cast(total, values.dtype))
    # The same `dense_shape` tensor, which carries the mark of the gradient.
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
