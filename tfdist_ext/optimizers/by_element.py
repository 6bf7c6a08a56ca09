# SPDX-License-Identifier: Apache-2.0
"""Optimizers that update every element of a variable by itself.

Only such an optimizer trains a part of a table as it would train the whole.
"""

from __future__ import annotations

from typing import Any
from typing import TypeVar

import tensorflow as tf

from tfdist_ext import marks

keras = tf.keras

_NAMES = (
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Ftrl",
    "Lion",
    "Nadam",
    "RMSprop",
    "SGD",
)
_CLASSES = tuple(
    getattr(keras.optimizers, name)
    for name in _NAMES
    if hasattr(keras.optimizers, name)
)
# What a subclass may override without a change of what an update does.
_HARMLESS = {"build", "get_config", "from_config"}

Optimizer = TypeVar("Optimizer", bound=type)


def element_wise(optimizer: Optimizer) -> Optimizer:
    """Says that an optimizer updates every element of a variable by itself.

    What it adds to an element may depend on the element's own gradient,
    value and slots, the learning rate and the step, but not on other
    elements, as a norm of the variable does. It may then train partitioned
    tables, of which each rank holds a part. Keras's own optimizers of this
    kind are known.

        @tfdist_ext.optimizers.element_wise
        class SignSGD(keras.optimizers.Optimizer):
            def update_step(self, gradient, variable, learning_rate):
                self.assign_sub(variable, learning_rate * tf.sign(gradient))

    Args:
        optimizer: a class, of either Keras. Subclasses that override how it
            updates are to say so again.

    Returns:
        The class.

    Raises:
        TypeError: if it is no class.
    """
    if not isinstance(optimizer, type):
        raise TypeError(
            "`element_wise` is for a class of optimizers. Received: "
            f"{optimizer!r}. Write @tfdist_ext.optimizers.element_wise above "
            "the class."
        )
    marks.set_element_wise(optimizer)
    return optimizer


def why_not(optimizer: Any) -> str | None:
    """Why an optimizer is not known to be element-wise; None if it is.

    Args:
        optimizer: of either Keras.
    """
    for kind in type(optimizer).__mro__:
        if kind in _CLASSES or marks.is_element_wise(kind):
            return None
        changed = _overridden(kind, optimizer)
        if changed and isinstance(optimizer, _CLASSES):
            return f"{kind.__name__} overrides `{changed[0]}`"
    return "it is none of those of Keras that do so"


def _overridden(kind: type, optimizer: Any) -> list[str]:
    """The methods of Keras's optimizers that a subclass of one replaces."""
    base = next((c for c in _CLASSES if isinstance(optimizer, c)), object)
    return sorted(
        name
        for name, value in vars(kind).items()
        if callable(value)
        and not name.startswith("__")
        and name not in _HARMLESS
        and hasattr(base, name)
    )
