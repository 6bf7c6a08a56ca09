# SPDX-License-Identifier: Apache-2.0
"""How a tensor of a step depends on the samples of its batch.

The analysis follows the ops of a graph from the data to a value. It knows an
op only where it knows its rule; the result of any other op that reads samples
is `UNKNOWN`, with that op as the cause. Nothing is taken for a mean because
nothing is known about it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext import tensorflow_internals as internals

SAME = "same"  # one process's value, equal on all ranks
ROWS = "rows"  # has a batch axis; each row follows from its own sample
COUNT = "count"  # a number proportional to this rank's samples
LINEAR = "linear"  # a linear combination of sums and means over samples
COUPLED = "coupled"  # any other function of sums and means over samples
SIZES = "sizes"  # a shape, or a part of one
NUMBERS = "numbers"  # the numbers of this rank's rows, or one-hot rows of them
STATE = "state"  # read from a variable of which every rank has its own
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
    """

    name: str
    axis: int | None = None
    parts: frozenset[str] = frozenset()
    reduction: str = ""
    cause: tf.Operation | None = None

    @property
    def over_ranks(self) -> str:
        """How the ranks' values become one, "" if not by one reduction."""
        if self.name == COUNT:
            return SUM
        if self.name == LINEAR and SUM not in self.parts:
            return MEAN
        if self.name == LINEAR:
            return SUM if self.parts == {SUM} else ""
        return self.reduction


_SAME = Kind(SAME)
_COUNT = Kind(COUNT)
_STATE = Kind(STATE)
_MEAN = Kind(LINEAR, parts=frozenset([MEAN]))
_SUM = Kind(LINEAR, parts=frozenset([SUM]))
_COUPLED = Kind(COUPLED)
_MARKED = {SAME: _SAME, MEAN: _MEAN, SUM: _SUM, ROWS: Kind(ROWS, 0)}

_PASS_ON = {
    "CheckNumerics", "DebugIdentityV2", "EnsureShape", "Identity", "IdentityN",
    "Neg", "PreventGradient", "Snapshot", "StopGradient",
}  # fmt: skip
_ELEMENTWISE = {
    "Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atan2", "Atanh",
    "BesselI0e", "BesselI1e", "Betainc", "BitwiseAnd", "BitwiseOr",
    "BitwiseXor", "Ceil", "ClipByValue", "Complex", "ComplexAbs", "Cos",
    "Cosh", "Digamma", "DivNoNan", "Elu", "EluGrad", "Equal", "Erf", "Erfc",
    "Erfinv", "Exp", "Expm1", "Floor", "FloorDiv", "FloorMod", "Greater",
    "GreaterEqual", "Igamma", "Igammac", "Imag", "Inv", "InvGrad", "IsFinite",
    "IsInf", "IsNan", "LeakyRelu", "LeakyReluGrad", "Less", "LessEqual",
    "Lgamma", "Log", "Log1p", "LogicalAnd", "LogicalNot", "LogicalOr",
    "Maximum", "Minimum", "Mod", "Ndtri", "NextAfter", "NotEqual", "OnesLike",
    "Polygamma", "Pow", "Real", "Reciprocal", "ReciprocalGrad", "Relu",
    "Relu6", "Relu6Grad", "ReluGrad", "Rint", "Round", "Rsqrt", "RsqrtGrad",
    "Select", "SelectV2", "Selu", "SeluGrad", "Sigmoid", "SigmoidGrad",
    "Sign", "Sin", "Sinh", "Softplus", "SoftplusGrad", "Softsign",
    "SoftsignGrad", "Sqrt", "SqrtGrad", "Square", "SquaredDifference",
    "StringLower", "StringUpper", "Tan", "Tanh", "TanhGrad", "TruncateDiv",
    "TruncateMod", "Xlog1py", "Xlogy", "Zeta", "ZerosLike",
}  # fmt: skip
_ADDITIONS = {"Add", "AddN", "AddV2", "Sub"}
_PRODUCTS = {"Mul", "MulNoNan"}
_QUOTIENTS = {"Div", "DivNoNan", "RealDiv", "Xdivy"}
# Reductions over given axes.
_LINEAR_REDUCTIONS = {"Sum": SUM, "Mean": MEAN}
_OTHER_REDUCTIONS = {
    "All", "Any", "EuclideanNorm", "Max", "Min", "Prod",
}  # fmt: skip
# Ops on shapes; a scalar element of a shape is no shape.
_OF_SIZES = {"Cast", "ConcatV2", "Pack", "Prod"}
# Ops over the last axis, or over all but the first, for each row.
_BY_ROW = {
    "AvgPool", "BiasAdd", "Conv2D", "Conv3D", "DepthwiseConv2dNative",
    "InTopK", "InTopKV2", "LogSoftmax", "MaxPool", "ResizeBilinear", "ResizeNearestNeighbor",
    "Softmax", "SoftmaxCrossEntropyWithLogits",
    "SparseSoftmaxCrossEntropyWithLogits", "TopKV2",
}  # fmt: skip
_RANDOM = {
    "ParameterizedTruncatedNormal", "RandomGammaV3", "RandomStandardNormal",
    "RandomUniform", "RandomUniformInt", "StatefulStandardNormalV2",
    "StatefulUniform", "StatelessRandomNormal", "StatelessRandomNormalV2",
    "StatelessRandomUniform", "StatelessRandomUniformInt",
    "StatelessRandomUniformIntV2", "StatelessRandomUniformV2",
    "StatelessTruncatedNormal", "StatelessTruncatedNormalV2",
    "TruncatedNormal",
}  # fmt: skip
# What numbers of rows may be used for: as labels, and to take one element of
# each row.
_OF_NUMBERS = {
    "Cast", "ExpandDims", "GatherNd", "Identity", "Pack", "Reshape",
    "SparseSoftmaxCrossEntropyWithLogits", "StopGradient",
}  # fmt: skip
# Sums or rows of all ranks, which are equal on each of them.
_EXCHANGES = {"Tfdist>AllGather", "Tfdist>AllReduce"}


