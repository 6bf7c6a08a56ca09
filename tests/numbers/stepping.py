# SPDX-License-Identifier: Apache-2.0
"""Models whose `train_step` a program gives in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

keras = tf.keras


def stepping(
    value: Callable[..., Any],
    process: Callable[..., Any] | None = None,
    logs: Callable[..., Any] | None = None,
) -> type:
    """A subclass of `keras.Model` with a step written by hand.

    Args:
        value: makes the loss of labels and predictions, and of sample weights
            where the data has them.
        process: makes gradients of gradients and variables.
        logs: makes more numbers to return of loss and gradients.
    """

    class Stepping(keras.Model):
        def train_step(self, data: Any) -> dict[str, Any]:
            x, *rest = data
            with tf.GradientTape() as tape:
                predicted = self(x, training=True)
                loss = value(rest[0], predicted, *rest[1:])
            variables = self.trainable_variables
            gradients = tape.gradient(loss, variables)
            if process is not None:
                gradients = process(gradients, variables)
            self.optimizer.apply_gradients(
                zip(gradients, variables, strict=True)
            )
            more = logs(loss, gradients) if logs is not None else {}
            return {"loss": tf.reduce_sum(loss), **more}

    return Stepping


def stepped(
    c: Any,
    value: Callable[..., Any],
    process: Callable[..., Any] | None = None,
    logs: Callable[..., Any] | None = None,
    outputs: int = 2,
    kind: str = "numbers",
    weights: bool = False,
    activation: Any = None,
    **how: Any,
) -> dict[str, Any]:
    """Trains a model of one hidden layer by a step written by hand.

    Args:
        c: the context.
        value: see `stepping`.
        process: see `stepping`.
        logs: see `stepping`.
        outputs: units of the last layer.
        kind: of the labels.
        weights: whether samples have weights.
        activation: of the last layer.
        **how: of `Context.train`.
    """
    model = c.model(outputs, activation, kind=stepping(value, process, logs))
    data = c.data(outputs, kind, weights)
    return c.train(model, data, evaluate=False, **how)
