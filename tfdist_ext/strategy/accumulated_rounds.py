# SPDX-License-Identifier: Apache-2.0
"""Rounds of `Accumulate`: gradients are summed, and applied once."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.embedding.sharded_variable import local_variable
from tfdist_ext.keras_internals import value_of
from tfdist_ext.optimizers.row_gradients import without_duplicates
from tfdist_ext.strategy.round_base import COUNT
from tfdist_ext.strategy.round_base import Apply
from tfdist_ext.strategy.round_base import Pairs
from tfdist_ext.strategy.round_base import Round
from tfdist_ext.strategy.round_base import Steps
from tfdist_ext.type_names import Gradient
from tfdist_ext.type_names import Optimizer
from tfdist_ext.type_names import Strategy
from tfdist_ext.type_names import TensorOrSlices
from tfdist_ext.type_names import Variable


class _DenseSum:
    """Sum of dense gradients of one variable.

    Args:
        variable: variable that the gradients are for.
        gradient: first gradient.
    """

    def __init__(self, variable: Variable, gradient: tf.Tensor) -> None:
        self.variable = variable
        shape, dtype = value_of(variable).shape, gradient.dtype
        self._sum = local_variable(
            lambda: tf.zeros(shape, dtype),
            "sum_of_gradients",
            beside=variable,
        )

    def add(self, gradient: tf.Tensor, weight: tf.Tensor | None) -> None:
        if weight is not None:
            # A rank without samples adds zeros, even for NaNs.
            weight = tf.cast(weight, gradient.dtype)
            gradient = tf.math.multiply_no_nan(gradient, weight)
        self._sum.assign_add(gradient)

    def value(self) -> tf.Tensor:
        return self._sum.read_value()

    def clear(self) -> None:
        self._sum.assign(tf.zeros_like(self._sum))


class _RowSum:
    """Sum of sparse gradients of one variable: the rows that they have.

    Rows of a table are summed. Of other gradients every row is kept as often
    as it occurs, because Keras's optimizers may square each one.

    Args:
        variable: variable that the gradients are for.
        gradient: first gradient.
    """

    def __init__(self, variable: Variable, gradient: tf.IndexedSlices) -> None:
        self.variable = variable
        self._spec = marks.gradient_spec(gradient)
        self._kept = marks.deferred_rows(gradient)
        self.is_unique = self._spec is not None or marks.is_unique(gradient)
        shape = value_of(variable).shape.as_list()
        if self._spec is not None and self._kept is not None:
            shape = [self._spec.rows, self._spec.dim]
        self._shape = shape
        index, dtype = gradient.indices.dtype, gradient.values.dtype
        width = shape[1:]
        self._rows = local_variable(
            lambda: tf.zeros([0], index), "rows_of_gradients", [None]
        )
        self._values = local_variable(
            lambda: tf.zeros([0, *width], dtype),
            "sums_of_rows",
            [None, *width],
        )

    def add(self, gradient: tf.IndexedSlices, weight: tf.Tensor | None) -> None:
        values = gradient.values
        if weight is not None:
            weight = tf.cast(weight, values.dtype)
            values = tf.math.multiply_no_nan(values, weight)
        total = tf.IndexedSlices(
            tf.concat([self._values.read_value(), values], 0),
            tf.concat([self._rows.read_value(), gradient.indices], 0),
        )
        if self.is_unique:
            total = without_duplicates(total)
        self._rows.assign(total.indices)
        self._values.assign(total.values)

    def value(self) -> tf.IndexedSlices:
        kind = tf.int32 if max(self._shape) <= tf.int32.max else tf.int64
        dense_shape = tf.constant(self._shape, kind)
        if self._spec is not None:
            marks.set_gradient_spec(dense_shape, self._spec)
        if self._kept is not None:
            marks.set_deferred_rows(dense_shape, self._kept)
        if self.is_unique:
            marks.set_unique(dense_shape)
        rows, values = self._rows.read_value(), self._values.read_value()
        return tf.IndexedSlices(values, rows, dense_shape)

    def remove(self, rows: tf.Tensor) -> None:
        """Removes some of the rows, which are unique."""
        mine, values = self._rows.read_value(), self._values.read_value()
        places = tf.searchsorted(mine, rows)[:, tf.newaxis]
        removed = tf.scatter_nd(
            places, tf.ones_like(places[:, 0]), tf.shape(mine)
        )
        self._rows.assign(tf.boolean_mask(mine, removed == 0))
        self._values.assign(tf.boolean_mask(values, removed == 0))

    def clear(self) -> None:
        self._rows.assign(self._rows.read_value()[:0])
        self._values.assign(self._values.read_value()[:0])


class GradientSums:
    """Sums of the gradients that an optimizer has been given.

    A dense gradient takes the memory of its variable, a sparse one that of
    the rows that the steps have touched.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[int, bool], Any] = {}

    def add(
        self,
        pairs: Pairs,
        weight: tf.Tensor | None,
        shard_weight: tf.Tensor | None,
    ) -> None:
        """Adds the gradients of a step.

        Args:
            pairs: gradients (tensor, IndexedSlices or None) and variables.
            weight: factor of the gradients; None for 1. A factor of 0 turns
                NaNs to 0.
            shard_weight: factor of the gradients of shards.
        """
        for gradient, variable in pairs:
            if gradient is None:
                continue
            shard = marks.gradient_spec(gradient) is not None
            own = self._of(variable, gradient)
            own.add(gradient, shard_weight if shard else weight)

    def _of(
        self, variable: Variable, gradient: Gradient
    ) -> _DenseSum | _RowSum:
        sparse = isinstance(gradient, tf.IndexedSlices)
        key = id(value_of(variable)), sparse
        if key not in self._sums:
            kind = _RowSum if sparse else _DenseSum
            self._sums[key] = kind(variable, gradient)
        return self._sums[key]

    def pairs(self) -> list[tuple[TensorOrSlices, Variable]]:
        """The sums and their variables, in the order of the first step."""
        return [(each.value(), each.variable) for each in self._sums.values()]

    def remove(self, pairs: Sequence[tuple[tf.Tensor, Variable]]) -> None:
        """Forgets the sums of some rows.

        Args:
            pairs: unique rows that have sums, and their variables.
        """
        for rows, variable in pairs:
            self._sums[id(value_of(variable)), True].remove(rows)

    def variables(self) -> list[Variable]:
        """Variables that there are sums for."""
        return [each.variable for each in self._sums.values()]

    def clear(self) -> None:
        """Sets all sums to zero."""
        for each in self._sums.values():
            each.clear()


class AccumulatedRound(Round):
    """The steps of one optimizer whose gradients are summed."""

    def __init__(self, steps: Steps) -> None:
        super().__init__(steps)
        self._sums = GradientSums()

    def step(self, optimizer: Optimizer, pairs: Pairs, apply: Apply) -> None:
        del optimizer
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

    def variables(self) -> list[Variable]:
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


def _divided(gradient: TensorOrSlices, total: tf.Tensor) -> TensorOrSlices:
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.math.divide_no_nan(gradient, tf.cast(total, gradient.dtype))
    values = gradient.values
    values = tf.math.divide_no_nan(values, tf.cast(total, values.dtype))
    # The same `dense_shape` tensor, which carries the mark of the gradient.
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