class BatchDependence:
    """Tells how tensors of a step's graphs depend on the batch.

    Args:
        samples: of this rank's batch if the graph fixes them, else None.
    """

    def __init__(self, samples: int | None = None) -> None:
        self._samples = samples
        self._known: dict[tuple[int, str], list[Kind]] = {}
        # Whether rows of all ranks are gathered with this rank's first, so
        # that numbers of rows mean the same in them.
        self.own_rows_first = False
        # Divisions by a constant that is this rank's number of elements.
        self.by_constant: list[tf.Operation] = []

    def of(self, value: tf.Tensor) -> Kind:
        """The kind of a symbolic tensor."""
        marked = _marked(value)
        if marked is not None:
            return marked
        pending = [value.op]
        while pending:
            op = pending[-1]
            if _key(op) in self._known:
                pending.pop()
                continue
            before = [
                each.op
                for each in op.inputs
                if _marked(each) is None and _key(each.op) not in self._known
            ]
            if before:
                pending += before
                continue
            pending.pop()
            self._known[_key(op)] = self._of_op(op)
        return self._known[_key(value.op)][value.value_index]

    def _of_op(self, op: tf.Operation) -> list[Kind]:
        kinds = [self._of_known(each) for each in op.inputs]
        if not op.outputs:
            return []
        source = self._of_source(op)
        if source is not None:
            return [source] * len(op.outputs)
        states = [k for k in kinds if k.name == STATE]
        unknown = [k for k in kinds if k.name == UNKNOWN]
        if unknown or states:
            return [(unknown or states)[0]] * len(op.outputs)
        if all(kind == _SAME for kind in kinds) and op.type not in _RANDOM:
            return [_SAME] * len(op.outputs)
        found = self._by_rule(op, kinds)
        if isinstance(found, Kind):
            found = [found] * len(op.outputs)
        if found is None:
            found = [Kind(UNKNOWN, cause=op)] * len(op.outputs)
        return found

    def _of_known(self, value: tf.Tensor) -> Kind:
        marked = _marked(value)
        if marked is not None:
            return marked
        return self._known[_key(value.op)][value.value_index]

    def _of_source(self, op: tf.Operation) -> Kind | None:
        """The kind of what an op reads from outside of the graph."""
        if op.type in ("IteratorGetNext", "OptionalGetValue"):
            return Kind(ROWS, 0)
        if op.type == "ReadVariableOp":
            outer = internals.captured(op.inputs[0])
            return _STATE if marks.is_per_rank(outer) else _SAME
        if op.type != "Placeholder":
            return _SAME if op.type in _EXCHANGES else None
        value = op.outputs[0]
        outer = internals.captured(value)
        if outer is not value:
            symbolic = tf.is_symbolic_tensor(outer)
            return self.of(outer) if symbolic else _SAME
        return Kind(ROWS, 0) if self.may_be_batched(value) else _SAME

    def may_be_batched(self, value: tf.Tensor) -> bool:
        """Whether the first dimension can be that of this rank's samples."""
        if value.dtype in (tf.resource, tf.variant) or value.shape.rank == 0:
            return False
        if value.shape.rank is None or value.shape[0] is None:
            return True
        return bool(value.shape[0] == self._samples)

    def _by_rule(
        self, op: tf.Operation, kinds: list[Kind]
    ) -> Kind | list[Kind] | None:
        if any(k.name == NUMBERS for k in kinds):
            if self.own_rows_first:
                kinds = [_as_rows(kind) for kind in kinds]
            elif op.type not in _OF_NUMBERS:
                return None
        if op.type in _PASS_ON:
            return kinds[: len(op.outputs)]
        if kinds[0].name == SIZES and op.type in _OF_SIZES:
            return _of_sizes(self, op, kinds)
        if op.type == "Cast":
            return _of_cast(op, kinds[0])
        if op.type in _ADDITIONS:
            return _of_addition(op, kinds)
        if op.type in _PRODUCTS:
            return _of_product(op, kinds)
        if op.type in _QUOTIENTS:
            return self._of_quotient(op, kinds)
        if op.type == "Maximum" and COUNT in (k.name for k in kinds):
            return _of_largest_count(op, kinds)
        if op.type in _ELEMENTWISE:
            return _elementwise(op, kinds)
        if op.type in _LINEAR_REDUCTIONS or op.type in _OTHER_REDUCTIONS:
            return _of_reduction(op, kinds)
        if op.type in _BY_ROW:
            return _by_row(op, kinds)
        rule = _RULES.get(op.type)
        if rule is None and op.type in _RANDOM:
            rule = _of_new_rows
        return rule(self, op, kinds) if rule else None

    def _of_quotient(self, op: tf.Operation, kinds: list[Kind]) -> Kind | None:
        top, bottom = kinds
        if bottom.name == COUNT and top == _SUM:
            return _MEAN
        if bottom.name == COUNT and top.name == COUNT:
            return _SAME
        if top == _SUM and bottom == _SAME and self._is_own_size(op):
            self.by_constant.append(op)
            return _MEAN
        if top.name in (LINEAR, COUNT) and bottom == _SAME:
            return top
        return _elementwise(op, kinds)

    def _is_own_size(self, quotient: tf.Operation) -> bool:
        """Whether a sum is divided by a constant, how many it sums here."""
        total, divisor = quotient.inputs[0], _constant(quotient.inputs[1])
        if self._samples is None or divisor is None or divisor.size != 1:
            return False
        while total.op.type in {*_PASS_ON, "Cast", "Reshape", "Squeeze"}:
            total = total.op.inputs[0]
        if total.op.type != "Sum":
            return False
        size = total.op.inputs[0].shape.num_elements()
        return bool(divisor.item() in (size, self._samples))

    def sizes(self, vector: tf.Tensor) -> list[Kind] | None:
        """The kind of each element of a shape; None if it is no shape."""
        constant = _constant(vector)
        if constant is not None and constant.ndim == 1:
            return [_SAME] * constant.size
        op = vector.op
        if op.type == "Shape":
            source, kind = op.inputs[0], self.of(op.inputs[0])
            if source.shape.rank is None or kind.name == UNKNOWN:
                return None
            return [
                _COUNT if i == kind.axis else _SAME
                for i in range(source.shape.rank)
            ]
        if op.type == "Pack" and vector.shape.rank == 1:
            return [self.of(each) for each in op.inputs]
        if op.type == "ConcatV2":
            parts = [self.sizes(each) for each in op.inputs[:-1]]
            if any(part is None for part in parts):
                return None
            return [kind for part in parts if part for kind in part]
        if op.type in {*_PASS_ON, "Cast"}:
            return self.sizes(op.inputs[0])
        if op.type == "StridedSlice":
            return self._slice_of_sizes(op)
        same = self.of(vector) == _SAME and vector.shape.rank == 1
        known = same and vector.shape[0] is not None
        return [_SAME] * vector.shape[0] if known else None

    def _slice_of_sizes(self, op: tf.Operation) -> list[Kind] | None:
        sizes = self.sizes(op.inputs[0])
        bounds = [_constant(each) for each in op.inputs[1:4]]
        if sizes is None or any(b is None or b.size != 1 for b in bounds):
            return None
        begin, end, stride = (int(b[0]) for b in bounds)  # type: ignore[index]
        if op.get_attr("shrink_axis_mask") & 1:
            return [sizes[begin]]
        first = None if op.get_attr("begin_mask") & 1 else begin
        last = None if op.get_attr("end_mask") & 1 else end
        return sizes[first:last:stride]


