# SPDX-License-Identifier: Apache-2.0
"""Analysis of how a tensor of a step depends on the samples of the batch.

The analysis follows the ops of a graph from the data to a value. Each
supported op has a rule. The result of any other op that reads samples is
`UNKNOWN`, with the op as the cause. A value is never assumed to be a mean
because nothing is known about it.
"""

from __future__ import annotations

import re

import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.numbers.kinds import COUNT
from tfdist_ext.numbers.kinds import COUNT_KIND
from tfdist_ext.numbers.kinds import LINEAR
from tfdist_ext.numbers.kinds import LINEAR_REDUCTIONS
from tfdist_ext.numbers.kinds import MEAN
from tfdist_ext.numbers.kinds import MEAN_KIND
from tfdist_ext.numbers.kinds import NUMBERS
from tfdist_ext.numbers.kinds import ROWS
from tfdist_ext.numbers.kinds import SAME
from tfdist_ext.numbers.kinds import SAME_KIND
from tfdist_ext.numbers.kinds import SHARD
from tfdist_ext.numbers.kinds import SIZES
from tfdist_ext.numbers.kinds import STATE
from tfdist_ext.numbers.kinds import STATE_KIND
from tfdist_ext.numbers.kinds import STATIC_KIND
from tfdist_ext.numbers.kinds import SUM
from tfdist_ext.numbers.kinds import SUM_KIND
from tfdist_ext.numbers.kinds import UNKNOWN
from tfdist_ext.numbers.kinds import Kind
from tfdist_ext.numbers.kinds import as_rows
from tfdist_ext.numbers.kinds import by_row
from tfdist_ext.numbers.kinds import constant_of
from tfdist_ext.numbers.kinds import elementwise
from tfdist_ext.numbers.kinds import number_of
from tfdist_ext.numbers.kinds import of_addition
from tfdist_ext.numbers.kinds import of_cast
from tfdist_ext.numbers.kinds import of_largest_count
from tfdist_ext.numbers.kinds import of_product
from tfdist_ext.numbers.kinds import of_reduction
from tfdist_ext.numbers.layout_rules import RULES
from tfdist_ext.numbers.layout_rules import of_new_rows
from tfdist_ext.numbers.layout_rules import of_sizes

