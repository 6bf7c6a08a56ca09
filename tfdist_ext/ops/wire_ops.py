# SPDX-License-Identifier: Apache-2.0
"""Numbers on their way between ranks: 16 bits instead of 32.

`tests/reference/wire.py` has the same functions made of stock TensorFlow ops.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist_ext.ops.library import library
from tfdist_ext.tables import checks
from tfdist_ext.tables import choices
from tfdist_ext.tables.choices import Rounding


def to_wire(
    x: tf.Tensor,
    dtype: tf.DType,
    *,
    rounding: Rounding = "nearest",
    seed: tf.Tensor | int = 0,
) -> tf.Tensor:
    """Rounds numbers to the dtype that travels.

    Args:
        x: float32, any shape.
        dtype: tf.float32 (nothing happens), tf.bfloat16 or tf.float16.
        rounding: "nearest" is tf.cast. "stochastic" takes one of the two
            neighbours in `dtype` so that the mean is x: errors of many small
            gradients cancel instead of adding up.
        seed: int64 scalar; with an element's index it determines the random
            choice. Unused with "nearest".

    Returns:
        `dtype`, shape of x. NaN stays NaN; infinity, and what is beyond the
        largest number of `dtype`, becomes infinity. The gradient is the
        upstream gradient as float32.

    Raises:
        ValueError: another rounding.
    """
    if not _is_stochastic(rounding, dtype):
        return tf.cast(x, dtype)
    return library().tfdist_round_to_wire(x, tf.cast(seed, tf.int64), T=dtype)


@tf.RegisterGradient("Tfdist>RoundToWire")
def _round_to_wire_gradient(_: Any, grad: tf.Tensor) -> list[Any]:
    return [tf.cast(grad, tf.float32), None]


def from_wire(
    x: tf.Tensor,
    *,
    rounding: Rounding = "nearest",
    seed: tf.Tensor | int = 0,
) -> tf.Tensor:
    """The numbers that have arrived, as float32.

    Args:
        x: float32, bfloat16 or float16, any shape.
        rounding: of the gradient, on its way back: see `to_wire`.
        seed: of that rounding.

    Returns:
        float32, shape of x. The gradient is the upstream gradient rounded to
        the dtype of x.

    Raises:
        ValueError: another rounding.
    """
    x = tf.convert_to_tensor(x)
    if not _is_stochastic(rounding, x.dtype):
        return tf.cast(x, tf.float32)
    return _widen(x, tf.cast(seed, tf.int64))


@tf.custom_gradient
def _widen(x: tf.Tensor, seed: tf.Tensor) -> Any:
    def grad(upstream: tf.Tensor) -> tuple[tf.Tensor, None]:
        rounded = to_wire(upstream, x.dtype, rounding="stochastic", seed=seed)
        return rounded, None

    return tf.cast(x, tf.float32), grad


def _is_stochastic(rounding: str, dtype: tf.DType) -> bool:
    checks.one_of("rounding", rounding, choices.ROUNDINGS, "numbers on a wire")
    return rounding == "stochastic" and dtype != tf.float32
