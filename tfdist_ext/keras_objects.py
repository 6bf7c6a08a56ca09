# SPDX-License-Identifier: Apache-2.0
"""What is used of Keras's losses, metrics and optimizers as objects."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext.keras_internals import KERAS_3
from tfdist_ext.keras_internals import value_of


def function_arguments(wrapper: Any) -> dict[str, Any]:
    """What a loss or a metric passes on to the function that it wraps."""
    return getattr(wrapper, "_fn_kwargs", {})


def metric_function(metric: Any) -> Any:
    """The function of a `MeanMetricWrapper`."""
    return metric._fn


def strategy_of(optimizer: Any) -> Any:
    """The strategy in whose scope an optimizer was made, None if unknown."""
    return getattr(optimizer, "_distribution_strategy", None)


def remake_states(
    metric: Any,
    states: Sequence[Any],
    prepare: Callable[[Any], object] = lambda variable: None,
) -> list[Any]:
    """Makes variables of a metric once more, where that is asked for.

    Args:
        metric: of either Keras.
        states: variables of it, with values that the new ones get.
        prepare: is given TensorFlow's new variable before it gets its value.

    Returns:
        Those that cannot be replaced.
    """
    if not KERAS_3:
        return _replace_states(metric, states, prepare)
    for state in states:
        value = state.numpy()
        state._initialize(value)
        prepare(value_of(state))
        state.assign(value)  # a part of it, where ranks are summed
    return []


def _replace_states(
    metric: Any, states: Sequence[Any], prepare: Callable[[Any], object]
) -> list[Any]:
    """`remake_states` for tf_keras, by the attributes that hold them."""
    left = {id(state): state for state in states}
    for holder in (metric, *metric._metrics):
        # As it was bound when it was made, perhaps before it was wrapped.
        vars(holder).pop("update_state", None)
        for name, value in list(vars(holder).items()):
            if id(value) not in left:
                continue
            state = tf.Variable(
                value.numpy(),
                trainable=False,
                name=value.name.split(":")[0],
                dtype=value.dtype,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )
            prepare(state)
            state.assign(value.numpy())
            setattr(holder, name, state)
            del left[id(value)]
    return list(left.values())


def is_keras_class(kind: type[Any]) -> bool:
    """Whether a class is Keras's own, of either Keras."""
    return kind.__module__.split(".")[0] in ("keras", "tf_keras")


def is_container(value: Any) -> bool:
    """Whether a loss or a metric is what `compile` makes of several."""
    kind = value if isinstance(value, type) else type(value)
    return is_keras_class(kind) and kind.__module__.endswith("compile_utils")


def set_mask(value: Any, mask: tf.Tensor) -> None:
    """Says what of a result counts, as `mask_of` tells it."""
    value._keras_mask = mask


def compiled_losses(
    model: Any, y: Any, y_pred: Any
) -> list[tuple[Any, Any, Any]]:
    """The losses of `compile`, and the labels and predictions of each.

    Args:
        model: of either Keras.
        y: labels of the outputs.
        y_pred: the outputs.

    Returns:
        Nothing where that is not told before the losses are called.
    """
    if KERAS_3:
        losses = getattr(model, "_compile_loss", None)
        found = getattr(losses, "_flat_losses", None) or []
        try:
            return [
                (each.loss, _at(each.path, y), _at(each.path, y_pred))
                for each in found
            ]
        except (KeyError, IndexError, TypeError):
            return []
    losses = getattr(model, "compiled_loss", None)
    if losses is None or y is None:
        return []
    labels = tf.nest.flatten(losses._conform_to_outputs(y_pred, y))
    if not losses.built:
        losses.build(y_pred)
    flat = tf.nest.flatten(y_pred)
    if not len(losses._losses) == len(labels) == len(flat):
        return []
    triples = zip(losses._losses, labels, flat, strict=True)
    return [
        (loss, y, predicted)
        for loss, y, predicted in triples
        if loss is not None and y is not None
    ]


def _at(path: Sequence[Any], value: Any) -> Any:
    for part in path:
        value = value[part]
    return value
