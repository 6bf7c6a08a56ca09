# SPDX-License-Identifier: Apache-2.0
"""What an optimizer is about to apply to partitioned tables, looked at first.

It is looked at where a program hands gradients to an optimizer. The function
that `extended.update` gets later tells nothing: it may be a method, a closure,
a `functools.partial` or any other object that can be called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext import keras_internals
from tfdist_ext import marks
from tfdist_ext.optimizers import unsupported

keras = tf.keras


def apply(
    original: Any,
    optimizer: Any,
    grads: Sequence[Any],
    trainable_variables: Sequence[Any] | None = None,
) -> Any:
    grads = list(grads)
    variables = trainable_variables
    if variables is not None:
        variables = trainable_variables = list(variables)
    else:
        variables = keras_internals.trained_by(optimizer)
    _check(optimizer, zip(grads, variables, strict=False))
    return original(optimizer, grads, trainable_variables)


def apply_gradients(
    original: Any, optimizer: Any, pairs: Any, *args: Any, **kwargs: Any
) -> Any:
    pairs = list(pairs)
    _check(optimizer, pairs)
    return original(optimizer, pairs, *args, **kwargs)


def _check(optimizer: Any, pairs: Any) -> None:
    if not hasattr(tf.distribute.get_strategy(), "collectives"):
        return
    for gradient, variable in pairs:
        unsupported.check_table_optimizer(optimizer, variable)
        if marks.shard_spec(variable) is not None:
            unsupported.check_supported(optimizer)
            check_gradient(variable, gradient)


def check_update(variable: Any, args: Sequence[Any]) -> None:
    """Refuses rows for a part of a table that are not of this part.

    Args:
        variable: that `extended.update` is to update.
        args: what the function that updates it gets besides.

    Raises:
        ValueError: for IndexedSlices that were not made for the shard.
    """
    if marks.shard_spec(variable) is not None:
        for value in args:
            if isinstance(value, tf.IndexedSlices):
                check_gradient(variable, value)


def check_gradient(variable: Any, gradient: Any) -> None:
    """Refuses a gradient of a table that is not one of this rank's part.

    Args:
        variable: a shard.
        gradient: tensor, IndexedSlices or None.

    Raises:
        ValueError: then.
    """
    spec = marks.shard_spec(variable)
    assert spec is not None
    if gradient is None or marks.gradient_spec(gradient) is not None:
        return
    raise ValueError(
        f"Table '{spec.table}' is partitioned and got a gradient that does "
        "not come from its layer's lookup alone "
        f"({type(gradient).__name__}). Something else in the model reads the "
        "kernel directly, for example a kernel_regularizer, or the layer is "
        "called in a tf.function, a branch (tf.cond) or a loop (tf.map_fn) "
        "within the model: call it outside of that. Leave such a term out, "
        "or use sharding='data_parallel' (FullSparse) or "
        "placement='data_parallel' (TableConfig)."
    )
