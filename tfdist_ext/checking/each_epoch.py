# SPDX-License-Identifier: Apache-2.0
"""Ranks compare their replicas at the end of every epoch."""

from __future__ import annotations

import inspect
from typing import Any

import tensorflow as tf

from tfdist_ext.checking import drift

keras = tf.keras


class _Compare(keras.callbacks.Callback):  # type: ignore[name-defined]
    """Compares before other callbacks save what the ranks have."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Says what differs."""
        drift.compare_replicas(
            drift.variables_of(self.model),
            self.model.distribute_strategy.collectives,
            f"after epoch {epoch + 1}",
            epoch,
        )


def compare_after_epochs(
    original: Any, model: Any, *args: Any, **kwargs: Any
) -> Any:
    strategy = model.distribute_strategy
    collectives = getattr(strategy, "collectives", None)
    if collectives is None or collectives.check == "off":
        return original(model, *args, **kwargs)
    bound = inspect.signature(original).bind(model, *args, **kwargs)
    callbacks = bound.arguments.get("callbacks")
    if isinstance(callbacks, keras.callbacks.CallbackList):
        # The caller's own, which Keras asks to train with as it is.
        return original(model, *args, **kwargs)
    bound.arguments["callbacks"] = [
        _Compare(),
        *tf.nest.flatten(callbacks or []),
    ]
    return original(*bound.args, **bound.kwargs)
