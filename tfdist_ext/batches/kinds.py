# SPDX-License-Identifier: Apache-2.0
"""What a tensor of a step is to the samples of its batch."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Protocol

import numpy as np
import tensorflow as tf

from tfdist_ext import tensorflow_internals as internals

SAME = "same"  # one process's value, equal on all ranks
ROWS = "rows"  # has a batch axis; each row follows from its own sample
COUNT = "count"  # a number proportional to this rank's samples
LINEAR = "linear"  # a linear combination of sums and means over samples
COUPLED = "coupled"  # any other function of sums and means over samples
SHARD = "shard"  # follows from this rank's shard of a table's gradient
SIZES = "sizes"  # a shape, or a part of one
NUMBERS = "numbers"  # the numbers of this rank's rows, or one-hot rows of them
STATE = "state"  # read from a variable of which every rank has its own
STATIC = "static"  # a size that is a constant, as the graph fixes the batch
UNKNOWN = "unknown"
MEAN, SUM = "mean", "sum"  # parts of LINEAR; SAME is the third


@dataclasses.dataclass(frozen=True)
class Kind:
    """How a tensor depends on the batch.

    Attributes:
        name: one of the constants above.
        axis: the batch axis of ROWS, and of COUPLED if it has one.
        parts: of LINEAR, what is combined: SAME, MEAN, SUM.
        reduction: how values of the ranks become that of the whole batch, for
            a COUPLED that reduces the batch axis: "sum", "mean" or an op type.
        cause: of UNKNOWN, the first op whose rule is not known.
        at_least: of COUNT, whether it is 1 where there are no samples.
    """

    name: str
    axis: int | None = None
    parts: frozenset[str] = frozenset()
    reduction: str = ""
    cause: tf.Operation | None = None
    at_least: bool = False

    @property
    def over_ranks(self) -> str:
        """How the ranks' values become one, "" if not by one reduction."""
        if self.name == COUNT:
            return "" if self.at_least else SUM
        if self.name == LINEAR and SUM not in self.parts:
            return MEAN
        if self.name == LINEAR:
            return SUM if self.parts == {SUM} else ""
        return self.reduction


SAME_KIND = Kind(SAME)
COUNT_KIND = Kind(COUNT)
STATE_KIND = Kind(STATE)
STATIC_KIND = Kind(STATIC)
MEAN_KIND = Kind(LINEAR, parts=frozenset([MEAN]))
SUM_KIND = Kind(LINEAR, parts=frozenset([SUM]))
COUPLED_KIND = Kind(COUPLED)


class Sizes(Protocol):
    """What the rules of ops ask the analysis of a graph."""

    @property
    def samples(self) -> int | None: ...

    def of(self, value: tf.Tensor) -> Kind: ...

    def sizes(self, vector: tf.Tensor) -> list[Kind] | None: ...

    def slice_of_sizes(self, op: tf.Operation) -> list[Kind] | None: ...


def constant_of(value: tf.Tensor) -> np.ndarray | None:
    """The value of a tensor that is known when it is traced."""
    found = tf.get_static_value(value)
    return None if found is None else np.asarray(found)


_OF_NUMBERS: dict[str, Callable[..., float]] = {
    "AddV2": operator.add,
    "Maximum": max,
    "Pack": lambda number: number,
    "Sub": operator.sub,
}


def number_of(value: tf.Tensor) -> float | None:
    """The number that a scalar, or a sum of a constant's elements, is.

    TensorFlow does not compute `reduce_sum(ones_like(x))` or `tf.rank(x) - 1`
    when it traces.
    """
    if value.shape.num_elements() != 1:
        return None
    while value.op.type in ("Cast", "Identity", "Reshape", "StopGradient"):
        value = value.op.inputs[0]
    op = value.op
    if op.type in _OF_NUMBERS:
        numbers = [number_of(each) for each in op.inputs]
        known = [each for each in numbers if each is not None]
        if len(known) < len(numbers):
            return None
        return float(_OF_NUMBERS[op.type](*known))
    constant = constant_of(op.inputs[0] if op.type == "Sum" else value)
    if constant is None or constant.dtype.kind not in "fiub":
        return None
    return float(constant.sum())


def follows_from_constants(value: tf.Tensor) -> bool:
    """Whether a symbolic tensor is computed of constants alone."""
    seen: set[tuple[int, str]] = set()
    pending = [value]
    while pending:
        tensor = internals.captured(pending.pop())
        if not tf.is_symbolic_tensor(tensor):  # captured from outside
            if tensor.dtype in (tf.resource, tf.variant):
                return False
            continue
        op = tensor.op
        if not op.inputs and op.type != "Const":
            return False
        if (id(op.graph), op.name) not in seen:
            seen.add((id(op.graph), op.name))
            pending += op.inputs
    return True


def parts_of(kind: Kind) -> frozenset[str]:
    """What a kind adds to a linear combination; nothing if it is none."""
    if kind.name == LINEAR:
        return kind.parts
    return {COUNT: SUM_KIND.parts, SAME: frozenset([SAME])}.get(
        kind.name, frozenset()
    )


def axes_of(value: tf.Tensor, axes: tf.Tensor) -> list[int] | None:
    """Axes of a value, counted from the first; None if they are not known."""
    constant = constant_of(axes)
    if constant is None or value.shape.rank is None:
        return None
    return [int(axis) % max(1, value.shape.rank) for axis in constant.flat]


def like(kind: Kind, axis: int | None) -> Kind:
    """A kind with its batch axis elsewhere."""
    return dataclasses.replace(kind, axis=axis, reduction="")
