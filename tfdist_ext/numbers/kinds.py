# SPDX-License-Identifier: Apache-2.0
"""Dependence of a step's tensors on the samples of the batch, op by op."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import tensorflow as tf

from tfdist_ext import tensorflow_internals as internals

SAME = "same"  # one process's value, equal on all ranks
ROWS = "rows"  # has a batch axis; each row depends on its own sample only
COUNT = "count"  # a number proportional to this rank's samples
LINEAR = "linear"  # a linear combination of sums and means over samples
COUPLED = "coupled"  # any other function of sums and means over samples
SHARD = "shard"  # depends on this rank's shard of a table's gradient
SIZES = "sizes"  # a shape, or a part of a shape
NUMBERS = "numbers"  # indices of this rank's rows, or one-hot rows of them
STATE = "state"  # read from a variable with a value of its own on each rank
STATIC = "static"  # a constant size, because the graph has a static batch size
UNKNOWN = "unknown"
MEAN, SUM = "mean", "sum"  # parts of LINEAR; the third possible part is SAME


@dataclasses.dataclass(frozen=True)
class Kind:
    """How a tensor depends on the batch.

    Attributes:
        name: one of the constants above.
        axis: the batch axis of ROWS, and of COUPLED if it has one.
        parts: for LINEAR, the parts that are combined: SAME, MEAN, SUM.
        reduction: for a COUPLED that reduces the batch axis, the reduction of
            the ranks' values to the value of the global batch: "sum", "mean"
            or an op type.
        cause: for UNKNOWN, the first op without a known rule.
        at_least: for COUNT, whether it is 1 if there are no samples.
    """

    name: str
    axis: int | None = None
    parts: frozenset[str] = frozenset()
    reduction: str = ""
    cause: tf.Operation | None = None
    at_least: bool = False

    @property
    def over_ranks(self) -> str:
        """Reduction that combines the ranks' values; "" if there is none."""
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
    """Analysis of a graph, as the rules of ops use it."""

    @property
    def samples(self) -> int | None: ...

    def of(self, value: tf.Tensor) -> Kind: ...

    def sizes(self, vector: tf.Tensor) -> list[Kind] | None: ...

    def slice_of_sizes(self, op: tf.Operation) -> list[Kind] | None: ...


def constant_of(value: tf.Tensor) -> np.ndarray | None:
    """Value of a tensor that is known when it is traced; None otherwise."""
    found = tf.get_static_value(value)
    return None if found is None else np.asarray(found)


_OF_NUMBERS: dict[str, Callable[..., float]] = {
    "AddV2": operator.add,
    "Maximum": max,
    "Pack": lambda number: number,
    "Sub": operator.sub,
}


