# SPDX-License-Identifier: Apache-2.0
"""Scalars that a step returns, and results of metrics, as in one process."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext import batches
from tfdist_ext import keras_internals
from tfdist_ext import marks
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.comm.calls import Step
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.numbers import whole_batch
from tfdist_ext.numbers.kinds import COUPLED
from tfdist_ext.numbers.kinds import SAME
from tfdist_ext.numbers.kinds import STATIC
from tfdist_ext.numbers.kinds import SUM
from tfdist_ext.patching import Need
from tfdist_ext.patching import extend
from tfdist_ext.patching import stage
from tfdist_ext.strategy import metric_sums
from tfdist_ext.strategy.metric_sums import Reading
from tfdist_ext.type_names import Metric
from tfdist_ext.type_names import Model
from tfdist_ext.type_names import Nest
from tfdist_ext.type_names import Original
from tfdist_ext.type_names import T
from tfdist_ext.type_names import TensorLike
from tfdist_ext.type_names import Variable

keras = tf.keras


def watch_results(model: Model) -> None:
    """Marks the tensors that are results of a model's metrics.

    Args:
        model: model whose step is about to run; None for a step without a
            model.
    """
    if not keras_internals.KERAS_3 or not isinstance(model, keras.Model):
        return
    for metric in metric_sums.metrics_of(model):
        extend(type(metric), "result", stage(_result, Need.STRATEGY))


def _result(
    original: Original[T], metric: Metric, *args: Any, **kwargs: Any
) -> T:
    result = original(metric, *args, **kwargs)
    step = whole_batch.keras_step()
    if step is None:
        return result
    reading = metric_sums.read(step, metric)
    flat = [
        tf.convert_to_tensor(value)
        if isinstance(value, keras.Variable)
        else value
        for value in tf.nest.flatten(result)
    ]
    for index, value in enumerate(flat):
        if tf.is_tensor(value):
            marks.set_result_of(value, reading, index)
    return tf.nest.pack_sequence_as(result, flat)


def _is_sent(metric: Metric) -> bool:
    """Whether ranks exchange the states of a metric in a step.

    They do not if the states are averaged or have many numbers, of which this
    warns.

    Args:
        metric: metric of Keras 3.
    """
    numbers = metric_sums.numbers(metric)
    if numbers > metric_sums.MOST_NUMBERS:
        warnings.warn(
            f"Metric '{metric.name}' has states of {numbers} numbers, too "
            "many to be exchanged in every step. The log of a step has the "
            "average of the ranks' results. The log of an epoch, and "
            "`model.get_metrics_result()`, have the result of all samples.",
            stacklevel=2,
        )
        return False
    return not any(map(_is_averaged, metric_sums.states(metric)))


def _is_equal_on_ranks(metric: Metric) -> bool:
    """Whether all states of a metric are equal on all ranks.

    The metric is then updated with the whole batch.
    """
    variables = metric_sums.states(metric)
    first = tf.VariableAggregation.ONLY_FIRST_REPLICA
    return bool(variables) and all(
        isinstance(v, internals.SyncOnReadVariable) and v.aggregation == first
        for v in variables
    )


def _is_averaged(variable: Variable) -> bool:
    return (
        isinstance(variable, internals.SyncOnReadVariable)
        and variable.aggregation == tf.VariableAggregation.MEAN
    )


def result_of_states(
    metric: Metric, states: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Leaves of the result of a metric with the given states."""
    return list(tf.nest.flatten(metric.stateless_result(states)))


# Reductions of integers, and of booleans as integers.
_REDUCTIONS: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "All": tf.reduce_min,
    "Any": tf.reduce_max,
    "Max": tf.reduce_max,
    "Min": tf.reduce_min,
}


@dataclasses.dataclass(frozen=True)
class _Parts:
    """Tensors that are summed over the ranks to compute some of the values.

    Attributes:
        own: tensors of this rank.
        finish: computes the values from the sums.
        places: indices of the values in the flat nest.
    """

    own: Sequence[tf.Tensor]
    finish: Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]]
    places: Sequence[int]


