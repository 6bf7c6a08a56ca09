# SPDX-License-Identifier: Apache-2.0
"""Rejects models and callbacks that would train wrongly on several ranks."""

from __future__ import annotations

import warnings
from typing import Any

import tensorflow as tf

from tfdist_ext import keras_internals
from tfdist_ext.consistency import ASP
from tfdist_ext.consistency import Accumulate
from tfdist_ext.consistency import Consistency
from tfdist_ext.consistency import LocalSteps
from tfdist_ext.consistency import is_asynchronous
from tfdist_ext.embedding import sharded_variable
from tfdist_ext.optimizers import supported
from tfdist_ext.tables import checks
from tfdist_ext.type_names import Model
from tfdist_ext.type_names import Optimizer
from tfdist_ext.type_names import Original
from tfdist_ext.type_names import T

keras = tf.keras


def check_optimizer(optimizer: Optimizer | None) -> None:
    """Rejects an optimizer of Horovod, which would sum gradients again.

    Args:
        optimizer: optimizer of a model, possibly inside of a loss-scale
            optimizer; or None.

    Raises:
        ValueError: it is an optimizer of Horovod; the error says what to do.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if _of_horovod(inner):
        raise ValueError(
            "hvd.DistributedOptimizer exchanges gradients that the strategy "
            "has exchanged already (or, with Keras 3, does nothing). Give "
            f"`compile` the {type(inner).__name__} itself; with "
            "engine='horovod' Horovod runs the exchanges."
        )


def check_callbacks(callbacks: object) -> None:
    """Rejects callbacks of Horovod, whose work the strategy does.

    Args:
        callbacks: `callbacks` argument of `fit`: one, several or None.

    Raises:
        ValueError: the error names the first such callback and says what to
            do.
    """
    for callback in tf.nest.flatten(getattr(callbacks, "callbacks", callbacks)):
        if _of_horovod(callback):
            raise ValueError(
                f"Callback hvd.callbacks.{type(callback).__name__} repeats "
                "what the strategy does: it gives all ranks the same initial "
                "values, averages metrics, and needs no larger learning rate. "
                "Leave it out."
            )


def _of_horovod(thing: object) -> bool:
    modules = [base.__module__ for base in type(thing).__mro__]
    return any(name.partition(".")[0] == "horovod" for name in modules)


def check_recurrent(model: Model, ranks: int) -> None:
    """Rejects a model with stateful recurrent layers.

    Args:
        model: model that is about to be trained, evaluated or used to
            predict.
        ranks: number of ranks, more than one.

    Raises:
        ValueError: the error names the first such layer.
    """
    for layer in keras_internals.layers_of(model):
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            raise ValueError(
                f"Layer '{layer.name}' ({type(layer).__name__}) has "
                "stateful=True: it has a state for each sample of a batch of "
                f"fixed size. Each of the {ranks} ranks has only a part of "
                "every batch, so the states of one rank are not those of the "
                "batch. Use stateful=False (and pass states on by "
                "return_state=True and initial_state=...), or train this "
                "model in one process."
            )


def compile_without_xla(
    original: Original[T], model: Model, *args: Any, **kwargs: Any
) -> T:
    result = original(model, *args, **kwargs)
    if model.jit_compile and _is_beyond_xla(model):
        warnings.warn(
            "XLA cannot compile what several ranks exchange, nor the lookups "
            "of tfdist_ext.layers. Proceeding with `jit_compile=False`.",
            stacklevel=3,
        )
        model.jit_compile = False
    return result


def _is_beyond_xla(model: Model) -> bool:
    strategy = model.distribute_strategy
    if not hasattr(strategy, "collectives"):
        return False
    return strategy.collectives is not None or not all(
        getattr(layer, "supports_jit", True)
        for layer in keras_internals.layers_of(model)
    )


def check_consistency(model: Model, mode: Consistency) -> None:
    """Rejects what a mode of `consistency` would train wrongly.

    Args:
        model: see `check_model`.
        mode: the strategy's `consistency`, not `BSP`.

    Raises:
        ValueError: the error says what to do instead.
    """
    name = type(mode).__name__
    optimizer = getattr(model, "optimizer", None)
    legacy = ".optimizers.legacy." in type(optimizer).__module__
    scaled = not keras_internals.KERAS_3 and hasattr(
        optimizer, "inner_optimizer"
    )
    if legacy or (scaled and isinstance(mode, LocalSteps | ASP)):
        kind = "tf_keras.optimizers.legacy" if legacy else "tf_keras"
        remedy = (
            "Use the optimizer of this kind in tfdist_ext.optimizers."
            if legacy
            else "Use mixed_bfloat16, which needs no loss scale."
        )
        raise ValueError(
            f"Optimizer {type(optimizer).__name__} of {kind} sums gradients "
            f"over the ranks by itself in every step, which {name} must not "
            f"do. {remedy}"
        )
    parts = supported.parts_of(optimizer)
    for part in parts:
        _check_accumulation(part, mode)
        _check_row_clip(part, mode)
    if len(parts) > 1 and not isinstance(mode, Accumulate):
        raise ValueError(
            f"Optimizer {type(optimizer).__name__} has two optimizers, and "
            f"consistency={mode} expects one. Use BSP() or Accumulate(k), or "
            "one of tfdist_ext.optimizers for the whole model."
        )
    if is_asynchronous(mode):
        _check_for_owners(optimizer, name)
    if not isinstance(mode, Accumulate):
        return
    losses = keras_internals.compile_config(model).get("loss")
    losses = losses or getattr(model, "loss", None)
    for loss in tf.nest.flatten(losses):
        if getattr(loss, "reduction", None) == "sum":
            raise ValueError(
                f"Loss '{loss.name}' ({type(loss).__name__}) has "
                "reduction='sum', but Accumulate takes the mean of its steps "
                "by their samples, which is that of a larger batch only for a "
                "loss that is a mean. Use reduction='sum_over_batch_size', "
                "and a learning rate that is larger by the batch size."
            )


def check_first(
    original: Original[T], model: Model, *args: Any, **kwargs: Any
) -> T:
    """Checks a model that is about to be trained.

    A step of tf_keras does not say which model it is of.
    """
    extended = getattr(model.distribute_strategy, "extended", None)
    rounds = getattr(extended, "rounds", None)
    if rounds is not None:
        check_consistency(model, rounds.mode)
    return original(model, *args, **kwargs)


def _check_accumulation(optimizer: Optimizer | None, mode: Consistency) -> None:
    """Rejects Keras's accumulation of gradients."""
    steps = getattr(optimizer, "gradient_accumulation_steps", None)
    if steps:
        raise ValueError(
            f"Optimizer {type(optimizer).__name__}: argument "
            "`gradient_accumulation_steps` and the strategy's "
            f"consistency={mode} both put steps together. Leave one of them "
            f"out. Received: gradient_accumulation_steps={steps}."
        )