def _marked(value: tf.Tensor) -> Kind | None:
    if marks.is_reduced(value):
        return _SAME
    marked = marks.dependence(value)
    return None if marked is None else _MARKED[marked]


def _key(op: tf.Operation) -> tuple[int, str]:
    return id(op.graph), op.name


def _constant(value: tf.Tensor) -> np.ndarray | None:
    found = tf.get_static_value(value)
    return None if found is None else np.asarray(found)


def _of_cast(op: tf.Operation, kind: Kind) -> Kind:
    to_number = op.outputs[0].dtype.is_floating
    to_number = to_number or kind.name in (ROWS, COUNT, NUMBERS)
    exact = to_number or op.inputs[0].dtype == op.outputs[0].dtype
    return kind if exact else dataclasses.replace(_COUPLED, axis=kind.axis)


def _of_addition(op: tf.Operation, kinds: list[Kind]) -> Kind | None:
    pairs = zip(kinds, op.inputs, strict=True)
    kinds = [kind for kind, each in pairs if not _is_zero(each)] or [_SAME]
    if all(kind.name == COUNT for kind in kinds):
        return _COUNT
    parts = [_parts_of(kind) for kind in kinds]
    if all(parts):
        return Kind(LINEAR, parts=frozenset().union(*parts))
    return _elementwise(op, kinds) if len(kinds) == len(op.inputs) else kinds[0]


