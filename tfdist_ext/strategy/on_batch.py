# SPDX-License-Identifier: Apache-2.0
"""Global batches for `train_on_batch` and similar methods of Keras 3.

Keras 3 gives every rank the entire batch. These functions take the rank's
samples of it, as tf_keras does, so that the batch is a global one as in `fit`.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext import batches
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.strategy import loops
from tfdist_ext.strategy import predictions
from tfdist_ext.strategy import refused
from tfdist_ext.type_names import Model
from tfdist_ext.type_names import Nest
from tfdist_ext.type_names import Original
from tfdist_ext.type_names import Strategy
from tfdist_ext.type_names import T
from tfdist_ext.type_names import TensorLike

keras = tf.keras
_FUNCTIONS = {"train_on_batch": "train", "test_on_batch": "test"}


def step_on_batch(
    original: Original[T], model: Model, *args: Any, **kwargs: Any
) -> T:
    collectives = _collectives_of(model)
    if collectives is None:
        return original(model, *args, **kwargs)
    refused.check_recurrent(model, collectives.group.world_size)
    name = original.__name__
    kind = _FUNCTIONS[name]
    getattr(model, f"make_{kind}_function")()
    attribute = f"{kind}_function"
    function = getattr(model, attribute)
    setattr(
        model,
        attribute,
        functools.partial(
            _run_on_slice, function, model.distribute_strategy, name
        ),
    )
    try:
        return original(model, *args, **kwargs)
    finally:
        setattr(model, attribute, function)


def _run_on_slice(
    function: Callable[[Iterator[tuple[TensorLike, ...]]], T],
    strategy: Strategy,
    name: str,
    iterator: Iterator[tuple[TensorLike, ...]],
) -> T:
    """Runs Keras's function of a loop on this rank's samples of a batch."""
    part = _slice(next(iter(iterator)), strategy, name)
    return function(iter(_dataset_of(part)))


def predict_on_batch(
    original: Original[T], model: Model, x: Nest, *args: Any, **kwargs: Any
) -> T:
    collectives = _collectives_of(model)
    if collectives is None:
        return original(model, x, *args, **kwargs)
    refused.check_recurrent(model, collectives.group.world_size)
    (part,) = _slice((x,), model.distribute_strategy, original.__name__)
    spec = tf.nest.map_structure(_spec_of, (part,))
    predictions.trace_for(model, spec)
    return original(model, part, *args, **kwargs)


def _collectives_of(model: Model) -> Collectives | None:
    return getattr(model.distribute_strategy, "collectives", None)


def _slice(
    batch: tuple[TensorLike, ...], strategy: Strategy, name: str
) -> Nest:
    """This rank's samples of a batch that all ranks have.

    Raises:
        ValueError: the batches of the ranks differ, or values of a batch have
            different numbers of samples.
    """
    values = tf.nest.map_structure(_as_tensor, _with_arrays(batch))
    names = batches.names_of(values)
    flat = tf.nest.flatten(values)
    described = {
        key: _describe(value)
        for key, value in zip(names, flat, strict=True)
        if value is not None
    }
    collectives, balance = strategy.collectives, strategy.extended.balance
    settings = {"method": name, "balance": balance.describe(), **described}
    loops.compare_texts(collectives, settings)
    batches.check_lengths(values, f"The batch of `{name}`")
    present = [value for value in flat if value is not None]
    with tf.device("CPU:0"):
        cut = iter(balance.part_of(present, collectives))
    parts = [None if value is None else next(cut) for value in flat]
    return tf.nest.pack_sequence_as(values, parts)


def _with_arrays(batch: tuple[TensorLike, ...]) -> tuple[TensorLike, ...]:
    """The batch, with lists of Python numbers converted to arrays."""
    return type(batch)(
        np.asarray(part)
        if isinstance(part, list) and loops.is_numbers(part)
        else part
        for part in batch
    )


def _as_tensor(value: TensorLike) -> TensorLike:
    composite = isinstance(value, tf.__internal__.CompositeTensor)
    return value if value is None or composite else tf.convert_to_tensor(value)


def _describe(value: TensorLike) -> str:
    parts = tf.nest.flatten(value, expand_composites=True)
    shape = getattr(value, "shape", None)
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        array = part.numpy()
        known = array.tolist() if array.dtype == object else None
        digest.update(
            array.tobytes() if known is None else repr(known).encode()
        )
    return f"{value.dtype.name}{shape} #{digest.hexdigest()}"


def _spec_of(value: TensorLike) -> tf.TypeSpec:
    """Spec of a value with any batch size; None for None."""
    if value is None:
        return None
    spec = tf.type_spec_from_value(value)
    if isinstance(spec, tf.TensorSpec) and spec.shape.rank:
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)
    return spec


def _dataset_of(batch: Nest) -> tf.data.Dataset:
    """A dataset of one batch, with unknown batch size in its specs.

    All ranks then trace a step once for batches of all sizes.
    """
    dataset = tf.data.Dataset.from_tensors(batch)
    values = [v for v in tf.nest.flatten(batch) if v is not None]
    if not all(isinstance(value, tf.Tensor) for value in values):
        return dataset
    specs = tf.nest.map_structure(
        lambda spec, value: _spec_of(value) or spec, dataset.element_spec, batch
    )
    with tf.device("CPU:0"):
        variant = tf.raw_ops.TensorDataset(
            components=values,
            output_shapes=[_spec_of(value).shape for value in values],
        )
    return tf.data.experimental.from_variant(variant, specs)
