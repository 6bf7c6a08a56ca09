# SPDX-License-Identifier: Apache-2.0
"""How a number of a step grows with its batch: as a sum does, or not at all.

Ranks average what each computes from its part of a batch. The average of
means is the mean over the whole batch; a sum has to be told from a mean
first, and only the graph that has computed it knows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext.batches.divisors import Divisor
from tfdist_ext.batches.divisors import divisor_of

MEAN, SUM = 0, 1  # the power of the batch size a value grows with
_MIXED = "mixed"  # a sum over samples plus something else
_Growth = int | str | None  # None: cannot be told

_SAME = {
    "Cast",
    "CheckNumerics",
    "EnsureShape",
    "ExpandDims",
    "Identity",
    "IdentityN",
    "Neg",
    "PreventGradient",
    "Reshape",
    "Squeeze",
    "StopGradient",
}
_ADDITIONS = {"Add", "AddN", "AddV2", "ConcatV2", "Pack", "Sub"}
_PRODUCTS = {"Mul", "MulNoNan"}
_QUOTIENTS = {"Div", "DivNoNan", "RealDiv", "Xdivy"}
_INPUTS = {"IteratorGetNext", "OptionalGetValue"}
_KEEP_GROWTH = {"Max", "Mean", "Min"}


@dataclasses.dataclass(frozen=True)
class Term:
    """A sum over samples that a value contains.

    Attributes:
        value: the sum.
        factor: what the value contains of it, a scalar; None for 1.
        divisor: what a sum has been divided by to give `value`, if that is a
            sum over samples too; None for a sum.
    """

    value: tf.Tensor
    factor: tf.Tensor | None = None
    divisor: Divisor | None = None

    def times(self, factor: tf.Tensor | float) -> Term:
        """The same sum, more of it."""
        factor = tf.cast(factor, self.value.dtype)
        own = self.factor
        factor = factor if own is None else own * factor
        return dataclasses.replace(self, factor=factor)


class BatchGrowth:
    """Follows values of a graph back to the batch.

    Args:
        samples: of this rank's batch if the graph fixes them, else None.
    """

    def __init__(self, samples: int | None = None) -> None:
        self._samples = samples
        self._growth: dict[tuple[int, str], _Growth] = {}
        self._from_data: dict[tuple[int, str], bool] = {}
        # Rows of which belong to samples of all ranks.
        self._gathered: set[tuple[int, str]] = set()
        # Of divisors, what they count; see `whole_batch`.
        self.ratios: dict[tuple[int, int, str], tf.Tensor] = {}

    def sums_in(self, value: tf.Tensor) -> list[Term]:
        """The sums over samples that a value consists of, also divided ones.

        Args:
            value: scalar tensor of a graph, or a tensor of which all elements
                are to be added up.

        Returns:
            Nothing for a mean over the samples, and for what cannot be told
            from one.

        Raises:
            ValueError: for a sum and a mean in one, which cannot be parted.
        """
        growth = self.of(value)
        if self._is_batched(value) and growth == MEAN:
            return [Term(value)]
        if growth == SUM:
            return [Term(value)]
        return self._parted(value) if growth == _MIXED else self._ratios(value)

    def _ratios(self, value: tf.Tensor) -> list[Term]:
        """The sums in a value that are divided by other sums of the data."""
        if value.shape.rank != 0 or marks.growth(value) is not None:
            return []
        op = value.op
        if op.type in _SAME:
            return self._ratios(op.inputs[value.value_index])
        if op.type == "Sub":
            first, second = map(self._ratios, op.inputs)
            return [*first, *(term.times(-1.0) for term in second)]
        if op.type in _ADDITIONS - {"ConcatV2", "Pack"}:
            return [t for each in op.inputs for t in self._ratios(each)]
        if op.type in _QUOTIENTS and self.of(op.inputs[0]) == SUM:
            divisor = divisor_of(op.inputs[1])
            if divisor is not None and self.of(divisor.part) == SUM:
                return [Term(value, divisor=divisor)]
        if op.type not in _PRODUCTS | _QUOTIENTS:
            return []
        left, right = map(self._ratios, op.inputs)
        if left and not right:
            other = op.inputs[1]
            if op.type in _QUOTIENTS:
                other = tf.math.reciprocal_no_nan(other)
            return [term.times(other) for term in left]
        if right and not left and op.type in _PRODUCTS:
            return [term.times(op.inputs[0]) for term in right]
        return []

    def of(self, value: tf.Tensor) -> _Growth:
        """Growth of a value with the samples of the batch."""
        marked = marks.growth(value)
        if marked is not None:
            return marked
        pending = [value.op]
        while pending:
            op = pending[-1]
            known = self._growth
            before = [x.op for x in op.inputs if _key(x.op) not in known]
            if before and _key(op) not in known:
                pending += before
                continue
            pending.pop()
            if _key(op) not in known:
                self._from_data[_key(op)] = _is_input(op) or any(
                    self._from_data[_key(each.op)] for each in op.inputs
                )
                if self._is_gathered(op):
                    self._gathered.add(_key(op))
                known[_key(op)] = self._of_op(op)
        return self._growth[_key(value.op)]

    def _of_op(self, op: tf.Operation) -> _Growth:
        marked = [marks.growth(output) for output in op.outputs]
        if any(growth is not None for growth in marked):
            return marked[0]
        inputs = [self._growth[_key(each.op)] for each in op.inputs]
        if op.type == "Size" or _is_of_sizes(op):
            return self._of_size(op)
        if op.type in ("Sum", "L2Loss", *_KEEP_GROWTH):
            return self._of_reduction(op, inputs[0])
        if op.type in _SAME:
            return inputs[0]
        if op.type in _ADDITIONS:
            pairs = zip(inputs, op.inputs, strict=True)
            return _of_addition([g for g, each in pairs if not _is_zero(each)])
        if op.type in ("Select", "SelectV2"):
            chosen = _of_addition(inputs[1:])
            return None if chosen == _MIXED else chosen
        if op.type in _PRODUCTS:
            return _of_product(inputs[0], inputs[1], 1)
        if op.type in _QUOTIENTS:
            if self._is_by_static_batch(op):
                return _of_product(inputs[0], SUM, -1)
            return _of_product(inputs[0], inputs[1], -1)
        if any(map(self._is_batched, op.outputs)):
            return MEAN  # each row is one sample's
        ends_batch = any(map(self._is_batched, op.inputs))
        return None if ends_batch or any(g != MEAN for g in inputs) else MEAN

    def _of_reduction(self, op: tf.Operation, growth: _Growth) -> _Growth:
        value = op.inputs[0]
        if op.type == "L2Loss":
            if not self._is_batched(value):
                return growth if growth == MEAN else None
            return SUM if growth == MEAN else None
        axes = tf.get_static_value(op.inputs[1])
        if axes is None or value.shape.rank is None:
            return None
        over_batch = 0 in [int(a) % value.shape.rank for a in axes.flat]
        if op.type == "Sum" and over_batch and self._is_batched(value):
            return _of_product(growth, SUM, 1)
        return growth

    def _of_size(self, op: tf.Operation) -> _Growth:
        """Growth of a number of samples or elements."""
        value = op.inputs[0]
        if op.type == "Size":
            return SUM if self._is_batched(value) else MEAN
        sizes = self._of_sizes(value)
        if op.type == "StridedSlice":
            first = tf.get_static_value(op.inputs[1])
            sizes = [] if first is None else sizes[int(first[0]) :][:1]
        counts = [size for size in sizes if isinstance(size, int)]
        return sum(counts) if sizes and len(counts) == len(sizes) else None

    def _of_sizes(self, vector: tf.Tensor) -> list[Any]:
        """Growth of each element of a shape; nothing if it is none."""
        op = vector.op
        if op.type == "Shape":
            batched = self._is_batched(op.inputs[0])
            rank = op.inputs[0].shape.rank or 0
            return [SUM if batched and i == 0 else MEAN for i in range(rank)]
        if op.type == "Pack":
            return [self._growth[_key(each.op)] for each in op.inputs]
        if op.type in _SAME:
            return self._of_sizes(op.inputs[0])
        return [MEAN] if op.type == "Const" else []

    def _is_gathered(self, op: tf.Operation) -> bool:
        """Whether an op's rows are those of all ranks, on each of them."""
        if op.type == "Tfdist>AllGather":
            return True
        if op.type in ("Slice", "StridedSlice") and not _keeps_rows(op):
            return False  # a rank may take its own rows
        inputs = [_key(each.op) for each in op.inputs]
        return any(key in self._gathered for key in inputs) and not any(
            map(self._is_batched, op.inputs)
        )

    def _is_batched(self, value: tf.Tensor) -> bool:
        """Whether the first dimension counts samples of this rank."""
        if not value.shape.rank or _key(value.op) in self._gathered:
            return False
        if value.shape[0] is None:
            return True
        if value.shape[0] != self._samples or value.op.type == "Pack":
            return False
        return self._from_data[_key(value.op)]

    def _is_by_static_batch(self, quotient: tf.Operation) -> bool:
        """Whether a sum is divided by a constant, how many it sums."""
        total, divisor = quotient.inputs[0], _static_number(quotient.inputs[1])
        if self._samples is None or divisor is None:
            return False
        while total.op.type in _SAME:
            total = total.op.inputs[0]
        if total.op.type != "Sum":
            return False
        return bool(divisor == total.op.inputs[0].shape.num_elements())

    def _parted(self, value: tf.Tensor) -> list[Term]:
        """The sums in a value that is more than one."""
        growth = self.of(value)
        if growth == SUM:
            return [Term(value)]
        if growth == MEAN or _is_zero(value):
            return [] if _is_zero(value) else self._ratios(value)
        op = value.op
        parts = list(op.inputs)
        if op.type in ("Sum", "ConcatV2"):
            parts = parts[:1] if op.type == "Sum" else parts[:-1]
        found: list[list[Term]] = [[]] * len(parts)
        if growth == _MIXED and op.type in (*_SAME, *_ADDITIONS, "Sum"):
            found = [self._parted(part) for part in parts]
        elif growth == _MIXED and op.type in (*_PRODUCTS, *_QUOTIENTS):
            return self._scaled(op)
        else:
            raise ValueError(
                f"Tensor '{value.name}' mixes a sum and a mean over the "
                "samples of a step, so the ranks of a strategy cannot make "
                "one process's value of their own. Divide the sum by the "
                "number of samples, or use tf.nn.compute_average_loss(losses)."
            )
        negative = {"Neg": 0, "Sub": 1}.get(op.type)
        return [
            term.times(-1.0) if i == negative else term
            for i, terms in enumerate(found)
            for term in terms
        ]

    def _scaled(self, op: tf.Operation) -> list[Term]:
        """The sums in a product or quotient with something that is none."""
        mixed, factor = op.inputs
        if self.of(mixed) == MEAN:
            mixed, factor = factor, mixed
        if op.type in _QUOTIENTS:
            factor = tf.math.reciprocal_no_nan(factor)
        return [term.times(factor) for term in self._parted(mixed)]