def of_whole_batch(outputs: Nest, collectives: Collectives) -> Nest:
    """The outputs of a step, with scalars as one process computes them.

    Args:
        outputs: outputs of a step of Keras's loops, on this rank.
        collectives: collectives of the strategy, called in its scope.

    Returns:
        The same nest. Tensors that are not scalars are unchanged.
    """
    step = collectives.step
    assert step is not None
    if step.checking:  # Every rank has the global batch.
        return outputs
    flat = [_as_tensor(value) for value in tf.nest.flatten(outputs)]
    places = [i for i, value in enumerate(flat) if _is_scalar(value)]
    if step.asynchronous:  # The other ranks may be in other steps.
        for i in places:
            marks.set_reduced(flat[i])
        return tf.nest.pack_sequence_as(outputs, flat)
    parts = _of_metrics(flat, places)
    others = set(places).difference(*(part.places for part in parts))
    names = batches.names_of(outputs)
    means: dict[int, tf.Tensor] = {}
    for i in sorted(others):
        name = f"'{names[i]}', which a step returns,"
        if flat[i].dtype.is_floating:
            if metric_sums.follows_from_sums(step, flat[i]):
                continue
            flat[i] = whole_batch.averageable(flat[i], name)
            if not marks.is_reduced(flat[i]):
                means[i] = flat[i]
        elif _is_count(flat[i], step):
            parts.append(_Parts([flat[i]], list, [i]))
        else:
            flat[i] = _of_integer(flat[i], name, collectives)
    parts += _of_means(means)
    _exchange(parts, flat, collectives)
    for i in places:
        marks.set_reduced(flat[i])
    return tf.nest.pack_sequence_as(outputs, flat)


def _as_tensor(value: TensorLike) -> TensorLike:
    """Converts a variable, or an integer that may be a static size."""
    variable = tf.is_tensor(value) and not isinstance(
        value, tf.Tensor | tf.RaggedTensor | tf.SparseTensor
    )
    if variable or type(value) is int:
        return tf.convert_to_tensor(value)
    return value


def _is_scalar(value: object) -> bool:
    return (
        isinstance(value, tf.Tensor)
        and value.shape.rank == 0
        and (
            value.dtype.is_floating
            or value.dtype.is_integer
            or value.dtype == tf.bool
        )
        and not marks.is_reduced(value)
    )


def _exchange(
    parts: Sequence[_Parts], flat: list[TensorLike], collectives: Collectives
) -> None:
    sent = [tensor for part in parts for tensor in part.own]
    sums = iter(collectives.all_reduce(sent, "logs"))
    for part in parts:
        values = part.finish([next(sums) for _ in part.own])
        for i, value in zip(part.places, values, strict=True):
            flat[i] = value


def _of_metrics(
    flat: Sequence[TensorLike], places: Sequence[int]
) -> list[_Parts]:
    """Results of metrics, computed from the states of all ranks."""
    readings: dict[object, tuple[Reading, list[int], list[int]]] = {}
    for i in places:
        reading, index = marks.result_of(flat[i]) or (None, 0)
        if reading is not None:
            known = readings.setdefault(reading.key, (reading, [], []))
            known[1].append(i)
            known[2].append(index)
    parts = []
    for reading, where, indices in readings.values():
        if _is_equal_on_ranks(reading.metric):
            parts.append(_of_equal([flat[i] for i in where], where))
        elif _is_sent(reading.metric):
            parts.append(_of_metric(reading, where, indices))
    return parts


def _of_equal(values: Sequence[tf.Tensor], where: Sequence[int]) -> _Parts:
    """Values that all ranks have already."""
    return _Parts([], lambda sums: values, where)


