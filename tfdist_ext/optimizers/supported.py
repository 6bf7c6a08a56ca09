# SPDX-License-Identifier: Apache-2.0
"""Checks of optimizers and their options for partitioned tables."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any
from typing import TypeVar

import tensorflow as tf

from tfdist_ext import keras_internals
from tfdist_ext import marks
from tfdist_ext.comm.collectives import active
from tfdist_ext.keras_internals import KERAS_3
from tfdist_ext.optimizers.processed_rows import warn_of_rows
from tfdist_ext.optimizers.processed_rows import warn_of_squares
from tfdist_ext.type_names import Gradient
from tfdist_ext.type_names import Model
from tfdist_ext.type_names import Optimizer
from tfdist_ext.type_names import Original
from tfdist_ext.type_names import T
from tfdist_ext.type_names import Variable

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
# Methods that a subclass may override without changing the update.
_HARMLESS = {"build", "get_config", "from_config"}

OptimizerClass = TypeVar("OptimizerClass", bound=type)


def element_wise(optimizer: OptimizerClass) -> OptimizerClass:
    """Declares that an optimizer updates every element independently.

    The update of an element may depend on the element's own gradient, value
    and slots, on the learning rate and on the step. It must not depend on other
    elements, as the norm of a variable does. Such an optimizer may train
    partitioned tables, of which each rank holds a part. Keras's own optimizers
    of this kind need no declaration.

        @tfdist_ext.optimizers.element_wise
        class SignSGD(keras.optimizers.Optimizer):
            def update_step(self, gradient, variable, learning_rate):
                self.assign_sub(variable, learning_rate * tf.sign(gradient))

    Args:
        optimizer: an optimizer class of Keras 3 or tf_keras. Subclasses that
            override the update must be declared again.

    Returns:
        The class.

    Raises:
        TypeError: if `optimizer` is not a class.
    """
    if not isinstance(optimizer, type):
        raise TypeError(
            "`element_wise` is for a class of optimizers. Received: "
            f"{optimizer!r}. Write @tfdist_ext.optimizers.element_wise above "
            "the class."
        )
    marks.set_element_wise(optimizer)
    return optimizer


def why_not_element_wise(optimizer: Optimizer) -> str | None:
    """Returns why an optimizer is not known to be element-wise, or None.

    Args:
        optimizer: an optimizer of Keras 3 or tf_keras.
    """
    for kind in type(optimizer).__mro__:
        if kind in _CLASSES or marks.is_element_wise(kind):
            return None
        changed = _overridden(kind, optimizer)
        if changed and isinstance(optimizer, _CLASSES):
            return f"{kind.__name__} overrides `{changed[0]}`"
    return "it is not an optimizer of Keras that does so"


def _overridden(kind: type, optimizer: Optimizer) -> list[str]:
    """Returns the methods of Keras's optimizer that a subclass overrides."""
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


def check_supported(optimizer: Optimizer) -> None:
    """Checks that an optimizer can train a partitioned table.

    Optimizers of `tfdist_ext.optimizers` may clip gradients and scale the
    loss, because they do so over all ranks. Others must be element-wise.

    Args:
        optimizer: an optimizer of Keras 3 or tf_keras.

    Raises:
        ValueError: if the optimizer or an option is wrong when a rank holds
            only a part of a variable. The error says what to do.
    """
    name = type(optimizer).__name__
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
            f"independently ({reason}). Use an optimizer of "
            f"tfdist_ext.optimizers, or {_WHOLE}. If it needs no norm, mean "
            "or other value of the whole variable, declare that by "
            f"@tfdist_ext.optimizers.element_wise above class {name}."
        )
    check_clipping(optimizer)
    _refuse(
        optimizer,
        "loss_scale_factor",
        "Keras cannot unscale sparse gradients. Use the optimizer of this "
        "kind in tfdist_ext.optimizers.",
    )


def check_clipping(optimizer: Optimizer) -> None:
    """Checks that an optimizer can clip the gradient of a table.

    Args:
        optimizer: an optimizer of Keras 3 or tf_keras.

    Raises:
        ValueError: if the optimizer is Keras's and clips. The error says what
            to do.
    """
    if marks.does_work_over_ranks(optimizer):
        return
    for option in _CLIPPING:
        _refuse(
            optimizer,
            option,
            "Keras would clip the gradient of each part of the table, or of "
            "each occurrence of a row, separately. Use the optimizer of this "
            "kind in tfdist_ext.optimizers, which clips the gradient of the "
            "whole table.",
        )


def check_accumulation(optimizer: Optimizer | None) -> None:
    """Refuses options that are wrong with Keras's gradient accumulation.

    Args:
        optimizer: a model's optimizer, or None; it may be a loss scale
            optimizer.

    Raises:
        ValueError: the error says what to do.
    """
    for each in parts_of(optimizer):
        _check_accumulation(each)