def _parts_of(kind: Kind) -> frozenset[str]:
    """What a kind adds to a linear combination; nothing if it is none."""
    if kind.name == LINEAR:
        return kind.parts
    return {COUNT: _SUM.parts, SAME: frozenset([SAME])}.get(
        kind.name, frozenset()
    )


def _as_rows(kind: Kind) -> Kind:
    return Kind(ROWS, kind.axis) if kind.name == NUMBERS else kind


def _is_zero(value: tf.Tensor) -> bool:
    constant = _constant(value) if value.op.type == "Const" else None
    return constant is not None and not constant.any()


def _of_product(op: tf.Operation, kinds: list[Kind]) -> Kind | None:
    for one, other in (kinds, kinds[::-1]):
        if one == _SAME and other.name in (LINEAR, COUNT):
            return other
        if one.name == COUNT and other == _MEAN:
            return _SUM
    return _elementwise(op, kinds)


def _of_largest_count(op: tf.Operation, kinds: list[Kind]) -> Kind | None:
    """`maximum(samples, 1)` is the number of samples where there are any."""
    for kind, each in zip(kinds, op.inputs, strict=True):
        constant = _constant(each)
        if kind == _SAME and constant is not None and (constant <= 1).all():
            return _COUNT
    return _elementwise(op, kinds)


def _elementwise(op: tf.Operation, kinds: Sequence[Kind]) -> Kind | None:
    """Broadcasts the inputs; row i of the result follows from their row i."""
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
        return _COUPLED if coupled else _SAME
    if len(axes) > 1 or output.shape.rank is None:
        return None  # pairs of samples
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
    if op.type == "Select" and rank == 1 and op.outputs[0].shape.rank != 1:
        return False
    return rank < from_right or value.shape[rank - from_right] == 1


def _axes(value: tf.Tensor, axes: tf.Tensor) -> list[int] | None:
    constant = _constant(axes)
    if constant is None or value.shape.rank is None:
        return None
    return [int(axis) % max(1, value.shape.rank) for axis in constant.flat]


def _of_reduction(op: tf.Operation, kinds: list[Kind]) -> Kind | None:
    kind, value = kinds[0], op.inputs[0]
    axes = _axes(value, op.inputs[1])
    if axes is None:
        return None
    linear = op.type in _LINEAR_REDUCTIONS
    if kind.name == SIZES:
        return None
    if kind.axis is None:
        return kind if linear and kind.name == LINEAR else _COUPLED
    if kind.axis not in axes:
        kept = op.get_attr("keep_dims")
        before = 0 if kept else sum(axis < kind.axis for axis in axes)
        return Kind(kind.name, kind.axis - before)
    if kind.name == ROWS and linear:
        return _SUM if op.type == "Sum" else _MEAN
    reduction = _LINEAR_REDUCTIONS.get(op.type, op.type)
    return dataclasses.replace(_COUPLED, reduction=reduction)


def _by_row(op: tf.Operation, kinds: list[Kind]) -> Kind | None:
    first, *others = kinds
    if any(kind.axis not in (None, 0) for kind in kinds):
        return None
    if first.axis is None and first != _SAME:
        return _COUPLED if all(kind.axis is None for kind in kinds) else None
    needs_axis = op.type not in ("BiasAdd",) and "Softmax" not in op.type
    if op.inputs[0].shape.rank == 1 and (needs_axis or op.type == "Softmax"):
        return None  # over the samples
    if op.type.startswith(("Conv", "Depthwise")) and others[0] != _SAME:
        return None
    if "CrossEntropy" in op.type and any(k.axis != 0 for k in kinds):
        return None
    if op.type == "BiasAdd" and kinds[0].axis is None:
        return None
    coupled = any(kind.name not in (SAME, ROWS, NUMBERS) for kind in kinds)
    return Kind(COUPLED if coupled else ROWS, 0)