def _of_metric(
    reading: Reading, where: Sequence[int], indices: Sequence[int]
) -> _Parts:
    totals = list(reading.values)
    sent = []
    for i, state in enumerate(metric_sums.states(reading.metric)):
        total = reading.totals[i]
        if total is not None:
            totals[i] = total
        elif metric_sums.is_summed(state):
            sent.append(i)

    def finish(sums: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        for i, total in zip(sent, sums, strict=True):
            totals[i] = total
        result = result_of_states(reading.metric, totals)
        return [result[index] for index in indices]

    return _Parts([reading.values[i] for i in sent], finish, where)


def _of_means(means: Mapping[int, tf.Tensor]) -> list[_Parts]:
    """Averages over the ranks, weighted by their samples."""
    parts = []
    for dtype in (tf.float32, tf.float64):
        chosen = {
            i: value
            for i, value in means.items()
            if (value.dtype == tf.float64) == (dtype == tf.float64)
        }
        if chosen:
            parts.append(_of_means_in(dtype, chosen))
    return parts


def _of_means_in(dtype: tf.DType, means: Mapping[int, tf.Tensor]) -> _Parts:
    samples = tf.cast(whole_batch.samples(), dtype)
    # The mean is NaN on a rank without samples.
    own = [
        tf.where(samples > 0, tf.cast(value, dtype) * samples, 0)
        for value in means.values()
    ]

    def finish(sums: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        *totals, count = sums
        return [
            tf.cast(tf.math.divide_no_nan(total, count), value.dtype)
            for total, value in zip(totals, means.values(), strict=True)
        ]

    return _Parts([*own, samples], finish, list(means))


def _is_count(value: tf.Tensor, step: Step) -> bool:
    """Whether an integer is known to be a sum over the samples."""
    if not value.dtype.is_integer or not tf.is_symbolic_tensor(value):
        return False
    kind = whole_batch.kind_of(step, value)
    return kind.name == STATIC or kind.over_ranks == SUM


def _of_integer(
    value: tf.Tensor, name: str, collectives: Collectives
) -> tf.Tensor:
    """An integer or a boolean that is not a sum over the samples."""
    step = collectives.step
    assert step is not None
    if _is_constant(value):
        return _of_constant(value, name, collectives)
    kind = None
    if tf.is_symbolic_tensor(value):
        kind = whole_batch.kind_of(step, value)
        if kind.name == SAME:
            return value
    number = tf.cast(value, tf.int32) if value.dtype == tf.bool else value
    everyone = collectives.all_gather(tf.reshape(number, [1]), "logs/integers")
    reduce = None
    if kind is not None and kind.name == COUPLED and kind.axis is None:
        reduce = _REDUCTIONS.get(kind.over_ranks)
    if reduce is None:
        _warn_of_integer(value, name, "that of rank 0")
    whole = everyone[0] if reduce is None else reduce(everyone)
    return tf.cast(whole, value.dtype)


def _of_constant(
    value: tf.Tensor, name: str, collectives: Collectives
) -> tf.Tensor:
    """An integer that is equal on all ranks, or a static size in the graph."""
    step = collectives.step
    assert step is not None
    samples = tf.get_static_value(step.samples)
    if samples is None:
        return value
    number = tf.cast(value, tf.int32) if value.dtype == tf.bool else value
    everyone = collectives.all_gather(tf.reshape(number, [1]), "logs/sizes")
    own = tf.get_static_value(value)
    multiple = own and samples > 1 and own % samples == 0
    if own is None or own == samples or multiple:
        _warn_of_integer(
            value, name, "that of rank 0, or the sum if they differ"
        )
    equal = tf.reduce_all(everyone == everyone[0])
    whole = tf.where(equal, everyone[0], tf.reduce_sum(everyone))
    return tf.cast(whole, value.dtype)


def _warn_of_integer(value: tf.Tensor, name: str, logged: str) -> None:
    warnings.warn(
        f"{name} is of dtype {value.dtype.name}, and is not known to be a sum "
        "over the samples or the same for every part of the batch. The log "
        f"has {logged}. Return a float that is a mean or a sum over the "
        "samples (tf.cast first, then tf.reduce_mean or tf.reduce_sum), or "
        "the result of a metric of Keras.",
        stacklevel=2,
    )


def _is_constant(value: tf.Tensor) -> bool:
    """Whether a tensor of a graph depends on constants of the graph only."""
    if not tf.is_symbolic_tensor(value):
        return False
    return all(op.type == "Const" for op in _sources(value))


def _sources(value: tf.Tensor) -> list[tf.Operation]:
    """Ops without inputs that a tensor of a graph is computed from."""
    known, found, pending = set(), [], [value.op]
    while pending:
        op = pending.pop()
        if op.name in known:
            continue
        known.add(op.name)
        if not op.inputs:
            found.append(op)
        pending += [each.op for each in op.inputs]
    return found
