# SPDX-License-Identifier: Apache-2.0
"""The first step of a `fit` is checked before it is trained."""

from __future__ import annotations

import warnings
from typing import Any

import tensorflow as tf

from tfdist_ext import keras_internals
from tfdist_ext.checking import check
from tfdist_ext.checking import choosing

keras = tf.keras
Nest = Any


def check_first_step(
    original: Any, model: Any, *args: Any, **kwargs: Any
) -> Any:
    before = model.train_function
    result = original(model, *args, **kwargs)
    function = model.train_function
    strategy = model.distribute_strategy
    several = getattr(strategy, "collectives", None) is not None
    if not several or function is before or strategy.collectives.check == "off":
        return result
    if strategy.collectives.group.rank == 0:
        _warn_of_normalization(model)
    first = _First(model, function)
    model.train_function = first
    return first if result is function else result


def _warn_of_normalization(model: Any) -> None:
    """Names layers that do not train what they train in one process."""
    names = choosing.unsynchronized(model)
    if names:
        warnings.warn(
            f"BatchNormalization of {', '.join(names[:3])}"
            f"{' and others' if len(names) > 3 else ''} normalizes by the "
            "samples of each rank, which is not what one process trains. Pass "
            "synchronized=True to normalize by the whole batch.",
            stacklevel=2,
        )


class _First:
    """Keras's train function, whose first batch is checked before.

    Args:
        model: of Keras.
        function: takes an iterator.
    """

    def __init__(self, model: Any, function: Any) -> None:
        self._trained = model
        self._function = function
        self._is_first = True

    def __call__(self, iterator: Any) -> Any:
        if self._trained.train_function is self:
            self._trained.train_function = self._function
        if self._is_first:
            self._is_first = False
            iterator = _checked(self._trained, iterator)
        return self._function(iterator)


def _checked(model: Any, iterator: Any) -> Any:
    """An iterator of what the first call of a train function trains."""
    strategy = model.distribute_strategy
    mode = strategy.collectives.check
    wanted = mode in ("always", "error")
    if not isinstance(iterator, tf.data.Iterator) or not (
        wanted or choosing.needs_check(model)
    ):
        return iterator
    batches = []
    for _ in range(keras_internals.steps_of_call(model)):
        try:
            batches.append(next(iterator))
        except (StopIteration, tf.errors.OutOfRangeError):
            break
    if not batches:
        return iterator
    subject = check.Subject(
        f"step 1 of `{type(model).__name__}`",
        model.train_step,
        (model,),
        eager=model.run_eagerly,
        limits_memory=not wanted,
    )
    spec = iterator.element_spec
    required = mode == "error"
    found = check.attempt(strategy, subject, batches[0], spec, required)
    if found is not None and not found.ok and required:
        raise ValueError(str(found))
    return _again(batches, spec)


def _again(batches: list[Nest], element_spec: Nest) -> tf.data.Iterator:
    """An iterator of batches that were read, of the type of the first one."""
    dataset = _single(batches[0], element_spec)
    for batch in batches[1:]:
        dataset = dataset.concatenate(_single(batch, element_spec))
    return iter(dataset)


def _single(batch: Nest, element_spec: Nest) -> tf.data.Dataset:
    values = tf.nest.flatten(batch, expand_composites=True)
    # Weights that are missing have a spec without components.
    values = [value for value in values if value is not None]
    specs = tf.nest.flatten(element_spec, expand_composites=True)

    def read(_: tf.Tensor) -> Nest:
        # Of the shapes of the dataset, which may be open.
        opened = [
            tf.compat.v1.placeholder_with_default(value, spec.shape)
            for value, spec in zip(values, specs, strict=True)
        ]
        return tf.nest.pack_sequence_as(
            element_spec, opened, expand_composites=True
        )

    return tf.data.Dataset.from_tensors(0).map(read)