_MARKED = {
    SAME: SAME_KIND,
    MEAN: MEAN_KIND,
    SUM: SUM_KIND,
    ROWS: Kind(ROWS, 0),
    SHARD: Kind(SHARD),
}
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
QUOTIENTS = {"Div", "DivNoNan", "RealDiv", "Xdivy"}
_OTHER_REDUCTIONS = {
    "All", "Any", "EuclideanNorm", "Max", "Min", "Prod",
}  # fmt: skip
# Ops whose result is a static size if an input is one.
_OF_STATIC_SIZES = {
    "Cast", "Identity", "Maximum", "Mul", "Prod",
}  # fmt: skip
# Names that TensorFlow gives to sizes that it replaces by constants.
_SIZE_NAME = re.compile(r"(?:.*/)?(?:Shape|Size|shape)(?:_\d+)?")
# Ops whose result is a sum over the samples if an input is one.
_KEEP_SUMS = {
    *_PASS_ON, *_ADDITIONS, *_PRODUCTS, *QUOTIENTS, "Cast", "Reshape",
    "Squeeze",
}  # fmt: skip
_ROUNDING = 1e-6  # relative error of a reciprocal in float32
# Ops on shapes. A scalar element of a shape is not a shape.
_OF_SIZES = {"Cast", "ConcatV2", "Pack", "Prod"}
# Ops that compute each row from a row: over the last axis, or over all axes
# but the first.
_BY_ROW = {
    "AvgPool", "BiasAdd", "Conv2D", "Conv3D", "DepthwiseConv2dNative",
    "InTopK", "InTopKV2", "LogSoftmax", "MaxPool", "ResizeBilinear",
    "ResizeNearestNeighbor", "Softmax", "SoftmaxCrossEntropyWithLogits",
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
# Ops that may use indices of rows: as labels, or to take one element of each
# row.
_OF_NUMBERS = {
    "Cast", "ExpandDims", "GatherNd", "Identity", "Pack", "Reshape",
    "SparseSoftmaxCrossEntropyWithLogits", "StopGradient",
}  # fmt: skip
# Exchanges of sums or rows of all ranks, which are equal on all ranks.
_EXCHANGES = {"Tfdist>AllGather", "Tfdist>AllReduce"}


class BatchDependence:
    """Analyses how tensors of a step's graphs depend on the batch.

    Args:
        samples: samples of this rank's batch if the graph has a static batch
            size, else None.
    """

    def __init__(self, samples: int | None = None) -> None:
        self.samples = samples
        self._known: dict[tuple[int, str], list[Kind]] = {}
        # Whether rows of all ranks are gathered with this rank's rows first,
        # so that an index of a row is valid in them.
        self.own_rows_first = False
        # Types and source lines of ops that a warning has named already.
        self.warned: set[tuple[str, str]] = set()
        # Divisions by a constant equal to this rank's number of elements.
        self.by_constant: list[tf.Operation] = []

    def of(self, value: tf.Tensor) -> Kind:
        """The kind of a symbolic tensor."""
        marked = _marked(value)
        if marked is not None:
            return marked
        pending = [value.op]
        while pending:
            op = pending[-1]
            if self._is_known(op):
                pending.pop()
                continue
            before = [
                each.op
                for each in op.inputs
                if _marked(each) is None and not self._is_known(each.op)
            ]
            if before:
                pending += before
                continue
            pending.pop()
            self._known[_key(op)] = self._of_op(op)
        return self._known[_key(value.op)][value.value_index]

    def _is_known(self, op: tf.Operation) -> bool:
        # The gradient of a branch or a loop adds outputs to its op.
        return len(self._known.get(_key(op), ())) == len(op.outputs)

    def _of_op(self, op: tf.Operation) -> list[Kind]:
        kinds = [self._of_known(each) for each in op.inputs]
        if not op.outputs:
            return []
        source = self._of_source(op)
        if source is not None:
            return [source] * len(op.outputs)
        states = [k for k in kinds if k.name in (SHARD, STATE)]
        unknown = [k for k in kinds if k.name == UNKNOWN]
        if unknown or states:
            return [(unknown or states)[0]] * len(op.outputs)
        if op.type == "StridedSlice" and kinds[0] == STATIC_KIND:
            counted = COUNT_KIND in (self.slice_of_sizes(op) or ())
            return [STATIC_KIND if counted else SAME_KIND]
        same = all(kind in (SAME_KIND, STATIC_KIND) for kind in kinds)
        if same and op.type not in _RANDOM:
            size = STATIC_KIND in kinds and op.type in _OF_STATIC_SIZES
            return [STATIC_KIND if size else SAME_KIND] * len(op.outputs)
        kinds = [COUNT_KIND if kind == STATIC_KIND else kind for kind in kinds]
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
        """Kind of a value that an op reads from outside of the graph."""
        if op.type == "Const":
            return STATIC_KIND if self._is_static_size(op) else SAME_KIND
        if op.type in ("IteratorGetNext", "OptionalGetValue"):
            return Kind(ROWS, 0)
        if op.type == "ReadVariableOp":
            outer = internals.captured(op.inputs[0])
            return STATE_KIND if marks.is_per_rank(outer) else SAME_KIND
        if op.type != "Placeholder":
            return SAME_KIND if op.type in _EXCHANGES else None
        value = op.outputs[0]
        outer = internals.captured(value)
        if outer is not value:
            symbolic = tf.is_symbolic_tensor(outer)
            return self.of(outer) if symbolic else SAME_KIND
        return Kind(ROWS, 0) if self.may_be_batched(value) else SAME_KIND

    def _is_static_size(self, op: tf.Operation) -> bool:
        """Whether a constant is a size of a tensor with this rank's samples."""
        value = op.outputs[0]
        if not (self.samples and value.dtype.is_integer):
            return False
        if not _SIZE_NAME.fullmatch(op.name):
            return False
        constant = constant_of(value)
        if constant is None or not constant.size:
            return False
        first = int(constant.flat[0])
        return first > 0 and first % self.samples == 0

    def may_be_batched(self, value: tf.Tensor) -> bool:
        """Whether the first dimension can be that of this rank's samples."""
        if value.dtype in (tf.resource, tf.variant) or value.shape.rank == 0:
            return False
        if value.shape.rank is None or value.shape[0] is None:
            return True
        return bool(value.shape[0] == self.samples)

    def _by_rule(
        self, op: tf.Operation, kinds: list[Kind]
    ) -> Kind | list[Kind] | None:
        if any(k.name == NUMBERS for k in kinds):
            if self.own_rows_first:
                kinds = [as_rows(kind) for kind in kinds]
            elif op.type not in _OF_NUMBERS:
                return None
        if op.type in _PASS_ON:
            return kinds[: len(op.outputs)]
        if kinds[0].name == SIZES and op.type in _OF_SIZES:
            return of_sizes(self, op, kinds)
        if op.type == "Cast":
            return of_cast(op, kinds[0])
        if op.type in _ADDITIONS:
            return of_addition(op, kinds)
        if op.type in _PRODUCTS:
            self._note_factor(op, kinds)
            return of_product(op, kinds)
        if op.type in QUOTIENTS:
            return self._of_quotient(op, kinds)
        if op.type == "Maximum" and COUNT in (k.name for k in kinds):
            return of_largest_count(op, kinds)
        if op.type in _ELEMENTWISE:
            return elementwise(op, kinds)
        if op.type in LINEAR_REDUCTIONS or op.type in _OTHER_REDUCTIONS:
            return of_reduction(op, kinds)
        if op.type in _BY_ROW:
            return by_row(op, kinds)
        rule = RULES.get(op.type)
        if rule is None and op.type in _RANDOM:
            rule = of_new_rows
        return rule(self, op, kinds) if rule else None

    def _of_quotient(self, op: tf.Operation, kinds: list[Kind]) -> Kind | None:
        top, bottom = kinds
        if bottom.name == COUNT and top == SUM_KIND:
            return MEAN_KIND
        if bottom.name == COUNT and top.name == COUNT:
            return SAME_KIND
        divisor = number_of(op.inputs[1])
        summed = top == SUM_KIND and bottom == SAME_KIND
        if summed and self._is_own_size(op.inputs[0], divisor):
            self.by_constant.append(op)
            return MEAN_KIND
        if top.name in (LINEAR, COUNT) and bottom == SAME_KIND:
            return top
        if top.name == ROWS and bottom == SAME_KIND and self._is_samples(op):
            self.by_constant.append(op)
        return elementwise(op, kinds)

    def _is_samples(self, quotient: tf.Operation) -> bool:
        """Whether an op divides samples by a constant equal to their number."""
        divisor = number_of(quotient.inputs[1])
        if self.samples is None or divisor is None:
            return False
        size = quotient.inputs[0].shape.num_elements()
        return divisor in (size, self.samples) and size != 1

    def _note_factor(self, op: tf.Operation, kinds: list[Kind]) -> None:
        """Records a sum times a constant that may be one over its samples."""
        for total, factor in ((0, 1), (1, 0)):
            if kinds[total] != SUM_KIND or kinds[factor] != SAME_KIND:
                continue
            number = number_of(op.inputs[factor])
            if number is None or not 0 < abs(number) < 1:
                continue
            divisor = round(1 / abs(number))
            exact = abs(divisor * abs(number) - 1) < _ROUNDING
            if exact and self._is_own_size(op.inputs[total], divisor):
                self.by_constant.append(op)

    def _is_own_size(self, total: tf.Tensor, divisor: float | None) -> bool:
        """Whether a number equals a sum's elements or samples on this rank."""
        if self.samples is None or divisor is None:
            return False
        return divisor == self.samples or divisor in self._numbers_summed(total)

    def _numbers_summed(self, total: tf.Tensor) -> set[int | None]:
        """Numbers of elements of the sums that a value is computed from."""
        found, values = set(), [total]
        while values:
            op = values.pop().op
            if op.type == "Sum":
                found.add(op.inputs[0].shape.num_elements())
            elif op.type in _KEEP_SUMS:
                values += [x for x in op.inputs if self.of(x) == SUM_KIND]
        return found

    def sizes(self, vector: tf.Tensor) -> list[Kind] | None:
        """Kind of each element of a shape; None if it is not a shape."""
        constant = constant_of(vector)
        if constant is not None and constant.ndim == 1:
            first = self.of(vector) == STATIC_KIND
            counts = [i == 0 and first for i in range(constant.size)]
            return [COUNT_KIND if count else SAME_KIND for count in counts]
        op = vector.op
        if op.type == "Shape":
            source, kind = op.inputs[0], self.of(op.inputs[0])
            if source.shape.rank is None or kind.name == UNKNOWN:
                return None
            return [
                COUNT_KIND if i == kind.axis else SAME_KIND
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
            return self.slice_of_sizes(op)
        same = self.of(vector) == SAME_KIND and vector.shape.rank == 1
        known = same and vector.shape[0] is not None
        return [SAME_KIND] * vector.shape[0] if known else None

    def slice_of_sizes(self, op: tf.Operation) -> list[Kind] | None:
        """Kinds of the elements that a StridedSlice takes from a shape."""
        sizes = self.sizes(op.inputs[0])
        one = all(each.shape.num_elements() == 1 for each in op.inputs[1:4])
        bounds = [number_of(each) for each in op.inputs[1:4]] if one else []
        known = [int(each) for each in bounds if each is not None]
        if sizes is None or len(known) != 3:
            return None
        begin, end, stride = known
        if op.get_attr("shrink_axis_mask") & 1:
            return [sizes[begin]]
        first = None if op.get_attr("begin_mask") & 1 else begin
        last = None if op.get_attr("end_mask") & 1 else end
        return sizes[first:last:stride]


def _marked(value: tf.Tensor) -> Kind | None:
    if marks.is_reduced(value):
        return SAME_KIND
    marked = marks.dependence(value)
    return None if marked is None else _MARKED[marked]


def _key(op: tf.Operation) -> tuple[int, str]:
    return id(op.graph), op.name