def _like(kind: Kind, axis: int | None) -> Kind:
    """A kind with its batch axis elsewhere."""
    return dataclasses.replace(kind, axis=axis, reduction="")


def _contracted(kinds: Sequence[Kind]) -> Kind:
    """A sum over the batch axis of products."""
    if all(kind.name in (SAME, ROWS) for kind in kinds):
        return _SUM
    return dataclasses.replace(_COUPLED, reduction=SUM)


def _bilinear(kinds: Sequence[Kind]) -> Kind:
    """A product of two values without a batch axis."""
    names = sorted(kind.name for kind in kinds)
    if names == [LINEAR, SAME]:
        return next(kind for kind in kinds if kind.name == LINEAR)
    return _SAME if names == [SAME, SAME] else _COUPLED


def _of_matmul(
    found: BatchDependence, op: tf.Operation, kinds: list[Kind]
) -> Kind | None:
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
    return _of_contraction(terms, "".join(letters) + "ij", kinds)


def _of_einsum(
    found: BatchDependence, op: tf.Operation, kinds: list[Kind]
) -> Kind | None:
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
    return _of_contraction(terms.split(","), result, kinds) if arrow else None


def _of_contraction(
    terms: Sequence[str], result: str, kinds: Sequence[Kind]
) -> Kind | None:
    """The kind of an einsum.

    Args:
        terms: the letters of each input.
        result: the letters of the result.
        kinds: of the inputs.
    """
    letters = {
        term[kind.axis]
        for term, kind in zip(terms, kinds, strict=True)
        if kind.axis is not None
    }
    if not letters:
        return _bilinear(kinds) if len(kinds) == 2 else _COUPLED
    if len(letters) > 1:
        return None  # pairs of samples
    (letter,) = letters
    for term, kind in zip(terms, kinds, strict=True):
        if kind.axis is None and letter in term:
            return None  # another value for each sample of this rank
        if term.count(letter) > 1:
            return None
    if letter not in result:
        return _contracted(kinds)
    coupled = any(kind.name not in (SAME, ROWS) for kind in kinds)
    return Kind(COUPLED if coupled else ROWS, result.index(letter))


def _of_transpose(
    found: BatchDependence, op: tf.Operation, kinds: list[Kind]
) -> Kind | None:
    order = _constant(op.inputs[1])
    if kinds[0].axis is None:
        return _like(kinds[0], None)
    if order is None:
        return None
    return _like(kinds[0], [int(a) for a in order].index(kinds[0].axis))


def _of_reshape(
    found: BatchDependence, op: tf.Operation, kinds: list[Kind]
) -> Kind | None:
    """Keeps the batch axis where it stays the outermost of its elements."""
    kind, value, output = kinds[0], op.inputs[0], op.outputs[0]
    if kind.axis is None:
        return _like(kind, None) if kind.name != SAME else None
    before, after = value.shape, output.shape
    if before.rank is None or after.rank is None or after.rank <= kind.axis:
        return None
    if before[: kind.axis].as_list() != after[: kind.axis].as_list():
        return None
    if not before[: kind.axis].is_fully_defined():
        return None
    size = after[kind.axis]
    samples = found._samples
    whole_rows = size is None or (samples and size % samples == 0)
    inner = [math.prod(s[kind.axis + 1 :].as_list()) if
             s[kind.axis + 1 :].is_fully_defined() else None
             for s in (before, after)]  # fmt: skip
    fits = None in inner or (inner[0] or 0) % (inner[1] or 1) == 0
    return kind if whole_rows and fits else None


def _of_expand_dims(
    found: BatchDependence, op: tf.Operation, kinds: list[Kind]
) -> Kind | None:
    kind, rank = kinds[0], op.outputs[0].shape.rank
    axis = _constant(op.inputs[1])
    if kind.axis is None:
        return _like(kind, None)
    if axis is None or rank is None:
        return None
    return _like(kind, kind.axis + (int(axis) % rank <= kind.axis))


def _of_squeeze(
    found: BatchDependence, op: tf.Operation, kinds: list[Kind]
) -> Kind | None:
    kind, shape = kinds[0], op.inputs[0].shape
    if kind.axis is None:
        return _like(kind, None)
    if shape.rank is None:
        return None
    axes = [int(axis) % shape.rank for axis in op.get_attr("squeeze_dims")]
    axes = axes or [i for i in range(shape.rank) if shape[i] == 1]
    if kind.axis in axes:
        return None
    return _like(kind, kind.axis - sum(axis < kind.axis for axis in axes))