def number_of(value: tf.Tensor) -> float | None:
    """Value of a constant scalar, or of a sum of a constant's elements.

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
    """Whether a symbolic tensor is computed from constants only."""
    seen: set[tuple[int, str]] = set()
    pending = [value]
    while pending:
        tensor = internals.captured(pending.pop())
        if not tf.is_symbolic_tensor(tensor):  # Captured from outside.
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
    """Parts that a kind adds to a linear combination; empty if not linear."""
    if kind.name == LINEAR:
        return kind.parts
    return {COUNT: SUM_KIND.parts, SAME: frozenset([SAME])}.get(
        kind.name, frozenset()
    )


def axes_of(value: tf.Tensor, axes: tf.Tensor) -> list[int] | None:
    """Axes of a value, counted from the first; None if they are unknown."""
    constant = constant_of(axes)
    if constant is None or value.shape.rank is None:
        return None
    return [int(axis) % max(1, value.shape.rank) for axis in constant.flat]


def like(kind: Kind, axis: int | None) -> Kind:
    """The kind with another batch axis."""
    return dataclasses.replace(kind, axis=axis, reduction="")


_MOST_ELEMENTS = 1 << 20  # Constants with more elements are not inspected.
# Linear reductions of values over given axes.
LINEAR_REDUCTIONS = {"Sum": SUM, "Mean": MEAN}


def of_cast(op: tf.Operation, kind: Kind) -> Kind:
    to_number = op.outputs[0].dtype.is_floating
    to_number = to_number or kind.name in (ROWS, COUNT, NUMBERS)
    exact = to_number or op.inputs[0].dtype == op.outputs[0].dtype
    return kind if exact else dataclasses.replace(COUPLED_KIND, axis=kind.axis)


def of_addition(op: tf.Operation, kinds: list[Kind]) -> Kind | None:
    pairs = zip(kinds, op.inputs, strict=True)
    kinds = [kind for kind, each in pairs if not _is_zero(each)] or [SAME_KIND]
    if all(kind.name == COUNT for kind in kinds):
        return max(kinds, key=lambda kind: kind.at_least)
    parts = [parts_of(kind) for kind in kinds]
    if all(parts):
        return Kind(LINEAR, parts=frozenset().union(*parts))
    return elementwise(op, kinds) if len(kinds) == len(op.inputs) else kinds[0]


def as_rows(kind: Kind) -> Kind:
    return Kind(ROWS, kind.axis) if kind.name == NUMBERS else kind


def _is_zero(value: tf.Tensor) -> bool:
    constant = constant_of(value) if value.op.type == "Const" else None
    return constant is not None and not constant.any()


def of_product(op: tf.Operation, kinds: list[Kind]) -> Kind | None:
    for one, other in (kinds, kinds[::-1]):
        if one == SAME_KIND and other.name in (LINEAR, COUNT):
            return other
        if one.name == COUNT and other == MEAN_KIND:
            return SUM_KIND
    return elementwise(op, kinds)


def of_largest_count(op: tf.Operation, kinds: list[Kind]) -> Kind | None:
    """`maximum(samples, 1)` is the number of samples if there are any."""
    for kind, each in zip(kinds, op.inputs, strict=True):
        constant = constant_of(each)
        if kind == SAME_KIND and constant is not None and (constant <= 1).all():
            return dataclasses.replace(COUNT_KIND, at_least=True)
    return elementwise(op, kinds)


def elementwise(op: tf.Operation, kinds: Sequence[Kind]) -> Kind | None:
    """Broadcasts the inputs; row i of the result depends on their row i."""
    output = op.outputs[0]
    axes = set()
    if any(kind.name == SIZES for kind in kinds):
        return None
    for kind, each in zip(kinds, op.inputs, strict=True):
        if kind.axis is not None:
            if each.shape.rank is None:
                return None
            axes.add(each.shape.rank - kind.axis)
    coupled = any(kind.name not in (SAME, ROWS) for kind in kinds)
    if not axes:
        return COUPLED_KIND if coupled else SAME_KIND
    if len(axes) > 1 or output.shape.rank is None:
        return None  # The op combines pairs of samples.
    (from_right,) = axes
    for kind, each in zip(kinds, op.inputs, strict=True):
        if kind.axis is None and not _is_one_at(each, from_right, op):
            return None
    axis = output.shape.rank - from_right
    return Kind(COUPLED if coupled else ROWS, axis)


def _is_one_at(value: tf.Tensor, from_right: int, op: tf.Operation) -> bool:
    """Whether a value is the same for all samples."""
    rank = value.shape.rank
    if rank is None:
        return False
    if _has_equal_rows(value, rank - from_right):
        return True
    if op.type == "Select" and rank == 1 and op.outputs[0].shape.rank != 1:
        return False
    return rank < from_right or value.shape[rank - from_right] == 1


def _has_equal_rows(value: tf.Tensor, axis: int) -> bool:
    """Whether a constant, such as `tf.ones_like(y)`, repeats one row."""
    if axis < 0 or not value.shape.is_fully_defined():
        return False
    if (value.shape.num_elements() or 0) > _MOST_ELEMENTS:
        return False
    constant = constant_of(value)
    if constant is None or not constant.shape[axis]:
        return False
    return bool((constant == constant.take([0], axis)).all())


def of_reduction(op: tf.Operation, kinds: list[Kind]) -> Kind | None:
    kind, value = kinds[0], op.inputs[0]
    axes = axes_of(value, op.inputs[1])
    if axes is None:
        return None
    linear = op.type in LINEAR_REDUCTIONS
    if kind.name == SIZES:
        return None
    if kind.axis is None:
        return kind if linear and kind.name == LINEAR else COUPLED_KIND
    if kind.axis not in axes:
        kept = op.get_attr("keep_dims")
        before = 0 if kept else sum(axis < kind.axis for axis in axes)
        return Kind(kind.name, kind.axis - before)
    if kind.name == ROWS and linear:
        return SUM_KIND if op.type == "Sum" else MEAN_KIND
    reduction = LINEAR_REDUCTIONS.get(op.type, op.type)
    return dataclasses.replace(COUPLED_KIND, reduction=reduction)


def by_row(op: tf.Operation, kinds: list[Kind]) -> Kind | None:
    first, *others = kinds
    cross_entropy = "CrossEntropy" in op.type
    if any(kind.axis not in (None, 0) for kind in kinds):
        return None
    if first.axis is None and first != SAME_KIND:
        no_axis = all(kind.axis is None for kind in kinds)
        return COUPLED_KIND if no_axis else None
    if op.inputs[0].shape.rank == 1 and not cross_entropy:
        return None  # The op works over the samples.
    if op.type.startswith(("Conv", "Depthwise")) and others[0] != SAME_KIND:
        return None
    if cross_entropy and any(kind.axis != 0 for kind in kinds):
        return None
    if op.type == "BiasAdd" and first.axis is None:
        return None
    coupled = any(kind.name not in (SAME, ROWS, NUMBERS) for kind in kinds)
    return Kind(COUPLED if coupled else ROWS, 0)


def contracted(kinds: Sequence[Kind]) -> Kind:
    """Kind of a sum of products over the batch axis."""
    if all(kind.name in (SAME, ROWS) for kind in kinds):
        return SUM_KIND
    return dataclasses.replace(COUPLED_KIND, reduction=SUM)


def _bilinear(kinds: Sequence[Kind]) -> Kind:
    """Kind of a product of two values without a batch axis."""
    names = sorted(kind.name for kind in kinds)
    if names == [LINEAR, SAME]:
        return next(kind for kind in kinds if kind.name == LINEAR)
    return SAME_KIND if names == [SAME, SAME] else COUPLED_KIND


def of_matmul(found: Sizes, op: tf.Operation, kinds: list[Kind]) -> Kind | None:
    left, right = op.inputs
    transposed = [
        op.get_attr(name)
        for name in (
            ("transpose_a", "transpose_b")
            if op.type == "MatMul"
            else ("adj_x", "adj_y")
        )
    ]
    if left.shape.rank is None or right.shape.rank is None:
        return None
    rank = max(left.shape.rank, right.shape.rank)
    letters = [chr(ord("A") + i) for i in range(rank - 2)]
    terms = []
    for value, swap, own in zip(
        (left, right), transposed, ("ik", "kj"), strict=True
    ):
        lead = letters[rank - value.shape.rank :]
        terms.append("".join(lead) + (own[::-1] if swap else own))
    return of_contraction(terms, "".join(letters) + "ij", kinds, op)


def of_einsum(found: Sizes, op: tf.Operation, kinds: list[Kind]) -> Kind | None:
    equation = op.get_attr("equation").decode().replace(" ", "")
    terms, arrow, result = equation.partition("->")
    if "..." in equation:
        dots = [
            value.shape.rank - (len(term) - 3)
            for value, term in zip(op.inputs, terms.split(","), strict=True)
            if "..." in term and value.shape.rank is not None
        ]
        wide = "".join(chr(ord("\u03b1") + i) for i in range(max([0, *dots])))
        filled = []
        for value, term in zip(op.inputs, terms.split(","), strict=True):
            if value.shape.rank is None:
                return None
            own = value.shape.rank - (len(term) - 3)
            filled.append(term.replace("...", wide[len(wide) - own :]))
        terms, result = ",".join(filled), result.replace("...", wide)
    found_terms = terms.split(",")
    return of_contraction(found_terms, result, kinds, op) if arrow else None


def _is_ones(value: tf.Tensor) -> bool:
    """Whether a value is a constant such as `tf.ones_like(y)`."""
    if (value.shape.num_elements() or 0) > _MOST_ELEMENTS:
        return False
    constant = constant_of(value)
    return constant is not None and bool((constant == 1).all())


def of_contraction(
    terms: Sequence[str],
    result: str,
    kinds: Sequence[Kind],
    op: tf.Operation,
) -> Kind | None:
    """Kind of the result of an einsum.

    Args:
        terms: the letters of each input.
        result: the letters of the result.
        kinds: kinds of the inputs.
        op: the op that has these inputs.
    """
    letters = {
        term[kind.axis]
        for term, kind in zip(terms, kinds, strict=True)
        if kind.axis is not None
    }
    if not letters:
        return _bilinear(kinds) if len(kinds) == 2 else COUPLED_KIND
    if len(letters) > 1:
        return None  # The einsum combines pairs of samples.
    (letter,) = letters
    kinds = [
        Kind(ROWS, term.index(letter))
        if kind == SAME_KIND and letter in term and _is_ones(value)
        else kind
        for term, kind, value in zip(terms, kinds, op.inputs, strict=True)
    ]
    for term, kind in zip(terms, kinds, strict=True):
        if kind.axis is None and letter in term:
            return None  # The value differs between this rank's samples.
        if term.count(letter) > 1:
            return None
    if letter not in result:
        return contracted(kinds)
    coupled = any(kind.name not in (SAME, ROWS) for kind in kinds)
    return Kind(COUPLED if coupled else ROWS, result.index(letter))