def _of_addition(growths: Sequence[_Growth]) -> _Growth:
    different = set(growths)
    if None in different:
        return None
    if len(different) == 1:
        return different.pop()
    return _MIXED if different <= {MEAN, SUM, _MIXED} else None


def _of_product(left: _Growth, right: _Growth, sign: int) -> _Growth:
    if isinstance(left, int) and isinstance(right, int):
        return left + sign * right
    if left == _MIXED and right == MEAN:
        return _MIXED
    return _MIXED if (left, right, sign) == (MEAN, _MIXED, 1) else None


def _key(op: tf.Operation) -> tuple[int, str]:
    return id(op.graph), op.name


def _is_input(op: tf.Operation) -> bool:
    if op.type == "Placeholder":
        return bool(op.outputs[0].dtype not in (tf.resource, tf.variant))
    return op.type in _INPUTS


def _keeps_rows(op: tf.Operation) -> bool:
    """Whether a slice has all of the first dimension, as far as is known."""
    if op.type == "Slice":
        return False
    both = op.get_attr("begin_mask") & op.get_attr("end_mask")
    return bool((both | op.get_attr("ellipsis_mask")) & 1)


def _is_of_sizes(op: tf.Operation) -> bool:
    """Whether an op takes elements of a shape, as far as can be told."""
    if op.type not in ("Prod", "StridedSlice"):
        return False
    vector = op.inputs[0]
    return (
        vector.dtype.is_integer
        and vector.shape.rank == 1
        and vector.shape.is_fully_defined()
    )


def _is_zero(value: tf.Tensor) -> bool:
    constant = tf.get_static_value(value) if value.op.type == "Const" else None
    return constant is not None and not constant.any()


def _static_number(value: tf.Tensor) -> Any:
    while value.op.type in _SAME:
        value = value.op.inputs[0]
    if value.op.type == "Prod":
        sizes = tf.get_static_value(value.op.inputs[0])
        return None if sizes is None else sizes.prod()
    return tf.get_static_value(value)
