# SPDX-License-Identifier: Apache-2.0
"""The state of a training, copied into memory and put back."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext.callbacks.update_watch import inner_optimizer
from tfdist_ext.keras_internals import value_of


class Snapshot:
    """What model and optimizer hold on this rank, at one time.

    Args:
        model: whose optimizer is built.
    """

    def __init__(self, model: Any) -> None:
        self._values = [
            (variable, np.array(variable.numpy()))
            for variable in _variables(model)
        ]
        self._keys = [(keys, keys.copy()) for keys in _vocabularies(model)]

    def put_back(self) -> None:
        """Gives model and optimizer what they had."""
        for variable, value in self._values:
            variable.assign(value)
        for keys, copied in self._keys:
            keys.put_back(copied)


class Beside:
    """What a step changes besides its update, at one time: metrics, means.

    Args:
        model: whose metrics are built, or not yet.
    """

    def __init__(self, model: Any) -> None:
        self._trained = model
        variables = [
            each
            for each in map(here, model.non_trainable_variables)
            if each.dtype.is_floating
        ]
        variables += map(here, _of_metrics(model))
        self._values = [
            (each, np.array(each.numpy()))
            for each in filter(_is_number, variables)
        ]

    def put_back(self) -> None:
        """Gives them what they had; metrics made since then begin anew."""
        known = {id(variable) for variable, _ in self._values}
        for metric in self._trained.metrics:
            own = [here(each) for each in metric.variables]
            if any(_is_number(v) and id(v) not in known for v in own):
                metric.reset_state()
        for variable, value in self._values:
            variable.assign(value)


def _of_metrics(model: Any) -> list[Any]:
    return [each for metric in model.metrics for each in metric.variables]


def variables_of_optimizer(optimizer: Any) -> list[Any]:
    """All that an optimizer keeps, for tables that bring their own too."""
    found = optimizer.variables
    found = list(found() if callable(found) else found)
    for own in getattr(optimizer, "table_optimizers", ()):
        found += variables_of_optimizer(own)
    return found


def _variables(model: Any) -> list[tf.Variable]:
    variables = [*model.weights, *variables_of_optimizer(model.optimizer)]
    inner = inner_optimizer(model)
    if inner is not model.optimizer:
        variables += variables_of_optimizer(inner)
    unique = {id(each): each for each in map(here, variables)}
    return [each for each in unique.values() if _is_number(each)]


def _is_number(variable: tf.Variable) -> bool:
    return bool(variable.dtype.is_numpy_compatible)


def here(variable: Any) -> tf.Variable:
    """TensorFlow's variable that holds a variable's value on this rank."""
    native = value_of(variable)
    strategy = getattr(native, "distribute_strategy", None)
    if strategy is None:
        return native
    return strategy.experimental_local_results(native)[0]


def _vocabularies(model: Any) -> list[Any]:
    found = map(marks.keys_of, model.trainable_variables)
    return [keys for keys in found if keys is not None]
