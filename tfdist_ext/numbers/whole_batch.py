# SPDX-License-Identifier: Apache-2.0
"""Converts values of a Keras step to the values that one process computes."""

from __future__ import annotations

import dataclasses
import functools
import operator
import warnings
from collections.abc import Sequence
from typing import TypeAlias

import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.comm import collectives as collectives_lib
from tfdist_ext.comm import exchanges
from tfdist_ext.comm.calls import Step
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.comm.exchanges import check_same
from tfdist_ext.numbers.dependence import QUOTIENTS
from tfdist_ext.numbers.dependence import BatchDependence
from tfdist_ext.numbers.kinds import COUNT
from tfdist_ext.numbers.kinds import COUPLED
from tfdist_ext.numbers.kinds import LINEAR
from tfdist_ext.numbers.kinds import MEAN
from tfdist_ext.numbers.kinds import ROWS
from tfdist_ext.numbers.kinds import SAME
from tfdist_ext.numbers.kinds import SIZES
from tfdist_ext.numbers.kinds import STATE
from tfdist_ext.numbers.kinds import SUM
from tfdist_ext.numbers.kinds import UNKNOWN
from tfdist_ext.numbers.kinds import Kind
from tfdist_ext.numbers.kinds import number_of
from tfdist_ext.numbers.whole_functions import Whole
from tfdist_ext.numbers.whole_functions import WholeValues
from tfdist_ext.op_origin import is_of_keras
from tfdist_ext.op_origin import line_of
from tfdist_ext.type_names import Layer
from tfdist_ext.type_names import WithGradient

Pairs = list[tuple[tf.Tensor, tf.Tensor | None]]


def keras_step() -> Step | None:
    """The step of a Keras loop on several ranks that is traced or run now.

    None also if every rank computes on the global batch.
    """
    current = keras_loop_step()
    if current is None or current.checking or current.whole:
        return None
    collectives = collectives_lib.active()
    if collectives is None or not collectives.corrects:
        return None
    return current


def keras_loop_step() -> Step | None:
    """The step of a Keras loop on several ranks, with any part of the batch."""
    collectives = collectives_lib.active()
    current = collectives.step if collectives else None
    return current if current is not None and current.weighted else None


def share_of_rank() -> tf.Tensor:
    """This rank's share of the step's samples, float32 in [0, 1]."""
    collectives = collectives_lib.active()
    assert collectives is not None and collectives.step is not None
    known = collectives.step.shares
    graph = _graph_of_shares()
    if graph not in known:
        relative = collectives.share_of_samples("batch")
        assert relative is not None
        known[graph] = relative / collectives.group.world_size
    return known[graph]


def store_share(value: tf.Tensor) -> None:
    """Stores the value of `share_of_rank` if an exchange has computed it."""
    step = keras_loop_step()
    assert step is not None
    step.shares.setdefault(_graph_of_shares(), value)


def _graph_of_shares() -> int:
    if tf.executing_eagerly():
        return 0
    return id(tf.compat.v1.get_default_graph())


