# SPDX-License-Identifier: Apache-2.0
"""Keras 3 builds a model before training without reading its data.

Under a strategy Keras opens the data to look at a batch, builds the model for
its shapes, and opens the data again to train. What a Python generator has
given by then is lost: with its prefetching, up to all but two batches.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist_ext import keras_internals

keras = tf.keras
Nest = Any


def build(
    original: Any, model: Any, iterator: Any = None, data_batch: Any = None
) -> None:
    strategy = model.distribute_strategy
    if not hasattr(strategy, "collectives"):
        return original(model, iterator=iterator, data_batch=data_batch)
    unbuilt = not _has_built_optimizer(model)
    try:
        if iterator is None:
            return original(model, data_batch=data_batch)
        return _build_unread(original, model, iterator)
    except Exception as error:
        half_built = unbuilt and _has_built_optimizer(model)
        if half_built or not _is_built_for_own_steps(model):
            raise
        if strategy.collectives is not None:
            strategy.collectives.give_up("building the model", error)
    # Without a strategy Keras does not call a model before its own step does,
    # which may call something else.
    with strategy.scope():
        if model.optimizer is not None and not _has_built_optimizer(model):
            model.optimizer.build(model.trainable_variables)
    return None


def _is_built_for_own_steps(model: Any) -> bool:
    """Whether a model with steps of its own has all of its variables."""
    kind = type(model)
    own = (
        kind.train_step is not keras.Model.train_step
        or kind.test_step is not keras.Model.test_step
    )
    layers = keras_internals.layers_of(model)
    return own and all(each.built for each in layers if each is not model)


def _build_unread(original: Any, model: Any, iterator: Any) -> None:
    shapes = _shapes_of(iterator)
    if shapes is None:
        return original(model, iterator=iterator)
    collectives = model.distribute_strategy.collectives
    unbuilt = not _has_built_optimizer(model)
    built = _built_layers(model)
    try:
        original(model, data_batch=shapes)
        if collectives is not None:
            collectives.barrier("model built")
        return None
    except Exception as error:
        if _built_layers(model) > built:
            # In a tf.function a table is not there when it is made there, but
            # is when that is traced again.
            return _build_unread(original, model, iterator)
        no_other_way = keras_internals.first_batches(iterator) is not None
        # Its build has failed half-way, and is not begun a second time.
        no_other_way |= unbuilt and _has_built_optimizer(model)
        if no_other_way:
            raise
        # All ranks read, or none: reading is an exchange.
        if collectives is not None:
            collectives.give_up("building the model", error)
    # Of a dataset the batch size is not known, which code for eager execution
    # may need. A second reading tells, or fails likewise.
    return original(model, iterator=iterator)


def _has_built_optimizer(model: Any) -> bool:
    return bool(getattr(getattr(model, "optimizer", None), "built", False))


def _built_layers(model: Any) -> int:
    return sum(layer.built for layer in keras_internals.layers_of(model))


def _shapes_of(iterator: Any) -> Nest | None:
    """A batch of `tf.TensorSpec`, or None if only the data can tell.

    Args:
        iterator: Keras's `TFEpochIterator`.
    """
    element = keras_internals.dataset_of(iterator).element_spec
    flat = [_dense(spec) for spec in tf.nest.flatten(element)]
    first = keras_internals.first_batches(iterator)
    if first:
        values = [v for v in keras.tree.flatten(first[0]) if v is not None]
        known = iter(values)
        flat = [
            spec and tf.TensorSpec(next(known).shape, spec.dtype)
            for spec in flat
        ]
    elif not all(spec is None or _is_known(spec.shape) for spec in flat):
        return None
    return tf.nest.pack_sequence_as(element, flat)


def _dense(spec: Any) -> tf.TensorSpec | None:
    """Shape and dtype of a value of any kind; None for Keras's None."""
    if isinstance(spec, tf.OptionalSpec):
        return None
    return tf.TensorSpec(spec.shape, spec.dtype)


def _is_known(shape: tf.TensorShape) -> bool:
    return shape.rank is not None and None not in shape.as_list()[1:]
