# SPDX-License-Identifier: Apache-2.0
"""What a loss divides by that is no number of samples: sums of masks, weights.

A mean of what a mask leaves is a sum over the batch by another. Ranks whose
masks leave different numbers do not get its value by averaging theirs.
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf

# Ops that pass a number on.
_SAME = {"Cast", "Identity", "Reshape", "Squeeze", "StopGradient"}


@dataclasses.dataclass(frozen=True)
class Divisor:
    """A divisor made of a sum over the samples.

    Attributes:
        part: the sum, scalar, over this rank's samples.
        least: what the divisor is at least.
        more: what is added to the sum.
    """

    part: tf.Tensor
    least: tf.Tensor | None = None
    more: tf.Tensor | None = None

    def of(self, part: tf.Tensor) -> tf.Tensor:
        """The divisor, were the sum another."""
        if self.more is not None:
            return part + self.more
        return part if self.least is None else tf.maximum(part, self.least)


def divisor_of(value: tf.Tensor) -> Divisor | None:
    """The scalar that something is divided by; None if it only counts sizes.

    Args:
        value: a sum; or one with a constant added, or at least a constant.
    """
    value = _passed_on(value)
    least = more = None
    if value.op.type in ("Maximum", "Add", "AddV2"):
        first, second = value.op.inputs
        if tf.get_static_value(first) is not None:
            first, second = second, first
        if tf.get_static_value(second) is None:
            return None
        if value.op.type == "Maximum":
            least = second
        else:
            more = second
        value = _passed_on(first)
    if value.shape.rank != 0 or _counts_sizes(value):
        return None
    return Divisor(value, least, more)


def _passed_on(value: tf.Tensor) -> tf.Tensor:
    while value.op.type in _SAME:
        value = value.op.inputs[0]
    return value


def _counts_sizes(value: tf.Tensor) -> bool:
    """Whether a number follows from shapes alone."""
    found, pending = set(), [value.op]
    while pending:
        op = pending.pop()
        if op.name in found or op.type in ("Shape", "Size", "Const"):
            continue
        if not op.inputs:
            return False
        found.add(op.name)
        pending += [each.op for each in op.inputs]
    return True