def means_of(values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Means of scalars over the ranks, weighted by their samples.

    Args:
        values: scalars; the scalar of a rank without samples does not count.
    """
    collectives = collectives_lib.active()
    assert collectives is not None
    parts = [value / collectives.group.world_size for value in values]
    return collectives.all_reduce(parts, "batch/values", weighted=True)


def ratio_of_parts(value: tf.Tensor) -> tf.Tensor:
    """Share of this rank in a divisor, divided by its share of the samples.

    If each rank multiplies this by its sum divided by its own divisor, the
    weighted average over the ranks is the total sum divided by the total
    divisor.

    Args:
        value: float32 scalar, this rank's part of the divisor.
    """
    collectives = collectives_lib.active()
    assert collectives is not None
    own = samples()
    total, of_all = collectives.all_reduce([value, own], "batch/divisor")
    return tf.math.divide_no_nan(value * of_all, total * own)


def samples() -> tf.Tensor:
    """Number of this rank's samples in the step, a float32 scalar."""
    collectives = collectives_lib.active()
    assert collectives is not None
    return collectives.samples()


def dependence_in(step: Step) -> BatchDependence:
    """Analysis of how tensors of a step depend on its batch."""
    if step.dependence is None:
        samples = tf.get_static_value(step.samples)
        step.dependence = BatchDependence(samples and int(samples))
    dependence: BatchDependence = step.dependence
    return dependence


def kind_of(step: Step, value: tf.Tensor) -> Kind:
    """How a tensor depends on the batch.

    Eager scalars have no graph to analyse; they count as means.
    """
    if tf.is_symbolic_tensor(value):
        return dependence_in(step).of(value)
    if marks.is_reduced(value):
        return Kind(SAME)
    if value.shape.rank:
        return Kind(ROWS, 0)
    return Kind(LINEAR, parts=frozenset([MEAN]))


def averageable(value: tf.Tensor, what: str = "A value") -> tf.Tensor:
    """A scalar whose weighted mean over the ranks is one process's value.

    Args:
        value: floating-point scalar of the step.
        what: name of the value in warnings.
    """
    value = tf.convert_to_tensor(value)  # It may be a variable of Keras.
    step = keras_step()
    if step is None:
        return value
    kind = kind_of(step, value)
    if kind.name == COUNT or (kind.name == LINEAR and kind.parts == {SUM}):
        return total_of(value)
    if kind.name in (LINEAR, SAME, STATE) and SUM not in kind.parts:
        return value
    if kind.name in (LINEAR, COUPLED) and kind.axis is None:
        whole = _whole(step, value)
        if whole is not None:
            marks.set_reduced(whole.value)
            return whole.value
        kind = Kind(UNKNOWN, cause=value.op)
    _warn(what, value, kind)
    return value


def targets_of(
    step: Step, target: tf.Tensor, weight: tf.Tensor | None
) -> Pairs:
    """Targets to differentiate for a gradient that the ranks can average.

    Args:
        step: step of a Keras loop.
        target: tensor that is to be differentiated, summed over its elements.
        weight: gradient by the target; None for 1.

    Returns:
        Tensors, and the gradients by them.
    """
    if weight is not None:
        weight = _whole_weight(step, weight)
    kind = kind_of(step, target)
    summed = kind.name in (ROWS, COUNT) or kind.parts == {SUM}
    if summed:
        weight = tf.ones_like(target) if weight is None else weight
        return [(target, total_of(weight))]
    if kind.name in (LINEAR, SAME, STATE) and SUM not in kind.parts:
        return [(target, weight)]
    if kind.name in (LINEAR, COUPLED) and not internals.is_recording():
        whole = _whole(step, target)
        if whole is not None:
            found = whole.gradients(weight, share_of_rank())
            pairs = zip(whole.leaves, found, strict=True)
            return [(leaf, grad) for leaf, grad in pairs if grad is not None]
    if kind.name in (LINEAR, COUPLED):
        kind = Kind(UNKNOWN, cause=target.op)
    _warn("The gradient of a loss", target, kind)
    return [(target, weight)]


def _whole_weight(step: Step, weight: tf.Tensor) -> tf.Tensor:
    """Output gradient of a tape as one process passes it."""
    kind = kind_of(step, weight)
    eager = not tf.is_symbolic_tensor(weight)
    if eager or kind.name in (ROWS, SAME, STATE):
        return weight
    if kind.name in (COUNT, COUPLED, LINEAR):
        whole = _whole(step, weight)
        if whole is not None:
            return whole.value
    _warn("A gradient given to a tape", weight, kind)
    return weight


def _whole(step: Step, value: tf.Tensor) -> Whole | None:
    collectives = collectives_lib.active()
    assert collectives is not None
    if step.whole_values is None:
        step.whole_values = WholeValues(dependence_in(step))
    makes: WholeValues = step.whole_values
    return makes.of(value, share_of_rank(), collectives)


def total_of(value: tf.Tensor) -> tf.Tensor:
    """Scales a sum over this rank's samples, to be averaged over the ranks.

    The weighted average of the results is the sum over all samples.
    """
    value = tf.math.divide_no_nan(value, tf.cast(share_of_rank(), value.dtype))
    if tf.is_symbolic_tensor(value):
        marks.set_dependence(value, MEAN)
    return value


def warn_of_constants(step: Step) -> None:
    """Warns of constants that may be this rank's samples, or one over them."""
    for op in dependence_in(step).by_constant:
        kind = kind_of(step, op.outputs[0])
        if kind.name == LINEAR and is_of_keras(op):
            continue  # An activity regularizer divides by the batch size.
        numbers = [each for each in map(number_of, op.inputs) if each]
        divides = op.type in QUOTIENTS
        number = f"{numbers[-1]:g}" if numbers else "a constant"
        what = (
            f"divides by {number}, which is"
            if divides
            else f"multiplies by {number}, which is one over"
        )
        mean = divides and kind.name == LINEAR
        taken = "this number, not a constant" if mean else "a constant"
        _warn_once(
            op,
            f"Op '{op.name}' ({line_of(op)}) {what} the number of this rank's "
            f"samples or elements. It is treated as {taken}. {_REMEDY}",
        )


def warn_of_layer(layer: Layer, value: tf.Tensor) -> None:
    """Warns of a layer of the user that combines samples of its rank."""
    if type(layer).__module__.split(".")[0] in _KNOWN_LAYERS:
        return
    _warn_once(
        value.op,
        f"Layer '{layer.name}' ({type(layer).__name__}, {line_of(value.op)}) "
        "combines the samples of a batch. Each rank computes the forward pass "
        "of its own samples, so the result may differ from one process. "
        "Combine the samples of all ranks with tfdist_ext.losses.batch_mean, "
        "batch_sum or gather_batch.",
    )


def warn_of_shard(value: tf.Tensor) -> None:
    """Warns of an op that computes a gradient from a shard's gradient."""
    _warn_once(
        value.op,
        f"Op '{value.op.name}' ({line_of(value.op)}) computes a gradient from "
        "the gradient of a partitioned table, of which each rank has its "
        "shard, so the result may differ from one process. Use "
        "tf.linalg.global_norm, tf.clip_by_global_norm or tf.clip_by_norm on "
        "the gradients, which count all shards, or `clipnorm`, "
        "`global_clipnorm` or `clipvalue` of an optimizer of "
        "tfdist_ext.optimizers.",
    )


_KNOWN_LAYERS = ("keras", "keras_rs", "tf_keras", "tfdist_ext")
_REMEDY = (
    "Compute it by tf.reduce_mean, or by tfdist_ext.losses.batch_mean, "
    "batch_sum or gather_batch, which are exact over the whole batch."
)


def _warn(what: str, value: tf.Tensor, kind: Kind) -> None:
    """Warns once for each op whose result is not known to be a sum or mean."""
    op = kind.cause
    if op is None:
        op = value.op
    reason = "has no rule for sums over a batch that is split over ranks"
    if kind.name in (ROWS, SIZES) or kind.axis is not None:
        reason = (
            "returns a value for each sample, and each rank has those of its "
            "samples only"
        )
    elif kind.cause is value.op:
        reason = "is not known to be a sum or a mean over the samples"
    _warn_once(
        op,
        f"{what} ('{value.name}') is averaged over the ranks, which may "
        f"differ from one process: op '{op.name}' ({op.type}, {line_of(op)}) "
        f"{reason}. {_REMEDY}",
    )


def _warn_once(op: tf.Operation, text: str) -> None:
    step = keras_step()
    assert step is not None
    known = dependence_in(step).warned
    key = op.type, line_of(op)
    if key not in known:
        known.add(key)
        warnings.warn(text, stacklevel=2)


Rows: TypeAlias = tf.Tensor | tf.RaggedTensor


@dataclasses.dataclass(frozen=True)
class Gathered:
    """Rows of all ranks, in the order of the batch.

    Attributes:
        own: this rank's rows.
        rows: the rows of all ranks.
        sizes: int64 `[world_size]`, number of rows of each rank.
        rank: rank of this process.
    """

    own: Rows
    rows: Rows
    sizes: tf.Tensor
    rank: int

    def first(self) -> tf.Tensor:
        """Index of the first row of this rank, an int64 scalar."""
        return tf.reduce_sum(self.sizes[: self.rank])

    def share(self) -> tf.Tensor:
        """This rank's share of the rows, float32 in [0, 1]."""
        sizes = tf.cast(self.sizes, tf.float32)
        return tf.math.divide_no_nan(sizes[self.rank], tf.reduce_sum(sizes))


def gather(
    collectives: Collectives, tensors: Sequence[Rows], label: str
) -> list[Gathered]:
    """Gathers rows of several tensors, if possible in one exchange.

    Args:
        collectives: collectives of the strategy; all ranks must call this.
        tensors: dense `[n, ...]` with the same n, or ragged, of any dtype
            that `exchanges.can_gather`; n may differ between the ranks.
        label: names the exchange in errors and statistics.

    Returns:
        The gathered rows of each tensor, in order.
    """
    check_same(collectives, [f"{label} of {_kinds(tensors)}"])
    packed = [i for i, x in enumerate(tensors) if _is_packed(x)]
    found: dict[int, tuple[Rows, tf.Tensor]] = {}
    if packed:
        rows, sizes = _gather_packed(
            collectives, [tensors[i] for i in packed], label
        )
        found = {i: (each, sizes) for i, each in zip(packed, rows, strict=True)}
    for i, x in enumerate(tensors):
        if i not in found:
            found[i] = exchanges.all_gather_rows(collectives, x, label)
    rank = collectives.group.rank
    return [Gathered(x, *found[i], rank) for i, x in enumerate(tensors)]


def _kinds(tensors: Sequence[Rows]) -> str:
    return ", ".join(
        f"{x.dtype.name} [n{''.join(f', {d}' for d in x.shape[1:])}]"
        for x in tensors
    )


def _is_packed(x: Rows) -> bool:
    return isinstance(x, tf.Tensor) and x.dtype != tf.string


def _gather_packed(
    collectives: Collectives, tensors: Sequence[tf.Tensor], label: str
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Gathers dense tensors in one exchange, as the bytes of their rows."""
    if len(tensors) == 1:
        rows, sizes = exchanges.all_gather(collectives, tensors[0], label)
        return [rows], sizes
    parts = [_bytes_of(x) for x in tensors]
    packed, sizes = collectives.all_gather_parts(tf.concat(parts, 1), label)
    lengths = [_row_bytes(x) for x in tensors]
    parts = tf.split(packed, tf.stack(lengths), axis=1, num=len(tensors))
    rows = [
        _from_bytes(part, x) for part, x in zip(parts, tensors, strict=True)
    ]
    return rows, sizes


def _row_elements(x: tf.Tensor) -> int | tf.Tensor:
    """Number of elements of a row; an int if it is static."""
    if x.shape.rank is not None and None not in x.shape[1:]:
        return functools.reduce(operator.mul, x.shape[1:], 1)
    return tf.reduce_prod(tf.shape(x)[1:])


def _row_bytes(x: tf.Tensor) -> int | tf.Tensor:
    return _row_elements(x) * x.dtype.size


def _bytes_of(x: tf.Tensor) -> tf.Tensor:
    """Bytes of a tensor's rows, uint8 `[n, bytes of a row]`."""
    narrow = x.dtype == tf.bool or x.dtype.size == 1
    codes = tf.cast(x, tf.uint8) if narrow else tf.bitcast(x, tf.uint8)
    return tf.reshape(codes, [tf.shape(x)[0], _row_bytes(x)])


def _from_bytes(codes: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """Inverse of `_bytes_of` for a tensor like `like`."""
    shape = tf.concat([tf.shape(codes)[:1], tf.shape(like)[1:]], 0)
    if like.dtype == tf.bool or like.dtype.size == 1:
        rows = tf.cast(tf.reshape(codes, shape), like.dtype)
    else:
        shape = tf.concat([shape, [like.dtype.size]], 0)
        rows = tf.bitcast(tf.reshape(codes, shape), like.dtype)
    rows.set_shape([None, *like.shape[1:]])
    return rows


def static_row_bytes(x: Rows) -> int:
    """Bytes of a row; 0 if they are unknown before a step runs."""
    if not _is_packed(x) or None in x.shape[1:]:
        return 0
    return int(_row_bytes(x))


def connected(found: Gathered, exchanged: bool = False) -> Rows:
    """The gathered rows, with gradients to this rank's own rows.

    Rows are gathered once, but each use is connected separately, so that
    every recording tape records it.

    Args:
        found: gathered rows; only floating-point rows have a gradient.
        exchanged: whether the ranks compute different values from the rows.
            Their gradients are then summed in an exchange. Otherwise the
            gradients are equal.
    """
    own, rows = found.own, found.rows
    if not own.dtype.is_floating:
        return rows
    if not isinstance(rows, tf.RaggedTensor):
        return _connected(own, rows, found.first(), exchanged)
    first = tf.cast(found.first(), rows.row_splits.dtype)
    for splits in rows.nested_row_splits:
        first = splits[first]
    values = _connected(own.flat_values, rows.flat_values, first, exchanged)
    return rows.with_flat_values(values)


def _connected(
    own: tf.Tensor, rows: tf.Tensor, first: tf.Tensor, exchanged: bool
) -> tf.Tensor:
    # Ranks average gradients, weighted by their shares, in Keras's loops.
    # Elsewhere they sum gradients.
    share = share_of_rank() if keras_step() else None
    start = tf.cast(first, tf.int64)

    @tf.custom_gradient
    def whole(own: tf.Tensor, rows: tf.Tensor) -> WithGradient:
        def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, None]:
            upstream = tf.convert_to_tensor(upstream)
            if exchanged:
                upstream = _sum_of_all(upstream, share)
            part = upstream[start : start + tf.shape(own, tf.int64)[0]]
            part = tf.ensure_shape(part, own.shape)
            if share is not None:
                part = tf.math.divide_no_nan(part, tf.cast(share, part.dtype))
            return part, None

        return tf.identity(rows), gradient

    return whole(own, tf.stop_gradient(rows))


def _sum_of_all(upstream: tf.Tensor, share: tf.Tensor | None) -> tf.Tensor:
    """Gradient by the rows, summed over the ranks."""
    collectives = collectives_lib.active()
    assert collectives is not None
    if share is not None:
        # A rank without samples contributes zero, even for a NaN.
        share = tf.cast(share, upstream.dtype)
        upstream = tf.math.multiply_no_nan(upstream, share)
    return collectives.all_reduce([upstream], "losses/gradients")[0]
