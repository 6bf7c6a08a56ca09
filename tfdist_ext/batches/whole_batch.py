# SPDX-License-Identifier: Apache-2.0
"""Gives values of a Keras step the value that one process computes.

In Keras's loops a step is written as for one process, and ranks are averaged:
a gradient or a logged value is the mean of what the ranks have, weighted by
their samples. A mean over the samples is right as it is. A sum is divided by
this rank's share of the samples first. Any other function of sums and means is
computed from those of all ranks (`whole_value`). What cannot be told is
averaged, and a warning names the op.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.batches.dependence import QUOTIENTS
from tfdist_ext.batches.dependence import BatchDependence
from tfdist_ext.batches.kinds import COUNT
from tfdist_ext.batches.kinds import COUPLED
from tfdist_ext.batches.kinds import LINEAR
from tfdist_ext.batches.kinds import MEAN
from tfdist_ext.batches.kinds import ROWS
from tfdist_ext.batches.kinds import SAME
from tfdist_ext.batches.kinds import SIZES
from tfdist_ext.batches.kinds import STATE
from tfdist_ext.batches.kinds import SUM
from tfdist_ext.batches.kinds import UNKNOWN
from tfdist_ext.batches.kinds import Kind
from tfdist_ext.batches.kinds import number_of
from tfdist_ext.batches.source_lines import is_of_keras
from tfdist_ext.batches.source_lines import line_of
from tfdist_ext.batches.whole_functions import Whole
from tfdist_ext.batches.whole_functions import WholeValues
from tfdist_ext.collectives import collectives as collectives_lib
from tfdist_ext.collectives.step import Step

Pairs = list[tuple[tf.Tensor, Any]]


def keras_step() -> Step | None:
    """The step of a Keras loop at several ranks that is traced or run now.

    None also where every rank computes on the whole batch.
    """
    current = keras_loop_step()
    if current is None or current.checking or current.whole:
        return None
    collectives = collectives_lib.active()
    if collectives is None or not collectives.corrects:
        return None
    return current


def keras_loop_step() -> Step | None:
    """The step of a Keras loop at several ranks, whatever it computes on."""
    collectives = collectives_lib.active()
    current = collectives.step if collectives else None
    return current if current is not None and current.weighted else None


def share() -> tf.Tensor:
    """This rank's part of the step's samples, float32 in [0, 1]."""
    collectives = collectives_lib.active()
    assert collectives is not None and collectives.step is not None
    known = collectives.step.shares
    graph = _graph_of_shares()
    if graph not in known:
        relative = collectives.share_of_samples("batch")
        assert relative is not None
        known[graph] = relative / collectives.group.world_size
    return known[graph]


def know_share(value: tf.Tensor) -> None:
    """Says what `share` is where an exchange has told it."""
    step = keras_loop_step()
    assert step is not None
    step.shares.setdefault(_graph_of_shares(), value)


def _graph_of_shares() -> int:
    if tf.executing_eagerly():
        return 0
    return id(tf.compat.v1.get_default_graph())


def means_of(values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The ranks' means of numbers, weighted by their samples.

    Args:
        values: scalars; one of a rank without samples does not count.
    """
    collectives = collectives_lib.active()
    assert collectives is not None
    parts = [value / collectives.group.world_size for value in values]
    return collectives.all_reduce(parts, "batch/values", weighted=True)


def ratio_of_parts(value: tf.Tensor) -> tf.Tensor:
    """This rank's part of a divisor of all ranks, by its part of the samples.

    A sum that is divided by this rank's divisor, times this: the ranks'
    average of that is divided by the divisor of all.

    Args:
        value: float32 scalar, this rank's part of a sum.
    """
    collectives = collectives_lib.active()
    assert collectives is not None
    own = samples()
    total, of_all = collectives.all_reduce([value, own], "batch/divisor")
    return tf.math.divide_no_nan(value * of_all, total * own)


