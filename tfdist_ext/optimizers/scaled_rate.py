# SPDX-License-Identifier: Apache-2.0
"""The learning rate of a batch that is not the one it was found with."""

from __future__ import annotations

import math
import numbers
from typing import Any

import tensorflow as tf

keras = tf.keras

_RULES = {"linear": lambda ratio: ratio, "sqrt": math.sqrt}


def scaled_rate(
    base: float,
    reference_batch: int,
    batch: int,
    rule: str = "linear",
    warmup_steps: int = 0,
) -> Any:
    """Learning rate for a global batch, from that of another one.

    More ranks with as many samples each make a larger global batch, and fewer
    steps of an epoch. "linear" suits SGD, "sqrt" Adagrad and Adam, which
    divide by the root of summed squares.

    >>> scaled_rate(0.1, reference_batch=1024, batch=8192)
    0.8
    >>> scaled_rate(0.1, reference_batch=1024, batch=4096, rule="sqrt")
    0.2

    Args:
        base: rate that trains well with `reference_batch`.
        reference_batch: samples of a step with which it does.
        batch: samples of a step of all ranks together.
        rule: "linear" multiplies by `batch / reference_batch`, "sqrt" by its
            square root.
        warmup_steps: steps in which the rate goes from `base` to its value,
            in even parts.

    Returns:
        A float; with `warmup_steps` a Keras `LearningRateSchedule`, which
        gives float32 scalars.

    Raises:
        ValueError: for an unknown rule, and numbers that are not positive.
    """
    for name, value in (
        ("base", base),
        ("reference_batch", reference_batch),
        ("batch", batch),
    ):
        _check(name, value, value > 0 if _is_number(value) else False)
    whole = isinstance(warmup_steps, numbers.Integral)
    if not whole or warmup_steps < 0:
        raise ValueError(
            "Argument `warmup_steps` must be a whole number of at least 0. "
            f"Received: warmup_steps={warmup_steps!r}."
        )
    if rule not in _RULES:
        raise ValueError(
            f"Argument `rule` must be one of {tuple(_RULES)}. Received: "
            f"rule={rule!r}."
        )
    rate = base * _RULES[rule](batch / reference_batch)
    return WarmUp(base, rate, warmup_steps) if warmup_steps else rate


_Schedule: Any = keras.optimizers.schedules.LearningRateSchedule


@keras.utils.register_keras_serializable(package="tfdist_ext")
class WarmUp(_Schedule):
    """Goes from one rate to another, then stays there.

    Args:
        first: rate of step 0.
        last: rate from step `steps` on.
        steps: in which it changes, in even parts.
    """

    def __init__(self, first: float, last: float, steps: int) -> None:
        super().__init__()
        self.first, self.last, self.steps = first, last, steps

    def __call__(self, step: Any) -> tf.Tensor:
        done = tf.cast(step, tf.float32) / float(self.steps)
        return self.first + (self.last - self.first) * tf.minimum(done, 1.0)

    def get_config(self) -> dict[str, Any]:
        """Arguments to make the schedule again."""
        return {"first": self.first, "last": self.last, "steps": self.steps}


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _check(name: str, value: Any, positive: bool) -> None:
    if not positive or not math.isfinite(value):
        raise ValueError(
            f"Argument `{name}` must be a positive number. Received: "
            f"{name}={value!r}."
        )
