# SPDX-License-Identifier: Apache-2.0
"""Convolutions and poolings on ranks without samples.

A rank has no samples where a batch has fewer than there are ranks. With oneDNN
the gradients of TensorFlow's convolutions fail there, and those of its poolings
abort the process. These layers get one row of zeros, whose result is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import tensorflow as tf

keras = tf.keras
_NAMES = re.compile(
    r"(Depthwise|Separable)?Conv\dD(Transpose)?|(Max|Average)Pooling\dD"
)
_LAYERS = tuple(
    getattr(keras.layers, name)
    for name in dir(keras.layers)
    if _NAMES.fullmatch(name)
)


def call(
    layer: Any,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Calls a layer so that it may get no samples.

    Args:
        layer: of Keras.
        original: its `__call__`, bound.
        args: of the call.
        kwargs: of the call.

    Returns:
        What the layer returns.
    """
    inputs = args[0] if args else None
    if not isinstance(layer, _LAYERS) or not isinstance(inputs, tf.Tensor):
        return original(*args, **kwargs)
    if inputs.shape.rank is None or inputs.shape[0]:
        return original(*args, **kwargs)
    shape = tf.shape(inputs)
    missing = tf.cast(shape[:1] == 0, shape.dtype)
    zeros = tf.zeros(tf.concat([missing, shape[1:]], 0), inputs.dtype)
    padded = tf.concat([inputs, zeros], 0)
    return original(padded, *args[1:], **kwargs)[: shape[0]]