def samples() -> tf.Tensor:
    """float32 scalar, this rank's samples in the step."""
    collectives = collectives_lib.active()
    assert collectives is not None
    return collectives.samples()


def dependence_in(step: Step) -> BatchDependence:
    """What tells how tensors of a step depend on its batch."""
    if step.dependence is None:
        samples = tf.get_static_value(step.samples)
        step.dependence = BatchDependence(samples and int(samples))
    dependence: BatchDependence = step.dependence
    return dependence


def kind_of(step: Step, value: tf.Tensor) -> Kind:
    """How a tensor depends on the batch.

    Eager scalars do not tell what they are; they count as means.
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
        value: floating scalar of the step.
        what: names the value in warnings.
    """
    value = tf.convert_to_tensor(value)  # also of a variable of Keras
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


def targets_of(step: Step, target: tf.Tensor, weight: Any) -> Pairs:
    """What to differentiate for a gradient that the ranks can average.

    Args:
        step: of a Keras loop.
        target: of which the gradient is asked for; its elements are added up.
        weight: the gradient by the target, None for 1.

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
            found = whole.gradients(weight, share())
            pairs = zip(whole.leaves, found, strict=True)
            return [(leaf, grad) for leaf, grad in pairs if grad is not None]
    if kind.name in (LINEAR, COUPLED):
        kind = Kind(UNKNOWN, cause=target.op)
    _warn("The gradient of a loss", target, kind)
    return [(target, weight)]


def _whole_weight(step: Step, weight: tf.Tensor) -> tf.Tensor:
    """A gradient that a step gives to a tape, as one process gives it."""
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
    return makes.of(value, share(), collectives)


def total_of(value: tf.Tensor) -> tf.Tensor:
    """A sum over this rank's samples, to be averaged over the ranks."""
    value = tf.math.divide_no_nan(value, tf.cast(share(), value.dtype))
    if tf.is_symbolic_tensor(value):
        marks.set_dependence(value, MEAN)
    return value


def warn_of_constants(step: Step) -> None:
    """Names constants that may be this rank's samples, or one over them."""
    for op in dependence_in(step).by_constant:
        kind = kind_of(step, op.outputs[0])
        if kind.name == LINEAR and is_of_keras(op):
            continue  # of an activity regularizer, by the batch's samples
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
            f"samples or elements. It is taken for {taken}. {_REMEDY}",
        )


def warn_of_layer(layer: Any, value: tf.Tensor) -> None:
    """Names a layer of the user's whose result mixes samples of its rank."""
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
    """Names an op that computes a gradient from a part of another one."""
    _warn_once(
        value.op,
        f"Op '{value.op.name}' ({line_of(value.op)}) makes a gradient from the "
        "gradient of a partitioned table, of which each rank has its shard, so "
        "the result may differ from one process. Use tf.linalg.global_norm, "
        "tf.clip_by_global_norm or tf.clip_by_norm on the gradients, which "
        "count all shards, or `clipnorm`, `global_clipnorm` or `clipvalue` of "
        "an optimizer of tfdist_ext.optimizers.",
    )


_KNOWN_LAYERS = ("keras", "keras_rs", "tf_keras", "tfdist_ext")
_REMEDY = (
    "Write it with tf.reduce_mean, or with tfdist_ext.losses.batch_mean, "
    "batch_sum or gather_batch, which are exact over the whole batch."
)


def _warn(what: str, value: tf.Tensor, kind: Kind) -> None:
    """Says what cannot be told to be a sum or a mean, once for each op."""
    op = kind.cause
    if op is None:
        op = value.op
    reason = "has no rule for sums over a batch that is split over ranks"
    if kind.name in (ROWS, SIZES) or kind.axis is not None:
        reason = "gives a value for each sample, of which a rank has a part"
    elif kind.cause is value.op:
        reason = "cannot be told to be a sum or a mean over the samples"
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