def _check_row_clip(optimizer: Optimizer | None, mode: Consistency) -> None:
    """Rejects clipping by the samples of a row in one step."""
    sums = isinstance(mode, Accumulate) or getattr(mode, "tables", False)
    sums = sums or is_asynchronous(mode)
    if sums and getattr(optimizer, "row_clip", None) is not None:
        raise ValueError(
            f"Optimizer {type(optimizer).__name__} has a `row_clip`, which "
            "needs the number of samples of each row in one step, and "
            f"consistency={mode} gives it those of several steps, or of one "
            "rank. Leave out `row_clip`, or use a consistency that updates "
            "rows once in every step: BSP() or LocalSteps(k)."
        )


def _check_for_owners(optimizer: Optimizer | None, mode: str) -> None:
    """Rejects what owners of variables cannot compute from their part."""
    problem = ""
    for name in ("clipnorm", "global_clipnorm", "use_ema"):
        value = getattr(optimizer, name, None)
        if value:
            problem = f"{name}={value}"
    if hasattr(optimizer, "inner_optimizer"):
        problem = type(optimizer).__name__
    if problem:
        raise ValueError(
            f"{mode} applies the gradients of each rank where the weights are, "
            f"and {problem} needs those of all ranks and weights at once. "
            f"Received: {type(optimizer).__name__} with {problem}. Leave it "
            "out (clipvalue works), or use consistency.BSP()."
        )


def check_model(model: Model) -> None:
    """Rejects an optimizer that would train a model wrongly on several ranks.

    Called in a step, because the update of variables does not show whether
    the optimizer is inside of another one, such as a loss-scale optimizer.

    Args:
        model: model whose step runs; None or another object in a step of
            the user.

    Raises:
        ValueError: the error says what to do instead.
    """
    optimizer = getattr(model, "optimizer", None)
    check_optimizer(optimizer)
    supported.check_accumulation(optimizer)
    variables = getattr(model, "trainable_variables", ())
    if optimizer and any(map(sharded_variable.is_shard, variables)):
        supported.check_supported(optimizer)


def check_in_one_process(model: Model) -> None:
    """Rejects options that are wrong under a strategy with any ranks.

    Args:
        model: see `check_model`.

    Raises:
        ValueError: the error says what to do instead.
    """
    supported.check_accumulation(getattr(model, "optimizer", None))


def check_gradients(
    gradient_dtype: str, error_feedback: bool, where: str
) -> None:
    """Rejects bad arguments of the same names of the strategy."""
    dtypes = checks.GRADIENT_DTYPES
    checks.one_of("gradient_dtype", gradient_dtype, dtypes, where)
    if error_feedback and gradient_dtype == "float32":
        raise ValueError(
            "Argument `error_feedback` is for gradients that are rounded."
            " Received: error_feedback=True with gradient_dtype="
            "'float32'. Set gradient_dtype='bfloat16', or leave it out."
        )


def check_alone(mode: Consistency, gradient_dtype: str, where: str) -> None:
    """Rejects what needs all ranks where they step alone."""
    if gradient_dtype != "float32":
        raise ValueError(
            "Argument `gradient_dtype` is for gradients that all ranks sum in "
            f"one exchange. Received: gradient_dtype={gradient_dtype!r} with "
            f"consistency={mode} ({where}). Leave one of them out."
        )
