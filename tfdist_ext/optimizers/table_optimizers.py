# SPDX-License-Identifier: Apache-2.0
"""Optimizers of single tables, next to the model's."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext.optimizers.adagrad import Adagrad
from tfdist_ext.optimizers.adam import Adam
from tfdist_ext.optimizers.ftrl import Ftrl
from tfdist_ext.optimizers.row_optimizer import RowOptimizer
from tfdist_ext.optimizers.row_wise_adagrad import RowWiseAdagrad
from tfdist_ext.optimizers.sgd import SGD

_KINDS = {
    kind.__name__: kind for kind in (SGD, Adagrad, RowWiseAdagrad, Adam, Ftrl)
}

# What only the model's optimizer does, for all tables.
_OF_THE_MODEL = (
    "clipnorm",
    "global_clipnorm",
    "clipvalue",
    "weight_decay",
    "use_ema",
    "loss_scale_factor",
    "gradient_accumulation_steps",
)


def as_row_optimizer(optimizer: Any, table: str) -> Any:
    """The optimizer of this package that a table's `optimizer` stands for.

    Args:
        optimizer: one of `tfdist_ext.optimizers`, a Keras optimizer of the
            same name, its name, or its serialised form.
        table: for errors.

    Raises:
        ValueError: for any other, or an option that is of the model's only.
    """
    found = _row_optimizer(optimizer, table)
    for option in _OF_THE_MODEL:
        value = getattr(found, option, None)
        if value:
            raise ValueError(
                f"Table '{table}': argument `{option}` of its own optimizer "
                "has no effect; give it to the model's, which applies it to "
                f"all tables. Received: {option}={value!r}."
            )
    return found


def _row_optimizer(optimizer: Any, table: str) -> Any:
    if isinstance(optimizer, dict):  # of a config of keras-rs
        optimizer = tf.keras.utils.deserialize_keras_object(optimizer)
    if isinstance(optimizer, RowOptimizer):
        return optimizer
    if isinstance(optimizer, str):
        by_name = {name.lower(): kind for name, kind in _KINDS.items()}
        if optimizer.lower() in by_name:
            return by_name[optimizer.lower()]()
    elif isinstance(optimizer, tf.keras.optimizers.Optimizer):
        kind = _KINDS.get(type(optimizer).__name__)
        if kind is not None:
            return kind.from_config(optimizer.get_config())
    raise ValueError(
        f"Table '{table}': `optimizer` must be one of "
        f"tfdist_ext.optimizers ({', '.join(_KINDS)}), its Keras counterpart, "
        f"or its name. Received: {optimizer!r}."
    )


def attach(variable: Any, optimizer: Any) -> None:
    """Lets an optimizer update this table, whatever the model's is.

    The model's must be one of this package: it hands the gradient on.

    Args:
        variable: the table, of TensorFlow or Keras.
        optimizer: from `as_row_optimizer`.
    """
    marks.set_own_optimizer(variable, optimizer)
