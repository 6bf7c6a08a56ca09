# SPDX-License-Identifier: Apache-2.0
"""A step of Keras 3's `predict` is traced once, for batches of any size.

Keras gives it tensors, not an iterator as in `fit`. So TensorFlow traces it
for the size of the first batch, and once more for any size when another one
comes, which mostly is the last.
"""

from __future__ import annotations

import threading
from typing import Any

import tensorflow as tf

from tfdist_ext.keras_training import predictions

keras = tf.keras


class _Now(threading.local):
    model: Any = None  # which predicts


_now = _Now()


def trace_for(model: Any, spec: Any) -> None:
    """Makes a model's function of `predict`, for batches of any size.

    Args:
        model: of Keras 3.
        spec: of the batches.
    """
    outer, _now.model = _now.model, model
    model.distribute_strategy.distributed_spec = spec
    try:
        model.make_predict_function()
    finally:
        _now.model = outer


def predict(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    strategy = model.distribute_strategy
    if getattr(strategy, "collectives", None) is None:
        return original(model, *args, **kwargs)
    outer, _now.model = _now.model, model
    strategy.distributed_spec = None
    try:
        return original(model, *args, **kwargs)
    finally:
        _now.model = outer


def make_predict_function(
    original: Any, model: Any, *args: Any, **kwargs: Any
) -> Any:
    before = model.predict_function
    made = original(model, *args, **kwargs)
    function = model.predict_function
    if (
        _now.model is model
        and function is not before
        and isinstance(function, tf.types.experimental.PolymorphicFunction)
        and model.steps_per_execution == 1
    ):
        _trace(function, model.distribute_strategy)
    return made


def _trace(function: Any, strategy: Any) -> None:
    """Traces a step for what the dataset of the loop gives.

    Args:
        function: that Keras calls with a list of one batch.
        strategy: which has distributed the dataset.
    """
    spec, collectives = strategy.distributed_spec, strategy.collectives
    if spec is None or not any(map(_varies, tf.nest.flatten(spec))):
        return
    try:
        function.get_concrete_function([spec])
        collectives.barrier("step of predict traced")
    except predictions.NoRowsError:
        raise
    except Exception as error:
        # A model that needs to know the size, or an error of the model's own,
        # which the first batch meets again. All ranks do the same.
        collectives.give_up("tracing a step of predict", error)


def _varies(spec: Any) -> bool:
    """Whether batches differ in size; not of Keras's None."""
    if isinstance(spec, tf.OptionalSpec):
        return False
    shape = tf.TensorShape(spec.shape)
    return shape.rank is not None and shape.rank > 0 and shape[0] is None
