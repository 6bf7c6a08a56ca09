# SPDX-License-Identifier: Apache-2.0
"""Which optimizer options are right on a part of a table."""

from __future__ import annotations

from typing import Any

from tfdist_ext import marks
from tfdist_ext.optimizers.by_element import why_not

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
    reason = why_not(optimizer)
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
