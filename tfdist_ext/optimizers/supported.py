# SPDX-License-Identifier: Apache-2.0
"""Which optimizers and options are right for partitioned tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from typing import TypeVar

import tensorflow as tf

from tfdist_ext import keras_internals
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


def why_not_element_wise(optimizer: Any) -> str | None:
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


_LEGACY = ".optimizers.legacy."
_CLIPPING = ("clipnorm", "global_clipnorm", "clipvalue")
_WHOLE = (
    "sharding='data_parallel' (FullSparse) or placement='data_parallel' "
    "(TableConfig)"
)


def check_supported(optimizer: Any) -> None:
    """Refuses an optimizer that would train a partitioned table wrongly.

    Optimizers of `tfdist_ext.optimizers` pass with clipping and loss scaling,
    which they do over all ranks. Others must update every element for itself.

    Args:
        optimizer: a Keras optimizer, of either Keras.

    Raises:
        ValueError: for an option or an optimizer that is wrong when a rank
            holds only a part of a variable; says what to do.
    """
    name = type(optimizer).__name__
    _refuse(
        optimizer,
        "gradient_accumulation_steps",
        "it would keep a dense gradient of the whole table. Use a larger "
        f"batch, or {_WHOLE}.",
    )
    if marks.does_work_over_ranks(optimizer):
        return
    if any(_LEGACY in base.__module__ for base in type(optimizer).__mro__):
        raise ValueError(
            f"Optimizer {name} of tf_keras.optimizers.legacy cannot train a "
            "partitioned table: its slots are not restored from checkpoints. "
            "Use the optimizer of this kind in tfdist_ext.optimizers or "
            f"tf_keras.optimizers, or {_WHOLE}."
        )
    reason = why_not_element_wise(optimizer)
    if reason is not None:
        raise ValueError(
            f"Optimizer {name} cannot train a partitioned table, of which "
            "each rank holds a part: it is not known to update every element "
            f"by itself ({reason}). Use an optimizer of "
            f"tfdist_ext.optimizers, or {_WHOLE}. If it needs no norm, mean "
            "or other value of the whole variable, say so: "
            f"@tfdist_ext.optimizers.element_wise above class {name}."
        )
    for option in _CLIPPING:
        _refuse(
            optimizer,
            option,
            "Keras would clip the part of every rank by itself. Use the "
            "optimizer of this kind in tfdist_ext.optimizers, which clips as "
            f"one process would, or {_WHOLE}.",
        )
    _refuse(
        optimizer,
        "loss_scale_factor",
        "Keras cannot unscale sparse gradients. Use the optimizer of this "
        "kind in tfdist_ext.optimizers.",
    )


def check_accumulation(optimizer: Any) -> None:
    """Refuses accumulated gradients, whatever the model, at several ranks.

    Args:
        optimizer: of a model, or None; also within that of a loss scale.

    Raises:
        ValueError: if it accumulates; says what to do.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    steps = getattr(optimizer, "gradient_accumulation_steps", None)
    if steps:
        raise ValueError(
            f"Optimizer {type(optimizer).__name__}: argument "
            "`gradient_accumulation_steps` is not supported by the strategy:"
            " Keras would sum over the ranks what each has accumulated, within"
            " a condition. Use a larger batch. Received: "
            f"gradient_accumulation_steps={steps}."
        )


def check_table_optimizer(optimizer: Any, variable: Any) -> None:
    """Refuses a model's optimizer that would ignore that of a table.

    Args:
        optimizer: a Keras optimizer, of either Keras.
        variable: what it updates.

    Raises:
        ValueError: if the table has an optimizer for itself and `optimizer`
            is not of this package, or if it would have to reset slots.
    """
    keys = marks.keys_of(variable)
    by_rows = marks.does_work_over_ranks(optimizer)
    if keys is not None and keys.config.takes_back and not by_rows:
        raise ValueError(
            f"Table '{variable.name}' gives rows of evicted keys to other "
            f"ones, and {type(optimizer).__name__} would go on with the slots "
            "of the former. Give the model an optimizer of "
            "tfdist_ext.optimizers, or leave out `evict` and `steps_to_live`."
        )
    has_own = marks.own_optimizer(variable) is not None
    if has_own and not marks.does_work_over_ranks(optimizer):
        raise ValueError(
            f"Table '{variable.name}' has an optimizer for itself, which "
            f"{type(optimizer).__name__} would ignore. Give the model an "
            "optimizer of tfdist_ext.optimizers, or leave out the table's "
            "`optimizer`."
        )


def _refuse(optimizer: Any, option: str, reason: str) -> None:
    value = getattr(optimizer, option, None)
    if value:
        raise ValueError(
            f"Optimizer {type(optimizer).__name__}: argument `{option}` is "
            f"not supported with a partitioned table: {reason} Received: "
            f"{option}={value}."
        )


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
        check_table_optimizer(optimizer, variable)
        if marks.shard_spec(variable) is not None:
            check_supported(optimizer)
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
