# SPDX-License-Identifier: Apache-2.0
"""Metrics and optimizers that were made outside of `strategy.scope()`.

The states of such a metric are known to one rank only, which would report its
own part of the data. They are moved into the scope when the model comes to one
of Keras's loops. An optimizer is refused by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist_ext import keras_internals
from tfdist_ext import keras_objects
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.keras_training import decomposing
from tfdist_ext.keras_training import whole_values
from tfdist_ext.keras_training.loop_start import samples_of

keras = tf.keras

_BATCHES = ("train_on_batch", "test_on_batch")
_TRAINING = ("fit", "train_on_batch")


def in_scope(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    strategy = model.distribute_strategy
    if hasattr(strategy, "collectives"):
        if original.__name__ in _TRAINING:
            for optimizer in _optimizers_of(model):
                _check_optimizer(model, optimizer)
        if strategy.collectives is not None:
            for metric in metrics_of(model):
                move_metric(metric, strategy)
            given = inspect.signature(original).bind(model, *args, **kwargs)
            x, batch_size = map(given.arguments.get, ("x", "batch_size"))
            whole_values.expect(samples_of(x, batch_size, strategy.world_size))
    return original(model, *args, **kwargs)


def _optimizers_of(model: Any) -> list[Any]:
    """Those of `compile`, and a model's own, as those of a GAN."""
    found = [
        each
        for each in vars(model).values()
        if isinstance(each, keras.optimizers.Optimizer)
    ]
    inner = [getattr(each, "inner_optimizer", None) for each in found]
    return found + [each for each in inner if each is not None]


def _check_optimizer(model: Any, optimizer: Any) -> None:
    strategy = model.distribute_strategy
    made_in = keras_objects.strategy_of(optimizer)
    if made_in is None or made_in is strategy:
        return
    raise ValueError(
        f"Optimizer {optimizer.name!r} ({type(optimizer).__name__}) was "
        f"created outside of strategy.scope(), and model {model.name!r} "
        "inside of it. Create both in it, and call `compile`, which creates "
        "an optimizer that is given by its name, in it as well: "
        "`with strategy.scope(): model.compile(optimizer=..., ...)`."
    )


def metrics_of(model: Any) -> Iterator[Any]:
    """All metrics that a model and its layers have, some of them twice."""
    compiled = keras_internals.compile_config(model)
    given = [compiled.get(key) for key in ("metrics", "weighted_metrics")]
    yield from _metrics_in(given)
    yield from _metrics_in(list(model.metrics))
    for layer in keras_internals.layers_of(model):
        yield from _metrics_in(list(vars(layer).values()))


def _metrics_in(value: Any) -> Iterator[Any]:
    if isinstance(value, keras.metrics.Metric):
        yield value
    elif isinstance(value, dict):
        yield from _metrics_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _metrics_in(each)


def move_metric(metric: Any, strategy: Any) -> None:
    """Gives a metric states that all ranks know, for those it has.

    Args:
        metric: whose states may have been made outside of the scope.
        strategy: in whose scope they shall be.

    Raises:
        ValueError: for states that cannot be moved.
    """
    outside = [
        variable
        for variable in metric.variables
        if _is_outside(keras_internals.value_of(variable), strategy)
    ]
    if not outside:
        return

    def prepare(variable: Any) -> None:
        if not decomposing.is_metric_class_local(type(metric)):
            internals.read_from_first(variable)

    with strategy.scope():
        left = keras_objects.remake_states(metric, outside, prepare)
    if left:
        names = ", ".join(variable.name for variable in left)
        raise ValueError(
            f"Metric {metric.name!r} ({type(metric).__name__}) was created "
            "outside of strategy.scope(), and its states cannot be moved into "
            f"it: {names}. Create it inside of `with strategy.scope():`."
        )


def _is_outside(variable: Any, strategy: Any) -> bool:
    if variable is None:  # made later, in the scope
        return False
    return not strategy.extended.variable_created_in_scope(variable)
