# SPDX-License-Identifier: Apache-2.0
"""Keras's `gradient_accumulation_steps` under a strategy.

Keras updates in a branch of the step, where a strategy cannot call its
replicas and would sum the gradients over the ranks once more. Here gradients
are summed over the ranks in every step, and are added to Keras's own
accumulators. Every k-th step updates with their mean, in a branch that calls
the replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.keras_internals import value_of
from tfdist_ext.type_names import Gradient
from tfdist_ext.type_names import Original
from tfdist_ext.type_names import TensorOrSlices
from tfdist_ext.type_names import Variable

# Method of optimizers of Keras 3 that is replaced.
APPLY = "_backend_apply_gradients"


def accumulate(
    original: Original[None],
    optimizer: tf.keras.optimizers.Optimizer,
    grads: Sequence[Gradient],
    trainable_variables: Sequence[Variable],
) -> None:
    steps = optimizer.gradient_accumulation_steps
    strategy = tf.distribute.get_strategy()
    context = tf.distribute.get_replica_context()
    applying = getattr(strategy.extended, "applying_sums", None)
    if not steps or context is None or applying is None:
        return original(optimizer, grads, trainable_variables)
    collectives = strategy.collectives
    if collectives is not None:
        grads = context.all_reduce(tf.distribute.ReduceOp.SUM, list(grads))
    variables = list(trainable_variables)
    with applying():
        if collectives is not None and collectives.trial is not None:
            # A check compares the gradients of this step.
            _update(optimizer, grads, variables)
            return None
        sums = [
            _Sum(optimizer, gradient, variable)
            for gradient, variable in zip(grads, variables, strict=True)
        ]
        step = collectives.step if collectives is not None else None
        with tf.control_dependencies(step.checks_here() if step else []):
            for each in sums:
                each.add()

        def update() -> None:
            means = [each.mean(steps) for each in sums]
            _update(optimizer, means, variables)
            for each in sums:
                each.clear()

        count = tf.convert_to_tensor(value_of(optimizer._iterations)) + 1
        internals.run_if(tf.equal(count % steps, 0), update)
    return None


def _update(
    optimizer: tf.keras.optimizers.Optimizer,
    grads: Sequence[Gradient],
    variables: Sequence[Variable],
) -> None:
    """Updates variables now, as Keras does without accumulation."""
    grads = optimizer._clip_gradients(list(grads))
    optimizer._apply_weight_decay(variables)
    optimizer._backend_update_step(grads, variables, optimizer.learning_rate)


class _Sum:
    """The accumulator of one variable, and a gradient that is added to it.

    Optimizers of this package update the rows of a sparse gradient only, so
    they are given the rows whose sums are not zero. Others are given the sum
    as a dense tensor, as in Keras.

    Args:
        optimizer: the optimizer, which has the accumulator.
        gradient: gradient of the global batch.
        variable: variable of Keras or TensorFlow.
    """

    def __init__(
        self,
        optimizer: tf.keras.optimizers.Optimizer,
        gradient: Gradient,
        variable: Variable,
    ) -> None:
        index = optimizer._get_variable_index(variable)
        accumulator = value_of(optimizer._accumulated_gradients[index])
        self._sum = internals.components(accumulator)[0]
        self._gradient = gradient
        self._by_rows = isinstance(
            gradient, tf.IndexedSlices
        ) and marks.does_work_over_ranks(optimizer)

    def add(self) -> None:
        gradient: Any = self._gradient
        if isinstance(gradient, tf.IndexedSlices):
            values = tf.cast(gradient.values, self._sum.dtype)
            self._sum.scatter_add(tf.IndexedSlices(values, gradient.indices))
        else:
            self._sum.assign_add(tf.cast(gradient, self._sum.dtype))

    def _rows(self) -> tf.Tensor:
        value = self._sum.read_value()
        axes = list(range(1, value.shape.rank))
        return tf.where(tf.reduce_any(value != 0, axes))[:, 0]

    def mean(self, steps: int) -> TensorOrSlices:
        if not self._by_rows:
            return self._sum.read_value() / steps
        gradient: Any = self._gradient
        rows = self._rows()
        # The same `dense_shape` tensor, which carries the mark of the gradient.
        return tf.IndexedSlices(
            tf.gather(self._sum, rows) / steps,
            tf.cast(rows, gradient.indices.dtype),
            gradient.dense_shape,
        )

    def clear(self) -> None:
        if not self._by_rows:
            self._sum.assign(tf.zeros_like(self._sum))
            return
        rows = self._rows()
        zeros = tf.zeros_like(tf.gather(self._sum, rows))
        self._sum.scatter_update(tf.IndexedSlices(zeros, rows))
