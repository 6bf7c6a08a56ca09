# SPDX-License-Identifier: Apache-2.0
"""Results of metrics within a step of Keras 3, as those of the whole batch.

A metric of Keras 3 that is asked for its result inside a step knows the
samples of its rank only. The result of the ranks' summed states is that of
all samples, which an average of the ranks' results is not. (Metrics of
tf_keras ask for the summed states themselves.)
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext import keras_internals
from tfdist_ext import marks
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.batches import whole_batch
from tfdist_ext.patching import Need
from tfdist_ext.patching import extend
from tfdist_ext.patching import stage

keras = tf.keras

# Numbers of a metric that the ranks exchange in every step, at most.
_MOST_NUMBERS = 16384


def watch(model: Any) -> None:
    """Lets the metrics of a model say which tensors are their results.

    Args:
        model: whose step is about to be run; None of a step of no model.
    """
    if not keras_internals.KERAS_3 or not isinstance(model, keras.Model):
        return
    for metric in _metrics_of(model):
        extend(type(metric), "result", stage(_result, Need.STRATEGY))


def _metrics_of(owner: Any) -> list[Any]:
    """Metrics of a model, also those that a metric consists of."""
    found = []
    for metric in owner.metrics:
        inner = getattr(metric, "metrics", None)
        found += [metric] if inner is None else _metrics_of(metric)
    return found


def _result(original: Any, metric: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(metric, *args, **kwargs)
    if whole_batch.keras_step() is None:
        return result
    flat = [
        tf.convert_to_tensor(value)
        if isinstance(value, keras.Variable)
        else value
        for value in tf.nest.flatten(result)
    ]
    for index, value in enumerate(flat):
        if tf.is_tensor(value):
            marks.set_result_of(value, metric, index)
    return tf.nest.pack_sequence_as(result, flat)


def states_of(metric: Any) -> list[tf.Tensor] | None:
    """What a rank adds to the states of all ranks; None if that is unknown.

    Args:
        metric: of Keras 3.

    Returns:
        A tensor for each of its variables. Those that are equal on all ranks
        are not to be added up, see `is_summed`.
    """
    variables = [keras_internals.value_of(v) for v in metric.variables]
    numbers = sum(v.shape.num_elements() or 0 for v in variables)
    if numbers > _MOST_NUMBERS:
        warnings.warn(
            f"Metric '{metric.name}' has states of {numbers} numbers, too "
            "many to be exchanged in every step. What a step logs of it is "
            "the average of the ranks' results; at the end of an epoch, and "
            "of `model.get_metrics_result()`, it is that of all samples.",
            stacklevel=2,
        )
        return None
    if any(_is_averaged(v) for v in variables):
        return None
    return [internals.components(v)[0].read_value() for v in variables]


def is_summed(metric: Any) -> list[bool]:
    """Whether each state of a metric is the sum of the ranks' states."""
    variables = [keras_internals.value_of(v) for v in metric.variables]
    return [
        isinstance(v, internals.SyncOnReadVariable)
        and v.aggregation == tf.VariableAggregation.SUM
        for v in variables
    ]


def _is_averaged(variable: Any) -> bool:
    return (
        isinstance(variable, internals.SyncOnReadVariable)
        and variable.aggregation == tf.VariableAggregation.MEAN
    )


def result_of_states(metric: Any, states: Sequence[tf.Tensor]) -> list[Any]:
    """The leaves of a metric's result, had it these states."""
    return list(tf.nest.flatten(metric.stateless_result(states)))