def parts_of(optimizer: Any) -> tuple[Any, ...]:
    """Returns the optimizers that a model's optimizer consists of.

    Args:
        optimizer: an optimizer, or None; it may be a loss scale optimizer.

    Returns:
        Both optimizers of a `Split`, otherwise the optimizer.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    parts: tuple[Any, ...] = getattr(optimizer, "parts", (optimizer,))
    return parts


def _check_accumulation(optimizer: Any) -> None:
    steps = getattr(optimizer, "gradient_accumulation_steps", None)
    for option in ("use_ema", "row_clip"):
        if steps and getattr(optimizer, option, None):
            raise ValueError(
                f"Optimizer {type(optimizer).__name__}: argument `{option}` "
                "is not supported by the strategy together with "
                "`gradient_accumulation_steps`, because it needs every step. "
                "Leave one of them out. Received: "
                f"gradient_accumulation_steps={steps}."
            )


def check_table_optimizer(optimizer: Optimizer, variable: Variable) -> None:
    """Refuses a model's optimizer that would ignore a table's optimizer.

    Args:
        optimizer: an optimizer of Keras 3 or tf_keras.
        variable: a variable that it updates.

    Raises:
        ValueError: if `optimizer` is not of this package, and the table has an
            optimizer of its own or slots that must be reset.
    """
    keys = marks.keys_of(variable)
    by_rows = marks.does_work_over_ranks(optimizer)
    if keys is not None and keys.config.reuses_rows and not by_rows:
        raise ValueError(
            f"Table '{variable.name}' gives the rows of evicted keys to new "
            f"keys, and {type(optimizer).__name__} would keep the slots of "
            "the evicted ones. Give the model an optimizer of "
            "tfdist_ext.optimizers, or leave out `evict` and `steps_to_live`."
        )
    has_own = marks.own_optimizer(variable) is not None
    if has_own and not marks.does_work_over_ranks(optimizer):
        raise ValueError(
            f"Table '{variable.name}' has an optimizer of its own, which "
            f"{type(optimizer).__name__} would ignore. Give the model an "
            "optimizer of tfdist_ext.optimizers, or leave out the table's "
            "`optimizer`."
        )


def _refuse(optimizer: Optimizer, option: str, reason: str) -> None:
    value = getattr(optimizer, option, None)
    if value:
        raise ValueError(
            f"Optimizer {type(optimizer).__name__}: argument `{option}` is "
            f"not supported with a table of this package: {reason} Received: "
            f"{option}={value}."
        )


def apply(
    original: Original[T],
    optimizer: Optimizer,
    grads: Sequence[Gradient],
    trainable_variables: Sequence[Variable] | None = None,
) -> T:
    grads = list(grads)
    variables = trainable_variables
    if variables is not None:
        variables = trainable_variables = list(variables)
    else:
        variables = keras_internals.trained_by(optimizer)
    _check(optimizer, zip(grads, variables, strict=False))
    with _optimizing(optimizer):
        return original(optimizer, grads, trainable_variables)


def apply_gradients(
    original: Original[T],
    optimizer: Optimizer,
    pairs: Iterable[tuple[Gradient, Variable]],
    *args: Any,
    **kwargs: Any,
) -> T:
    pairs = list(pairs)
    _check(optimizer, pairs)
    with _optimizing(optimizer):
        return original(optimizer, pairs, *args, **kwargs)


def _optimizing(
    optimizer: Optimizer,
) -> contextlib.AbstractContextManager[None]:
    collectives = active()
    if collectives is None or collectives.step is None:
        return contextlib.nullcontext()
    merges_rows = sums_rows_first(optimizer)
    return collectives.step.optimizing(optimizer, merges_rows)


# Their training steps give gradients to the optimizer as they are.
_KNOWN_STEPS = ("keras", "tf_keras", "keras_rs", "tensorflow_recommenders")


def merges_rows(model: Model | None) -> bool:
    """Whether gradients of equal rows are summed before they are used.

    A `train_step` of the user may clip each of them.

    Args:
        model: the model whose method is a step, or None.
    """
    step = getattr(type(model), "train_step", None)
    if getattr(step, "__module__", "").split(".")[0] not in _KNOWN_STEPS:
        return False
    return sums_rows_first(getattr(model, "optimizer", None))


def sums_rows_first(optimizer: Optimizer | None) -> bool:
    """Whether an optimizer sums gradients of equal rows before it uses them.

    Those of this package do, and those of tf_keras that do not clip. Keras 3
    uses each occurrence of a row by itself, and both Kerases clip it so.

    Args:
        optimizer: an optimizer of Keras 3 or tf_keras, or None.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if marks.does_work_over_ranks(optimizer):
        return True
    if KERAS_3 or type(optimizer) not in _CLASSES:
        return False
    return not any(getattr(optimizer, name, None) for name in _CLIPPING)


def _check(
    optimizer: Optimizer, pairs: Iterable[tuple[Gradient, Variable]]
) -> None:
    if not hasattr(tf.distribute.get_strategy(), "collectives"):
        return
    pairs = list(pairs)
    if any(marks.is_table(variable) for _, variable in pairs):
        warn_of_rows(gradient for gradient, _ in pairs)
    for gradient, variable in pairs:
        check_table_optimizer(optimizer, variable)
        if gradient is not None:
            warn_of_squares(optimizer, variable)
        if marks.shard_spec(variable) is not None:
            check_supported(optimizer)
            check_gradient(variable, gradient)
        elif marks.is_table(variable):
            check_clipping(optimizer)


def check_update(variable: Variable, args: Sequence[object]) -> None:
    """Refuses sparse updates of a shard that were not made for the shard.

    Args:
        variable: the variable that `extended.update` updates.
        args: the other arguments of the update function.

    Raises:
        ValueError: if IndexedSlices were not made for the shard.
    """
    if marks.shard_spec(variable) is not None:
        for value in args:
            if isinstance(value, tf.IndexedSlices):
                check_gradient(variable, value)


def check_gradient(variable: Variable, gradient: Gradient) -> None:
    """Refuses a gradient that does not come from the table's lookup alone.

    Args:
        variable: a shard.
        gradient: tensor, IndexedSlices or None.

    Raises:
        ValueError: if the gradient was not made for the shard.
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
