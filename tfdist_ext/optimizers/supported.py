# SPDX-License-Identifier: Apache-2.0
"""Checks of optimizers and their options for partitioned tables."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any
from typing import TypeVar

import tensorflow as tf

from tfdist_ext import keras_internals
from tfdist_ext import marks
from tfdist_ext.comm.collectives import active
from tfdist_ext.type_names import Gradient
from tfdist_ext.type_names import Original
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

Optimizer = TypeVar("Optimizer", bound=type)


def element_wise(optimizer: Optimizer) -> Optimizer:
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


def why_not_element_wise(optimizer: Any) -> str | None:
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


def _overridden(kind: type, optimizer: Any) -> list[str]:
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


def check_supported(optimizer: Any) -> None:
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
    _refuse(
        optimizer,
        "gradient_accumulation_steps",
        "it would keep a dense gradient of the whole table. Leave it out, and "
        "pass consistency=tfdist_ext.consistency.Accumulate(k) to the "
        "strategy, which keeps the rows that steps touch.",
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
            f"independently ({reason}). Use an optimizer of "
            f"tfdist_ext.optimizers, or {_WHOLE}. If it needs no norm, mean "
            "or other value of the whole variable, declare that by "
            f"@tfdist_ext.optimizers.element_wise above class {name}."
        )
    for option in _CLIPPING:
        _refuse(
            optimizer,
            option,
            "Keras would clip each rank's part separately. Use the optimizer "
            "of this kind in tfdist_ext.optimizers, which clips as one "
            f"process would, or {_WHOLE}.",
        )
    _refuse(
        optimizer,
        "loss_scale_factor",
        "Keras cannot unscale sparse gradients. Use the optimizer of this "
        "kind in tfdist_ext.optimizers.",
    )


def check_accumulation(optimizer: Any) -> None:
    """Refuses gradient accumulation in any model on several ranks.

    Args:
        optimizer: a model's optimizer, or None; it may be a loss scale
            optimizer.

    Raises:
        ValueError: if it accumulates gradients. The error says what to do.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    steps = getattr(optimizer, "gradient_accumulation_steps", None)
    if steps:
        raise ValueError(
            f"Optimizer {type(optimizer).__name__}: argument "
            "`gradient_accumulation_steps` is not supported by the strategy: "
            "Keras would sum the accumulated gradients over the ranks within "
            "a condition. Leave it out, and pass "
            f"consistency=tfdist_ext.consistency.Accumulate({steps}) to the "
            "strategy. Received: "
            f"gradient_accumulation_steps={steps}."
        )


def check_table_optimizer(optimizer: Any, variable: Variable) -> None:
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


def _refuse(optimizer: Any, option: str, reason: str) -> None:
    value = getattr(optimizer, option, None)
    if value:
        raise ValueError(
            f"Optimizer {type(optimizer).__name__}: argument `{option}` is "
            f"not supported with a partitioned table: {reason} Received: "
            f"{option}={value}."
        )


def apply(
    original: Original,
    optimizer: Any,
    grads: Sequence[Gradient],
    trainable_variables: Sequence[Any] | None = None,
) -> Any:
    grads = list(grads)
    variables = trainable_variables
    if variables is not None:
        variables = trainable_variables = list(variables)
    else:
        variables = keras_internals.trained_by(optimizer)
    _check(optimizer, zip(grads, variables, strict=False))
    with _optimizing():
        return original(optimizer, grads, trainable_variables)


def apply_gradients(
    original: Original, optimizer: Any, pairs: Any, *args: Any, **kwargs: Any
) -> Any:
    pairs = list(pairs)
    _check(optimizer, pairs)
    with _optimizing():
        return original(optimizer, pairs, *args, **kwargs)


def _optimizing() -> contextlib.AbstractContextManager[None]:
    collectives = active()
    if collectives is None or collectives.step is None:
        return contextlib.nullcontext()
    return collectives.step.optimizing()


def _check(optimizer: Any, pairs: Any) -> None:
    if not hasattr(tf.distribute.get_strategy(), "collectives"):
        return
    for gradient, variable in pairs:
        check_table_optimizer(optimizer, variable)
        if marks.shard_spec(variable) is not None:
            check_supported(optimizer)
            check_gradient(variable, gradient)


def check_update(variable: Variable, args: Sequence[Any]) -> None:
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
