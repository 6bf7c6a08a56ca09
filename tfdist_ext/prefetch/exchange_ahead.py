# SPDX-License-Identifier: Apache-2.0
"""Keeps the exchanged ids of the next batch until its step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from typing import TypeVar

import tensorflow as tf

T = TypeVar("T")


def exchange_ahead(
    ask_now: Callable[[], T],
    ask_next: Callable[[], T],
    position: tf.Tensor,
    name: str,
) -> tuple[T, T]:
    """What the step before has exchanged for this one; exchanges the next.

    Whatever iterators a program interleaves, a batch is never answered with
    the ids of another: what was kept tells which batch it is of. All ranks
    run the same steps, so they find the same.

    Args:
        ask_now: exchanges the ids of this batch; used where an iterator
            starts, or goes on after another.
        ask_next: exchanges those of the next batch. Both return dataclasses
            of tensors.
        position: int64 `[2]`, which batch this one is of which iterator.
        name: of the place where they are kept: one for each layer, and for
            each of several inputs of a batch that it is called with.

    Returns:
        Those of this batch, and those of the next.
    """
    following = ask_next()
    kept = _tensors(following)
    dtypes = [tensor.dtype for tensor in kept]
    place: dict[str, Any] = {
        "dtypes": [tf.int64, *dtypes],
        "shared_name": name,
    }

    def take() -> list[tf.Tensor]:
        return list(tf.raw_ops.Unstage(**place))

    def nothing() -> list[tf.Tensor]:
        return [tf.constant([0, -1], tf.int64)] + [
            tf.zeros([0] * (tensor.shape.rank or 0), tensor.dtype)
            for tensor in kept
        ]

    found, *taken = tf.cond(tf.raw_ops.StageSize(**place) > 0, take, nothing)
    current = tf.cond(
        tf.reduce_all(found == position),
        lambda: taken,
        lambda: _tensors(ask_now()),
    )
    # Not before both exchanges have ended well, as they do on all ranks or on
    # none: after a bad id all must find the same.
    with tf.control_dependencies(current):
        following_position = position + tf.constant([0, 1], tf.int64)
        # Stateful: it runs though nothing asks for its result.
        tf.raw_ops.Stage(values=[following_position, *kept], shared_name=name)
    for tensor, other in zip(current, kept, strict=True):
        tensor.set_shape(tensor.shape.merge_with([None] * other.shape.rank))
    return _rebuilt(following, iter(current)), following


def _tensors(value: Any) -> list[tf.Tensor]:
    """The tensors of dataclasses and lists of them, in order."""
    if tf.is_tensor(value):
        return [value]
    parts = value if isinstance(value, list) else _fields(value)
    return [tensor for part in parts for tensor in _tensors(part)]


def _rebuilt(like: Any, tensors: Any) -> Any:
    if tf.is_tensor(like):
        return next(tensors)
    if isinstance(like, list):
        return [_rebuilt(part, tensors) for part in like]
    return type(like)(*[_rebuilt(part, tensors) for part in _fields(like)])


def _fields(value: Any) -> list[Any]:
    return [getattr(value, f.name) for f in dataclasses.fields(value)]
