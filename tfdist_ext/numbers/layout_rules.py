# SPDX-License-Identifier: Apache-2.0
"""Rules of ops that move, select or repeat elements, and the table of rules."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.numbers.kinds import COUNT
from tfdist_ext.numbers.kinds import COUNT_KIND
from tfdist_ext.numbers.kinds import COUPLED
from tfdist_ext.numbers.kinds import COUPLED_KIND
from tfdist_ext.numbers.kinds import LINEAR
from tfdist_ext.numbers.kinds import NUMBERS
from tfdist_ext.numbers.kinds import ROWS
from tfdist_ext.numbers.kinds import SAME
from tfdist_ext.numbers.kinds import SAME_KIND
from tfdist_ext.numbers.kinds import SIZES
from tfdist_ext.numbers.kinds import Kind
from tfdist_ext.numbers.kinds import Sizes
from tfdist_ext.numbers.kinds import axes_of
from tfdist_ext.numbers.kinds import constant_of
from tfdist_ext.numbers.kinds import contracted
from tfdist_ext.numbers.kinds import like
from tfdist_ext.numbers.kinds import of_einsum
from tfdist_ext.numbers.kinds import of_matmul
from tfdist_ext.numbers.kinds import parts_of


def _of_transpose(
    found: Sizes, op: tf.Operation, kinds: list[Kind]
) -> Kind | None:
    order = constant_of(op.inputs[1])
    if kinds[0].axis is None:
        return like(kinds[0], None)
    if order is None:
        return None
    return like(kinds[0], [int(a) for a in order].index(kinds[0].axis))


def _of_reshape(
    found: Sizes, op: tf.Operation, kinds: list[Kind]
) -> Kind | None:
    """Finds the batch axis of the new shape; None if it mixes samples."""
    kind, before, after = kinds[0], op.inputs[0].shape, op.outputs[0].shape
    if kind.axis is None:
        return like(kind, None)
    if before.rank is None or after.rank is None:
        return None
    axis = kind.axis
    if axis == 0 and before[0] != 1:  # For example [n, 3] to [1, n * 3].
        while axis < after.rank - 1 and after[axis] == 1:
            axis += 1
    elif before[:axis].as_list() != after[:axis].as_list():
        return None
    if axis >= after.rank or not after[:axis].is_fully_defined():
        return None
    size, samples = after[axis], found.samples
    if size is not None:  # Each sample has the same number of rows.
        return like(kind, axis) if samples and size % samples == 0 else None
    sizes = found.sizes(op.inputs[1])
    if sizes is not None and sizes[axis].name == COUNT:
        return like(kind, axis)  # This size is the number of samples.
    inner, outer = before[kind.axis + 1 :], after[axis + 1 :]
    fits = not (inner.is_fully_defined() and outer.is_fully_defined())
    if not fits:
        fits = inner.num_elements() % max(1, outer.num_elements()) == 0
    return like(kind, axis) if fits else None


def _of_expand_dims(
    found: Sizes, op: tf.Operation, kinds: list[Kind]
) -> Kind | None:
    kind, rank = kinds[0], op.outputs[0].shape.rank
    axis = constant_of(op.inputs[1])
    if kind.axis is None:
        return like(kind, None)
    if axis is None or rank is None:
        return None
    return like(kind, kind.axis + (int(axis) % rank <= kind.axis))


def _of_squeeze(
    found: Sizes, op: tf.Operation, kinds: list[Kind]
) -> Kind | None:
    kind, shape = kinds[0], op.inputs[0].shape
    if kind.axis is None:
        return like(kind, None)
    if shape.rank is None:
        return None
    axes = [int(axis) % shape.rank for axis in op.get_attr("squeeze_dims")]
    axes = axes or [i for i in range(shape.rank) if shape[i] == 1]
    if kind.axis in axes:
        return None
    return like(kind, kind.axis - sum(axis < kind.axis for axis in axes))


def _of_concat(
    found: Sizes, op: tf.Operation, kinds: list[Kind]
) -> Kind | None:
    axis = constant_of(op.inputs[-1])
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
        parts = [parts_of(kind) for kind in kinds]
        if all(parts):
            return Kind(LINEAR, parts=frozenset().union(*parts))
        return COUPLED_KIND
    coupled = any(kind.name not in (SAME, ROWS) for kind in kinds)
    with_axis = axes - {None}
    if len(with_axis) > 1:
        return None
    (axis,) = with_axis
    if None in axes:
        # A constant that is concatenated to the samples, such as padding.
        one = all(
            value.shape[axis] == 1
            for kind, value in zip(kinds, values, strict=True)
            if kind.axis is None
        )
        if along == axis or not one:
            return None
    return Kind(COUPLED if coupled else ROWS, axis)


def _of_pack(found: Sizes, op: tf.Operation, kinds: list[Kind]) -> Kind | None:
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
    found: Sizes, op: tf.Operation, kinds: list[Kind]
) -> Kind | None:
    rank, kind = op.inputs[0].shape.rank, kinds[0]
    if kind.axis is None:
        return like(kind, None)
    along = op.get_attr("axis") % rank
    if along == kind.axis:
        return None
    return like(kind, kind.axis - (along < kind.axis))


def _of_split(found: Sizes, op: tf.Operation, kinds: list[Kind]) -> Kind | None:
    place = 0 if op.type == "Split" else 2
    value = op.inputs[1 if op.type == "Split" else 0]
    kind = kinds[1 if op.type == "Split" else 0]
    if kind.axis is None:
        return like(kind, None)
    axis = constant_of(op.inputs[place])
    if axis is None or value.shape.rank is None:
        return None
    return None if int(axis) % value.shape.rank == kind.axis else kind


def _of_strided_slice(
    found: Sizes, op: tf.Operation, kinds: list[Kind]
) -> Kind | None:
    kind = kinds[0]
    if kind.name == SIZES:
        sizes = found.slice_of_sizes(op)
        if sizes is None or op.outputs[0].shape.rank == 0:
            return sizes[0] if sizes else None
        return Kind(SIZES)
    if kind.axis is None:
        return like(kind, None)
    return _kept_by_slice(op, kind)


def _kept_by_slice(op: tf.Operation, kind: Kind) -> Kind | None:
    """Kind of a slice such as `x[:, 3]`; None if it cuts the batch axis."""
    names = ("begin", "end", "ellipsis", "new axis", "shrink axis")
    bits = {n: op.get_attr(f"{n} mask".replace(" ", "_")) for n in names}
    batch = kind.axis
    assert batch is not None
    strides = constant_of(op.inputs[3])
    rank = op.inputs[0].shape.rank
    if strides is None or rank is None:
        return None
    given = len(strides)
    new_axes = bin(bits["new axis"]).count("1")
    axis = place = 0  # Axis of the input and of the output.
    for i in range(given):
        bit = 1 << i
        if bits["ellipsis"] & bit:
            skipped = rank - (given - new_axes - 1)
            if axis <= batch < axis + skipped:
                return like(kind, place + batch - axis)
            axis, place = axis + skipped, place + skipped
        elif bits["new axis"] & bit:
            place += 1
        else:
            if axis == batch:
                whole = bits["begin"] & bits["end"] & bit
                one = int(strides[i]) == 1 and not bits["shrink axis"] & bit
                return like(kind, place) if whole and one else None
            axis += 1
            place += not bits["shrink axis"] & bit
    return like(kind, place + batch - axis)


def _of_slice(found: Sizes, op: tf.Operation, kinds: list[Kind]) -> Kind | None:
    """Passes on the kind if the slice contains the entire batch axis."""
    kind, begin = kinds[0], constant_of(op.inputs[1])
    if kind.axis is None:
        return like(kind, None)
    if begin is None or begin[kind.axis] != 0:
        return None
    size = constant_of(op.inputs[2])
    if size is not None and size[kind.axis] == -1:
        return kind
    sizes = found.sizes(op.inputs[2])
    return kind if sizes and sizes[kind.axis].name == COUNT else None


def _of_shape(found: Sizes, op: tf.Operation, kinds: list[Kind]) -> Kind | None:
    """A vector of sizes; `Sizes.sizes` returns the kind of each element."""
    kind = kinds[0]
    if op.type == "Size":
        return COUNT_KIND if kind.axis is not None else SAME_KIND
    return SAME_KIND if kind.axis is None else Kind(SIZES)


def of_sizes(found: Sizes, op: tf.Operation, kinds: list[Kind]) -> Kind | None:
    """A shape made of sizes, or the product of its elements."""
    if op.type != "Prod":
        return Kind(SIZES) if found.sizes(op.outputs[0]) is not None else None
    sizes = found.sizes(op.inputs[0])
    if sizes is None or any(k.name not in (SAME, COUNT) for k in sizes):
        return None
    counts = sum(kind.name == COUNT for kind in sizes)
    return {0: SAME_KIND, 1: COUNT_KIND}.get(counts, COUPLED_KIND)


def of_new_rows(
    found: Sizes, op: tf.Operation, kinds: list[Kind]
) -> Kind | None:
    """Random numbers, or equal ones, for each sample."""
    sizes = found.sizes(op.inputs[0])
    if sizes is None:
        return None
    counts = [i for i, kind in enumerate(sizes) if kind.name == COUNT]
    if any(kind.name not in (SAME, COUNT) for kind in sizes):
        return None
    if op.type == "Fill" and kinds[1] != SAME_KIND:
        return None if counts else like(kinds[1], None)
    if len(counts) > 1:
        return None
    return Kind(ROWS, counts[0]) if counts else SAME_KIND


def _of_gather(
    found: Sizes, op: tf.Operation, kinds: list[Kind]
) -> Kind | None:
    params, indices, *_ = kinds
    along = constant_of(op.inputs[2]) if len(op.inputs) > 2 else np.asarray(0)
    rank = op.inputs[0].shape.rank
    if along is None or rank is None:
        return None
    axis = int(along) % rank
    batch_dims = 0 if op.type == "Gather" else op.get_attr("batch_dims")
    if params == SAME_KIND and indices.name == ROWS and not batch_dims:
        assert indices.axis is not None
        return Kind(ROWS, axis + indices.axis)
    if params.axis is None and indices == SAME_KIND:
        return like(params, None)
    if params.axis is None or params.axis == axis:
        return None
    if indices == SAME_KIND and not batch_dims:
        more = (op.inputs[1].shape.rank or 0) - 1
        return like(params, params.axis + (more if params.axis > axis else 0))
    if indices.axis == params.axis and params.axis < batch_dims:
        return like(params, params.axis) if indices.name == ROWS else None
    return None


def _of_lookup(
    found: Sizes, op: tf.Operation, kinds: list[Kind]
) -> Kind | None:
    """Rows of a variable."""
    outer = internals.captured(op.inputs[0])
    if kinds[0] != SAME_KIND or marks.is_per_rank(outer):
        return None
    return like(kinds[1], kinds[1].axis) if kinds[1].name == ROWS else None


def _of_gather_nd(
    found: Sizes, op: tf.Operation, kinds: list[Kind]
) -> Kind | None:
    """Elements of a constant, or one element of each row by its index."""
    params, indices = kinds
    if params == SAME_KIND and indices == Kind(ROWS, 0):
        return indices
    made_by = op.inputs[1].op
    if params != Kind(ROWS, 0) or made_by.type != "Pack":
        return None
    last = made_by.get_attr("axis") in (-1, op.inputs[1].shape.rank - 1)
    first = found.of(made_by.inputs[0])
    return params if last and first == Kind(NUMBERS, 0) else None


def _of_range(found: Sizes, op: tf.Operation, kinds: list[Kind]) -> Kind | None:
    start, step = constant_of(op.inputs[0]), constant_of(op.inputs[2])
    counts = kinds[1].name == COUNT and start is not None and step is not None
    return Kind(NUMBERS, 0) if counts and start == 0 and step == 1 else None


def _of_diagonal(
    found: Sizes, op: tf.Operation, kinds: list[Kind]
) -> Kind | None:
    """`tf.eye` of the number of samples: a one-hot row for each sample."""
    ones = op.inputs[0 if op.type == "MatrixDiagV3" else 1]
    rows = all(k in (SAME_KIND, Kind(ROWS, 0)) for k in kinds)
    return Kind(NUMBERS, 0) if rows and ones.shape.rank == 1 else None


def _of_one_hot(
    found: Sizes, op: tf.Operation, kinds: list[Kind]
) -> Kind | None:
    kind = kinds[0]
    if kind.name != ROWS or any(k != SAME_KIND for k in kinds[1:]):
        return None
    axis = op.get_attr("axis") % op.outputs[0].shape.rank
    assert kind.axis is not None
    return like(kind, kind.axis + (axis <= kind.axis))


def _of_arg(found: Sizes, op: tf.Operation, kinds: list[Kind]) -> Kind | None:
    axes = axes_of(op.inputs[0], op.inputs[1])
    kind = kinds[0]
    if kind.axis is None:
        return COUPLED_KIND
    if axes is None or kind.axis in axes:
        return None
    return like(kind, kind.axis - (axes[0] < kind.axis))


def _of_scan(found: Sizes, op: tf.Operation, kinds: list[Kind]) -> Kind | None:
    axes = axes_of(op.inputs[0], op.inputs[1])
    kind = kinds[0]
    if kind.axis is None:
        return like(kind, None)
    return None if axes is None or kind.axis in axes else kind


def _of_padding(
    found: Sizes, op: tf.Operation, kinds: list[Kind]
) -> Kind | None:
    kind, amounts = kinds[0], constant_of(op.inputs[1])
    if kind.axis is None:
        return like(kind, None)
    if amounts is None or amounts[kind.axis].any():
        return None
    return kind


def _of_tile(found: Sizes, op: tf.Operation, kinds: list[Kind]) -> Kind | None:
    kind, sizes = kinds[0], found.sizes(op.inputs[1])
    if sizes is None:
        return None
    counts = [i for i, size in enumerate(sizes) if size.name == COUNT]
    if kind.axis is None and len(counts) == 1:
        one = op.inputs[0].shape[counts[0]] == 1
        return Kind(ROWS, counts[0]) if kind == SAME_KIND and one else None
    return None if counts else like(kind, kind.axis)


def _of_broadcast(
    found: Sizes, op: tf.Operation, kinds: list[Kind]
) -> Kind | None:
    kind, sizes = kinds[0], found.sizes(op.inputs[1])
    rank = op.inputs[0].shape.rank
    if sizes is None or rank is None:
        return None
    counts = [i for i, size in enumerate(sizes) if size.name == COUNT]
    if kind.axis is not None:
        return like(kind, kind.axis + len(sizes) - rank)
    if len(counts) > 1 or (counts and kind != SAME_KIND):
        return None
    return Kind(ROWS, counts[0]) if counts else like(kind, None)


def _of_l2_loss(
    found: Sizes, op: tf.Operation, kinds: list[Kind]
) -> Kind | None:
    return contracted(kinds) if kinds[0].axis is not None else COUPLED_KIND


def _of_segments(
    found: Sizes, op: tf.Operation, kinds: list[Kind]
) -> Kind | None:
    """A sum over the samples of each label."""
    data, labels, number = kinds
    if data.axis == 0 and labels == Kind(ROWS, 0) and number == SAME_KIND:
        return contracted([data])
    return None


Rule = Callable[[Sizes, tf.Operation, list[Kind]], Kind | list[Kind] | None]
RULES: dict[str, Rule] = {
    "ArgMax": _of_arg,
    "ArgMin": _of_arg,
    "BatchMatMul": of_matmul,
    "BatchMatMulV2": of_matmul,
    "BatchMatMulV3": of_matmul,
    "BroadcastTo": _of_broadcast,
    "ConcatV2": _of_concat,
    "Cumprod": _of_scan,
    "Cumsum": _of_scan,
    "CumulativeLogsumexp": _of_scan,
    "Einsum": of_einsum,
    "ExpandDims": _of_expand_dims,
    "Fill": of_new_rows,
    "Gather": _of_gather,
    "GatherNd": _of_gather_nd,
    "GatherV2": _of_gather,
    "L2Loss": _of_l2_loss,
    "MatMul": of_matmul,
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
    "Slice": _of_slice,
    "Split": _of_split,
    "SplitV": _of_split,
    "Squeeze": _of_squeeze,
    "StridedSlice": _of_strided_slice,
    "Tile": _of_tile,
    "Transpose": _of_transpose,
    "Unpack": _of_unpack,
    "UnsortedSegmentSum": _of_segments,
}
