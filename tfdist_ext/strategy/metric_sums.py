# SPDX-License-Identifier: Apache-2.0
"""Sums of the states of metrics over the ranks, in few exchanges.

Most states of metrics are summed over the ranks when they are read, which needs
an exchange. A step of Keras's loops sums many states in one exchange. States
that it updates before it sums gradients are part of that sum. The others are
summed when one of them is read. A sum is used until the step writes the state
again.

Which states are summed together is computed from the graph of the step only.
Ranks that trace the step again, for a batch of another size, may have functions
inside of it that are traced already.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence

import tensorflow as tf

from tfdist_ext import keras_internals
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.comm.calls import Step
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.type_names import Metric
from tfdist_ext.type_names import Model
from tfdist_ext.type_names import TensorOrSlices
from tfdist_ext.type_names import Variable

# Largest size of a metric's states that ranks exchange in every step.
MOST_NUMBERS = 16384


@dataclasses.dataclass(frozen=True)
class _Summed:
    """A sum of a state over the ranks.

    Attributes:
        variable: the state.
        total: the sum, a tensor of the graph that it was read in.
        writes: number of ops of that graph that may have written the state.
    """

    variable: Variable
    total: tf.Tensor
    writes: int


@dataclasses.dataclass(frozen=True)
class Reading:
    """The states of a metric when a step reads its result.

    Attributes:
        metric: the metric.
        values: this rank's value of each state.
        totals: sum of each state over the ranks; None if it must be exchanged,
            or if the state is not a sum.
        key: equal for readings between which no state was written.
    """

    metric: Metric
    values: Sequence[tf.Tensor]
    totals: Sequence[tf.Tensor | None]
    key: object


def metrics_of(owner: Model | Metric) -> list[Metric]:
    """Metrics of a model, including those inside of other metrics."""
    found = []
    for metric in owner.metrics:
        # A metric of tf_keras is a layer, whose `metrics` are others.
        is_layer = isinstance(metric, tf.keras.layers.Layer)
        contains = not is_layer and hasattr(metric, "metrics")
        found += metrics_of(metric) if contains else [metric]
    return found


def states(metric: Metric) -> list[Variable]:
    """TensorFlow's variables of a metric."""
    return [keras_internals.value_of(v) for v in metric.variables]


def is_summed(state: Variable) -> bool:
    """Whether a state is the sum of the ranks' states when it is read."""
    return (
        isinstance(state, internals.SyncOnReadVariable)
        and state.aggregation == tf.VariableAggregation.SUM
    )


def numbers(metric: Metric) -> int:
    """How many numbers the states of a metric have."""
    return sum(v.shape.num_elements() or 0 for v in states(metric))


def own_value(state: Variable) -> tf.Tensor:
    """This rank's value of a state."""
    return internals.components(state)[0].read_value()


def read(step: Step, metric: Metric) -> Reading:
    """Reads the states of a metric.

    Args:
        step: step that is traced or run.
        metric: metric whose result the step reads.
    """
    found = states(metric)
    totals = [known(step, v) if is_summed(v) else None for v in found]
    key: object = object()
    if not tf.executing_eagerly():
        key = id(internals.current_graph()), id(metric), *map(_writes, found)
    return Reading(metric, list(map(own_value, found)), totals, key)


def written(step: Step) -> list[Variable]:
    """States that the graph being traced has written and not summed since.

    Args:
        step: step that is traced.

    Returns:
        States of the metrics of the step's model.
    """
    if tf.executing_eagerly() or step.model is None:
        return []
    return [
        state
        for metric in metrics_of(step.model)
        if numbers(metric) <= MOST_NUMBERS
        for state in states(metric)
        if is_summed(state) and _writes(state) and known(step, state) is None
    ]


def sum_with(
    step: Step,
    sum_gradients: Callable[[list[TensorOrSlices], int], list[TensorOrSlices]],
    gradients: list[TensorOrSlices],
) -> list[TensorOrSlices]:
    """Sums gradients, and the float32 states that the step has written.

    Args:
        step: step that is traced or run.
        sum_gradients: sums tensors over the ranks in one exchange. The second
            argument is the number of the last tensors that have no weights.
        gradients: gradients of this rank.

    Returns:
        The sums of the gradients.
    """
    summed = [state for state in written(step) if state.dtype == tf.float32]
    own = list(map(own_value, summed))
    sums = sum_gradients([*gradients, *own], len(own))
    store(step, summed, sums[len(gradients) :])
    return sums[: len(gradients)]


def known(step: Step, state: Variable) -> tf.Tensor | None:
    """The sum of a state over the ranks; None if it must be exchanged.

    Args:
        step: step that is traced or run.
        state: a state for which `is_summed` is True.
    """
    if tf.executing_eagerly():
        return None
    found = step.metric_sums.get(_key(state))
    if found is None or found.writes != _writes(state):
        return None
    return found.total


def store(
    step: Step, summed: Sequence[Variable], totals: Sequence[tf.Tensor]
) -> None:
    """Stores sums of states that the step has not written since.

    Args:
        step: step that is traced.
        summed: the states.
        totals: sum over the ranks of each.
    """
    for state, total in zip(summed, totals, strict=True):
        found = _Summed(state, total, _writes(state))
        step.metric_sums[_key(state)] = found


def total(
    step: Step, collectives: Collectives, state: Variable
) -> tf.Tensor | None:
    """The sum of a state over the ranks, exchanged with other states.

    Args:
        step: step that is traced.
        collectives: collectives of the strategy.
        state: the state that is read.

    Returns:
        The sum; None if the step does not sum the state with others.
    """
    if tf.executing_eagerly() or not is_summed(state):
        return None
    found = known(step, state)
    if found is None:
        summed = written(step)
        if not any(each is state for each in summed):
            return None
        own = [own_value(each) for each in summed]
        store(step, summed, collectives.all_reduce(own, "logs"))
        found = known(step, state)
    return found


def follows_from_sums(step: Step, value: tf.Tensor) -> bool:
    """Whether a value is computed only from sums of states, and constants.

    In tf_keras the results of metrics are. They are equal on all ranks.

    Args:
        step: step that is traced or run.
        value: a tensor that the step returns.
    """
    if not tf.is_symbolic_tensor(value):
        return False
    totals = [each.total for each in step.metric_sums.values()]
    sums = {total.name for total in totals if total.graph is value.graph}
    used, seen, pending = False, set(), [value]
    while pending:
        tensor = pending.pop()
        if tensor.name in sums:
            used = True
        elif tensor.op.name not in seen:
            seen.add(tensor.op.name)
            if not tensor.op.inputs and tensor.op.type != "Const":
                return False
            pending += tensor.op.inputs
    return used


def _key(state: Variable) -> tuple[int, int]:
    return id(internals.current_graph()), id(state)


def _writes(state: Variable) -> int:
    return internals.writes_of(internals.components(state)[0])