def _of_concat(
    found: BatchDependence, op: tf.Operation, kinds: list[Kind]
) -> Kind | None:
    axis = _constant(op.inputs[-1])
    rank = op.outputs[0].shape.rank
    joined = kinds[:-1]
    if axis is None or rank is None:
        return None
    return _joined(joined, int(axis) % rank, op.inputs[:-1])


def _joined(
    kinds: Sequence[Kind], along: int, values: Sequence[tf.Tensor]
) -> Kind | None:
    axes = {kind.axis for kind in kinds}
    if axes == {None}:
        parts = [_parts_of(kind) for kind in kinds]
        if all(parts):
            return Kind(LINEAR, parts=frozenset().union(*parts))
        return _COUPLED
    coupled = any(kind.name not in (SAME, ROWS) for kind in kinds)
    with_axis = axes - {None}
    if len(with_axis) > 1:
        return None
    (axis,) = with_axis
    if None in axes:
        # A constant beside the samples, such as a row of padding.
        one = all(
            value.shape[axis] == 1
            for kind, value in zip(kinds, values, strict=True)
            if kind.axis is None
        )
        if along == axis or not one:
            return None
    return Kind(COUPLED if coupled else ROWS, axis)


def _of_pack(
    found: BatchDependence, op: tf.Operation, kinds: list[Kind]
) -> Kind | None:
    along = op.get_attr("axis") % op.outputs[0].shape.rank
    if any(k.name == COUNT for k in kinds) and op.inputs[0].dtype.is_integer:
        return Kind(SIZES)
    if all(kind.axis is None for kind in kinds):
        return _joined(kinds, along, op.inputs)
    if len({kind.axis for kind in kinds}) > 1:
        return None
    axis = kinds[0].axis
    assert axis is not None
    names = {kind.name for kind in kinds}
    name = ROWS if names <= {SAME, ROWS} else COUPLED
    name = NUMBERS if NUMBERS in names else name
    return Kind(name, axis + (along <= axis))


def _of_unpack(
    found: BatchDependence, op: tf.Operation, kinds: list[Kind]
) -> Kind | None:
    rank, kind = op.inputs[0].shape.rank, kinds[0]
    if kind.axis is None:
        return _like(kind, None)
    along = op.get_attr("axis") % rank
    if along == kind.axis:
        return None
    return _like(kind, kind.axis - (along < kind.axis))


def _of_split(
    found: BatchDependence, op: tf.Operation, kinds: list[Kind]
) -> Kind | None:
    place = 0 if op.type == "Split" else 2
    value = op.inputs[1 if op.type == "Split" else 0]
    kind = kinds[1 if op.type == "Split" else 0]
    if kind.axis is None:
        return _like(kind, None)
    axis = _constant(op.inputs[place])
    if axis is None or value.shape.rank is None:
        return None
    return None if int(axis) % value.shape.rank == kind.axis else kind


def _of_strided_slice(
    found: BatchDependence, op: tf.Operation, kinds: list[Kind]
) -> Kind | None:
    value, kind = op.inputs[0], kinds[0]
    if kind.name == SIZES:
        sizes = found._slice_of_sizes(op)
        if sizes is None or op.outputs[0].shape.rank == 0:
            return sizes[0] if sizes else None
        return Kind(SIZES)
    if kind.axis is None:
        return _like(kind, None)
    return _kept_by_slice(op, kind)


