# SPDX-License-Identifier: Apache-2.0
"""Variables that a step assigns without an optimizer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext import keras_internals
from tfdist_ext import marks
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.comm import collectives as collectives_lib
from tfdist_ext.comm.calls import Step
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.comm.exchanges import tensor_of_first_rank
from tfdist_ext.numbers import whole_batch
from tfdist_ext.numbers.kinds import SAME
from tfdist_ext.type_names import DTypeLike
from tfdist_ext.type_names import Original
from tfdist_ext.type_names import StageFunction
from tfdist_ext.type_names import T
from tfdist_ext.type_names import TensorLike
from tfdist_ext.type_names import TensorOrSlices
from tfdist_ext.type_names import Variable

_LOG = logging.getLogger("tfdist_ext")
keras = tf.keras


def _reading(convert: Callable[[tf.Tensor], T]) -> Callable[..., T]:
    def converted(original: None, variable: tf.Variable) -> T:
        del original
        return convert(variable.read_value())

    return converted


def _array(
    original: None,
    variable: Variable,
    dtype: DTypeLike = None,
    copy: bool | None = None,
) -> np.ndarray:
    """Array of a variable; for a scalar, `numpy()` does not return an array."""
    del original, copy  # `numpy()` returns a copy.
    return np.asarray(variable.numpy(), dtype)


# Stages of conversion methods by name. The stock class lacks these methods.
CONVERSIONS: dict[str, StageFunction] = {
    "__array__": _array,
    "__complex__": _reading(complex),
    "__float__": _reading(float),
    "__int__": _reading(int),
}


_Aggregation = tf.VariableAggregation
_LABEL = "state"
_NAMED_AT_ONCE = 5


def change_sum(
    original: Original[T], variable: Variable, value: TensorLike
) -> T:
    """Sums what the ranks add to a variable with aggregation "sum".

    Keras 3 assigns the total plus the value. TensorFlow would assign the sum
    of these totals over the ranks.
    """
    collectives = collectives_lib.active()
    step = collectives.step if collectives else None
    native = keras_internals.value_of(variable)
    sums = getattr(native, "aggregation", None) == _Aggregation.SUM
    if step is None or not sums or not internals.is_mirrored(native):
        return original(variable, value)
    return getattr(native, original.__name__)(tf.cast(value, native.dtype))


def write(
    original: Callable[..., T],
    variable: tf.Variable,
    update: Callable[..., T],
    value: TensorLike,
    **options: Any,
) -> T:
    """Assigns a value computed from the values of all ranks, in a step.

    Args:
        original: TensorFlow's method.
        variable: mirrored variable.
        update: assigns, adds to or subtracts from a component of the
            variable.
        value: value of this rank.
        **options: keyword arguments of `update`.
    """
    strategy = variable.distribute_strategy
    collectives = getattr(strategy, "collectives", None)
    step = collectives.step if collectives else None
    if collectives is None or step is None:
        return original(variable, update, value, **options)
    (component,) = strategy.experimental_local_results(variable)
    writer = keras_internals.writing_module()
    # In these steps all ranks compute the value on all samples.
    equal = step.checking or step.whole
    if not equal and not keras_internals.writes_alone(writer):
        writing = _Writing(collectives, step, variable, component, writer)
        value = writing.whole(value)
    with tf.control_dependencies(step.checks_here()):
        return update(component, value, **options)


def _is_equal(step: Step, value: tf.Tensor) -> bool:
    """Whether the graph shows that a value is equal on all ranks."""
    return whole_batch.kind_of(step, value).name == SAME


def _as_argument(aggregation: tf.VariableAggregation) -> str:
    """Aggregation as it is passed to the installed version of Keras."""
    if keras_internals.KERAS_3:
        return repr(aggregation.name.lower())
    return f"tf.VariableAggregation.{aggregation.name}"


class _Writing:
    """One assignment of a step.

    Args:
        collectives: collectives of the strategy.
        step: step that is traced or run.
        variable: mirrored variable that is assigned.
        component: component of the variable on this rank.
        writer: name of the module that assigns.
    """

    def __init__(
        self,
        collectives: Collectives,
        step: Step,
        variable: tf.Variable,
        component: tf.Variable,
        writer: str,
    ) -> None:
        self._collectives = collectives
        self._step = step
        self._variable = variable
        self._component = component
        self._of_keras = keras_internals.is_of_keras(writer)

    def whole(self, value: TensorOrSlices) -> TensorOrSlices:
        """Value that is assigned instead of this rank's value.

        Raises:
            ValueError: the variable has no rule to reduce the ranks' values.
        """
        aggregation = self._variable.aggregation
        requests = self._collectives.requests
        averaged = aggregation in (_Aggregation.MEAN, _Aggregation.NONE)
        if self._step.asynchronous and requests is not None and averaged:
            self._check_float(aggregation)
            # Averaged when the ranks synchronize.
            requests.assigned[id(self._component)] = self._component
            return value
        if aggregation == _Aggregation.SUM:
            return self._sum(value)
        if aggregation != _Aggregation.ONLY_FIRST_REPLICA:
            self._check_float(aggregation)
        if aggregation == _Aggregation.NONE and not self._of_keras:
            self._step.assigned.append(self._variable)
        if self._is_later(value):
            self._step.later.append(self._component)
            return value
        value = tf.convert_to_tensor(value, self._component.dtype)
        in_function = self._step.inner_function() is not None
        if not in_function and _is_equal(self._step, value):
            return value
        if aggregation == _Aggregation.ONLY_FIRST_REPLICA:
            return tensor_of_first_rank(value, self._collectives, _LABEL)
        own = aggregation == _Aggregation.NONE and not self._of_keras
        if own and not in_function and tf.is_symbolic_tensor(value):
            what = f"Variable '{self._variable.name}'"
            value = whole_batch.averageable(value, what)
        if marks.is_reduced(value):
            return value
        return mean(self._collectives, [value])[0]

    def _check_float(self, aggregation: tf.VariableAggregation) -> None:
        dtype = self._component.dtype
        if dtype.is_floating:
            return
        given = _as_argument(aggregation)
        first = _as_argument(_Aggregation.SUM)
        second = _as_argument(_Aggregation.ONLY_FIRST_REPLICA)
        raise ValueError(
            f"Variable '{self._variable.name}' ({dtype.name}) is assigned in "
            "a step, where each rank has a value of its own, and it is not "
            f"known how to combine them. Pass aggregation={first} to "
            "add_weight if the ranks' values are to be added up, "
            f"aggregation={second} if they are equal, or use float32, which "
            f"is averaged. Received: aggregation={given}."
        )

    def _is_later(self, value: TensorOrSlices) -> bool:
        """Whether the ranks' values are reduced at the end of the step.

        Ranks may take different branches, or update different rows.
        """
        if isinstance(value, tf.IndexedSlices):
            return True
        inner = self._step.inner_graphs()
        return bool(inner) and not any(map(internals.is_function, inner))

    def _sum(self, value: TensorLike) -> tf.Tensor:
        value = tf.convert_to_tensor(value, self._component.dtype)
        if value.dtype == tf.bool:
            count = self._collectives.all_reduce(
                [tf.cast(value, tf.int32)], _LABEL
            )[0]
            return count > 0
        return self._collectives.all_reduce([value], _LABEL)[0]


def settle(collectives: Collectives, step: Step) -> None:
    """Reduces at the end of a step what its branches have assigned.

    Args:
        collectives: collectives of the strategy.
        step: step whose function has been traced or run.
    """
    later = list({id(each): each for each in step.later}.values())
    if later:
        floats = [each for each in later if each.dtype.is_floating]
        values = mean(collectives, [each.read_value() for each in floats])
        for variable, value in zip(floats, values, strict=True):
            variable.assign(value)
        for variable in later:
            if not variable.dtype.is_floating:
                value = variable.read_value()
                value = tensor_of_first_rank(value, collectives, _LABEL)
                variable.assign(value)
    assigned = {id(each): each for each in step.assigned}.values()
    new = [each for each in assigned if not marks.is_named(each)]
    for variable in new:
        marks.set_named(variable)
    if collectives.group.rank == 0:
        _name(new, {each.name for each in later})


def _name(variables: list[Variable], later: set[str]) -> None:
    """Logs once which variables are averaged, and which at the end."""
    at_once = [each.name for each in variables if each.name not in later]
    if at_once:
        _LOG.info(
            "Assigned in a step: %s. Each gets the mean of the ranks' values, "
            "weighted by their samples. Where one process computes another "
            "value, pass `aggregation` to add_weight.",
            _listed(at_once),
        )
    late = [each.name for each in variables if each.name in later]
    if late:
        tf.get_logger().warning(
            "Assigned in a branch or a loop of a step, or row by row: %s. "
            "Each gets the mean of the ranks' values, weighted by their "
            "samples, at the end of the step. What the step reads before is "
            "each rank's own, unlike in one process. Assign outside of the "
            "branch: v.assign(tf.where(condition, value, v)).",
            _listed(late),
        )


def _listed(names: list[str]) -> str:
    shown = [f"'{name}'" for name in names[:_NAMED_AT_ONCE]]
    if len(names) > _NAMED_AT_ONCE:
        shown.append(f"{len(names) - _NAMED_AT_ONCE} others")
    return ", ".join(shown)


def mean(collectives: Collectives, values: list[tf.Tensor]) -> list[tf.Tensor]:
    """Means over the ranks, weighted by the step's samples.

    Args:
        collectives: collectives of the strategy.
        values: floating-point values of this rank.
    """
    ranks = collectives.group.world_size
    parts = [value / tf.constant(ranks, value.dtype) for value in values]
    return collectives.all_reduce(parts, _LABEL, weighted=True)
