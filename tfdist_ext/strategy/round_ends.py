# SPDX-License-Identifier: Apache-2.0
"""Where rounds end early: after epochs, before evaluation and before files."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext.keras_internals import value_of
from tfdist_ext.strategy.rounds import Rounds
from tfdist_ext.strategy.rounds import all_rounds
from tfdist_ext.type_names import Logs
from tfdist_ext.type_names import Model
from tfdist_ext.type_names import Original

keras = tf.keras


class _EndRound(keras.callbacks.Callback):  # type: ignore[name-defined]
    """Ends the round of a model before other callbacks see the epoch's end."""

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        _end_of(self.model)


def after_epochs(
    original: Original, model: Model, *args: Any, **kwargs: Any
) -> Any:
    rounds = _rounds_of(model)
    if rounds is None:
        return original(model, *args, **kwargs)
    bound = inspect.signature(original).bind(model, *args, **kwargs)
    given: Any = bound.arguments.get("callbacks")
    own = _EndRound()
    of_caller = isinstance(given, keras.callbacks.CallbackList)
    if of_caller:  # Keras trains with it unchanged.
        own.set_model(model)
        given.callbacks.insert(0, own)
    else:
        callbacks = [own, *tf.nest.flatten(given or [])]
        bound.arguments["callbacks"] = callbacks
    _end_of(model)
    try:
        return original(*bound.args, **bound.kwargs)
    except BaseException:
        rounds.drop()  # The next step starts a round.
        raise
    finally:
        if of_caller:
            given.callbacks.remove(own)


def before(original: Original, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Ends the rounds of a model before it is evaluated or written."""
    _end_of(model)
    return original(model, *args, **kwargs)


def before_checkpoint(
    objects_of: Callable[[Any], Sequence[Any]],
) -> Callable[..., Any]:
    """Creates a stage that ends the rounds of what a checkpoint has.

    Args:
        objects_of: returns the objects of a checkpoint.
    """

    def stage(
        original: Original, checkpoint: Any, *args: Any, **kwargs: Any
    ) -> Any:
        every = all_rounds()
        if every and tf.executing_eagerly():
            found = {id(each) for each in objects_of(checkpoint)}
            for rounds in every:
                rounds.end(_in(found, rounds))
        return original(checkpoint, *args, **kwargs)

    return stage


def _in(objects: set[int], rounds: Rounds) -> Sequence[Any]:
    """Optimizers of which a checkpoint has the variables."""
    return [
        optimizer
        for optimizer, variables in rounds.trained()
        if id(optimizer) in objects
        or any(id(value_of(each)) in objects for each in variables)
    ]


def _rounds_of(model: Any) -> Rounds | None:
    strategy = getattr(model, "distribute_strategy", None)
    return getattr(getattr(strategy, "extended", None), "rounds", None)


def _end_of(model: Any) -> None:
    rounds = _rounds_of(model)
    if rounds is not None and tf.executing_eagerly():
        rounds.end()