def _kept_by_slice(op: tf.Operation, kind: Kind) -> Kind | None:
    """The kind of `x[:, 3]`: the batch axis is kept whole, or it is unknown."""
    bits = {
        name: op.get_attr(f"{name}_mask")
        for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    strides = _constant(op.inputs[3])
    rank = op.inputs[0].shape.rank
    if strides is None or rank is None:
        return None
    given = len(strides)
    new_axes = bin(bits["new_axis"]).count("1")
    axis = place = 0  # of the input and of the output
    for i in range(given):
        bit = 1 << i
        if bits["ellipsis"] & bit:
            skipped = rank - (given - new_axes - 1)
            if axis <= kind.axis < axis + skipped:  # type: ignore[operator]
                return _like(kind, place + kind.axis - axis)  # type: ignore[operator]
            axis, place = axis + skipped, place + skipped
        elif bits["new_axis"] & bit:
            place += 1
        else:
            if axis == kind.axis:
                whole = bits["begin"] & bits["end"] & bit
                one = int(strides[i]) == 1 and not bits["shrink_axis"] & bit
                return _like(kind, place) if whole and one else None
            axis += 1
            place += not bits["shrink_axis"] & bit
    return _like(kind, place + kind.axis - axis)  # type: ignore[operator]


def _of_shape(
    found: BatchDependence, op: tf.Operation, kinds: list[Kind]
) -> Kind | None:
    """A vector of sizes, whose elements `sizes` tells apart."""
    kind = kinds[0]
    if op.type == "Size":
        return _COUNT if kind.axis is not None else _SAME
    return _SAME if kind.axis is None else Kind(SIZES)


def _of_sizes(
    found: BatchDependence, op: tf.Operation, kinds: list[Kind]
) -> Kind | None:
    """A shape made of sizes, or the product of its elements."""
    if op.type != "Prod":
        return Kind(SIZES) if found.sizes(op.outputs[0]) is not None else None
    sizes = found.sizes(op.inputs[0])
    if sizes is None or any(k.name not in (SAME, COUNT) for k in sizes):
        return None
    counts = sum(kind.name == COUNT for kind in sizes)
    return {0: _SAME, 1: _COUNT}.get(counts, _COUPLED)


def _of_new_rows(
    found: BatchDependence, op: tf.Operation, kinds: list[Kind]
) -> Kind | None:
    """Random numbers, or equal ones, for each sample."""
    sizes = found.sizes(op.inputs[0])
    if sizes is None:
        return None
    counts = [i for i, kind in enumerate(sizes) if kind.name == COUNT]
    if any(kind.name not in (SAME, COUNT) for kind in sizes):
        return None
    if op.type == "Fill" and kinds[1] != _SAME:
        return None if counts else _like(kinds[1], None)
    if len(counts) > 1:
        return None
    return Kind(ROWS, counts[0]) if counts else _SAME


def _of_gather(
    found: BatchDependence, op: tf.Operation, kinds: list[Kind]
) -> Kind | None:
    params, indices, *_ = kinds
    along = _constant(op.inputs[2]) if len(op.inputs) > 2 else np.asarray(0)
    rank = op.inputs[0].shape.rank
    if along is None or rank is None:
        return None
    axis = int(along) % rank
    batch_dims = 0 if op.type == "Gather" else op.get_attr("batch_dims")
    if params == _SAME and indices.name == ROWS and not batch_dims:
        assert indices.axis is not None
        return Kind(ROWS, axis + indices.axis)
    if params.axis is None and indices == _SAME:
        return _like(params, None)
    if params.axis is None or params.axis == axis:
        return None
    if indices == _SAME and not batch_dims:
        more = (op.inputs[1].shape.rank or 0) - 1
        return _like(params, params.axis + (more if params.axis > axis else 0))
    if indices.axis == params.axis and params.axis < batch_dims:
        return _like(params, params.axis) if indices.name == ROWS else None
    return None


def _of_lookup(
    found: BatchDependence, op: tf.Operation, kinds: list[Kind]
) -> Kind | None:
    """Rows of a variable."""
    outer = internals.captured(op.inputs[0])
    if kinds[0] != _SAME or marks.is_per_rank(outer):
        return None
    return _like(kinds[1], kinds[1].axis) if kinds[1].name == ROWS else None


def _of_gather_nd(
    found: BatchDependence, op: tf.Operation, kinds: list[Kind]
) -> Kind | None:
    """Elements of a constant, or one element of each row by its number."""
    params, indices = kinds
    if params == _SAME and indices == Kind(ROWS, 0):
        return indices
    made_by = op.inputs[1].op
    if params != Kind(ROWS, 0) or made_by.type != "Pack":
        return None
    last = made_by.get_attr("axis") in (-1, op.inputs[1].shape.rank - 1)
    first = found.of(made_by.inputs[0])
    return params if last and first == Kind(NUMBERS, 0) else None


def _of_range(
    found: BatchDependence, op: tf.Operation, kinds: list[Kind]
) -> Kind | None:
    start, step = _constant(op.inputs[0]), _constant(op.inputs[2])
    counts = kinds[1].name == COUNT and start is not None and step is not None
    return Kind(NUMBERS, 0) if counts and start == 0 and step == 1 else None


def _of_diagonal(
    found: BatchDependence, op: tf.Operation, kinds: list[Kind]
) -> Kind | None:
    """`tf.eye` of the number of samples: a one-hot row for each."""
    ones = op.inputs[0 if op.type == "MatrixDiagV3" else 1]
    rows = all(k in (_SAME, Kind(ROWS, 0)) for k in kinds)
    return Kind(NUMBERS, 0) if rows and ones.shape.rank == 1 else None


def _of_one_hot(
    found: BatchDependence, op: tf.Operation, kinds: list[Kind]
) -> Kind | None:
    kind = kinds[0]
    if kind.name != ROWS or any(k != _SAME for k in kinds[1:]):
        return None
    axis = op.get_attr("axis") % op.outputs[0].shape.rank
    assert kind.axis is not None
    return _like(kind, kind.axis + (axis <= kind.axis))


def _of_arg(
    found: BatchDependence, op: tf.Operation, kinds: list[Kind]
) -> Kind | None:
    axes = _axes(op.inputs[0], op.inputs[1])
    kind = kinds[0]
    if kind.axis is None:
        return _COUPLED
    if axes is None or kind.axis in axes:
        return None
    return _like(kind, kind.axis - (axes[0] < kind.axis))


def _of_scan(
    found: BatchDependence, op: tf.Operation, kinds: list[Kind]
) -> Kind | None:
    axes = _axes(op.inputs[0], op.inputs[1])
    kind = kinds[0]
    if kind.axis is None:
        return _like(kind, None)
    return None if axes is None or kind.axis in axes else kind


def _of_padding(
    found: BatchDependence, op: tf.Operation, kinds: list[Kind]
) -> Kind | None:
    kind, amounts = kinds[0], _constant(op.inputs[1])
    if kind.axis is None:
        return _like(kind, None)
    if amounts is None or amounts[kind.axis].any():
        return None
    return kind


def _of_tile(
    found: BatchDependence, op: tf.Operation, kinds: list[Kind]
) -> Kind | None:
    kind, sizes = kinds[0], found.sizes(op.inputs[1])
    if sizes is None:
        return None
    counts = [i for i, size in enumerate(sizes) if size.name == COUNT]
    if kind.axis is None and len(counts) == 1:
        one = op.inputs[0].shape[counts[0]] == 1
        return Kind(ROWS, counts[0]) if kind == _SAME and one else None
    return None if counts else _like(kind, kind.axis)


def _of_broadcast(
    found: BatchDependence, op: tf.Operation, kinds: list[Kind]
) -> Kind | None:
    kind, sizes = kinds[0], found.sizes(op.inputs[1])
    rank = op.inputs[0].shape.rank
    if sizes is None or rank is None:
        return None
    counts = [i for i, size in enumerate(sizes) if size.name == COUNT]
    if kind.axis is not None:
        return _like(kind, kind.axis + len(sizes) - rank)
    if len(counts) > 1 or (counts and kind != _SAME):
        return None
    return Kind(ROWS, counts[0]) if counts else _like(kind, None)


def _of_l2_loss(
    found: BatchDependence, op: tf.Operation, kinds: list[Kind]
) -> Kind | None:
    return _contracted(kinds) if kinds[0].axis is not None else _COUPLED


def _of_segments(
    found: BatchDependence, op: tf.Operation, kinds: list[Kind]
) -> Kind | None:
    """A sum for each label of the samples."""
    data, labels, number = kinds
    if data.axis == 0 and labels == Kind(ROWS, 0) and number == _SAME:
        return _contracted([data])
    return None


_Rule = Callable[
    [BatchDependence, tf.Operation, list[Kind]], Kind | list[Kind] | None
]
_RULES: dict[str, _Rule] = {
    "ArgMax": _of_arg,
    "ArgMin": _of_arg,
    "BatchMatMul": _of_matmul,
    "BatchMatMulV2": _of_matmul,
    "BatchMatMulV3": _of_matmul,
    "BroadcastTo": _of_broadcast,
    "ConcatV2": _of_concat,
    "Cumprod": _of_scan,
    "Cumsum": _of_scan,
    "CumulativeLogsumexp": _of_scan,
    "Einsum": _of_einsum,
    "ExpandDims": _of_expand_dims,
    "Fill": _of_new_rows,
    "Gather": _of_gather,
    "GatherNd": _of_gather_nd,
    "GatherV2": _of_gather,
    "L2Loss": _of_l2_loss,
    "MatMul": _of_matmul,
    "MatrixDiagV3": _of_diagonal,
    "MatrixSetDiagV3": _of_diagonal,
    "MirrorPad": _of_padding,
    "OneHot": _of_one_hot,
    "Pack": _of_pack,
    "Pad": _of_padding,
    "PadV2": _of_padding,
    "ReverseV2": _of_scan,
    "Reshape": _of_reshape,
    "Range": _of_range,
    "ResourceGather": _of_lookup,
    "Shape": _of_shape,
    "Size": _of_shape,
    "Split": _of_split,
    "SplitV": _of_split,
    "Squeeze": _of_squeeze,
    "StridedSlice": _of_strided_slice,
    "Tile": _of_tile,
    "Transpose": _of_transpose,
    "Unpack": _of_unpack,
    "UnsortedSegmentSum": _of_segments,
}
