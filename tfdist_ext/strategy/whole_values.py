# SPDX-License-Identifier: Apache-2.0
"""Losses and metrics of Keras that are computed on the global batch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext import keras_internals
from tfdist_ext import marks
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.comm import collectives as collectives_lib
from tfdist_ext.comm.calls import Step
from tfdist_ext.numbers import whole_batch
from tfdist_ext.numbers.kinds import ROWS
from tfdist_ext.numbers.kinds import SAME
from tfdist_ext.numbers.kinds import follows_from_constants
from tfdist_ext.strategy import decomposing
from tfdist_ext.type_names import Arguments
from tfdist_ext.type_names import Keywords
from tfdist_ext.type_names import Loss
from tfdist_ext.type_names import Metric
from tfdist_ext.type_names import Model
from tfdist_ext.type_names import Nest
from tfdist_ext.type_names import Original
from tfdist_ext.type_names import T
from tfdist_ext.type_names import TensorLike

keras = tf.keras

LABEL = "losses/whole batch"
# Bytes gathered per step above which a warning is logged.
_MANY_BYTES = 8 << 20


@dataclasses.dataclass
class _Expected:
    """What is known of the data of a Keras loop.

    Attributes:
        samples: samples of a rank in a step; 0 if unknown.
    """

    samples: int = 0


_expected = _Expected()


def expect(samples: int) -> None:
    """Sets the number of samples of a rank in the following steps."""
    _expected.samples = samples


def loss_of_batch(
    step: Step,
    original: Callable[..., tf.Tensor],
    loss: Loss,
    y_true: Nest,
    y_pred: Nest,
    sample_weight: Nest,
) -> tf.Tensor:
    """The loss of the global batch, equal on all ranks.

    With reduction "none", a loss per sample is this rank's part.
    """
    who = describe("Loss", loss)
    values = [_tensors(each) for each in (y_true, y_pred, sample_weight)]
    alone = loss.reduction in (None, "none")
    given = whole(step, who, values, exchanged=alone)
    with step.on_whole_batch():
        value = original(*given)
    if alone and value.shape.rank and value.shape[0] is None:
        return _own_part(step, who, values, value)
    return final(value)


def _own_part(
    step: Step, who: str, values: Nest, value: tf.Tensor
) -> tf.Tensor:
    """This rank's rows of a loss that has a value for each sample."""
    rows = [each for each in tf.nest.flatten(values) if _has_rows(each)]
    found = _gathered(step, who, rows[-1:])[0]
    start, count = found.first(), found.sizes[found.rank]
    check = tf.debugging.assert_equal(
        tf.shape(value, tf.int64)[0],
        tf.reduce_sum(found.sizes),
        f'{who} has reduction "none", but returns neither one number nor '
        "one for each sample of the batch. Return one of these.",
    )
    with tf.control_dependencies([] if check is None else [check]):
        part = value[start : start + count]
    if tf.is_symbolic_tensor(part):
        marks.set_dependence(part, ROWS)
    return part


def call_loss(
    original: Callable[..., tf.Tensor],
    loss: Loss,
    y_true: Nest,
    y_pred: Nest,
    sample_weight: Nest = None,
) -> tf.Tensor:
    """Calls a loss whose class computes its total itself, on all samples."""
    step = whole_batch.keras_step()
    call = functools.partial(keras_internals.converted(original), loss)
    if step is None or keras_internals.is_container(loss):
        return call(y_true, y_pred, sample_weight)
    return loss_of_batch(step, call, loss, y_true, y_pred, sample_weight)


def final(value: tf.Tensor) -> tf.Tensor:
    """Marks a value as that of the global batch."""
    value = tf.identity(value)
    marks.set_reduced(value)
    return value


def update_metric(
    original: Callable[..., T], metric: Metric, *args: Any, **kwargs: Any
) -> T:
    """Updates a metric, with the global batch if it does not decompose."""
    step = whole_batch.keras_loop_step()
    if step is None or step.checking or keras_internals.is_container(metric):
        return original(metric, *args, **kwargs)
    if not step.whole:
        if not _is_outermost(original, metric):  # Called by a subclass.
            return original(metric, *args, **kwargs)
        first, weighted = _labels_and_predictions(args, kwargs)
        if decomposing.is_metric_local(metric, first, weighted):
            bound = inspect.signature(original).bind(metric, *args, **kwargs)
            _count_once(step, bound)
            return original(*bound.args, **bound.kwargs)
        who = describe("Metric", metric)
        values = _tensors_of(args, kwargs)
        args, kwargs = whole(step, who, _numbers(who, values))
    read_as_is(metric)
    with step.on_whole_batch():
        result = keras_internals.converted(original)(metric, *args, **kwargs)
    read_as_is(metric)  # The first update may have created states.
    return result


def _count_once(step: Step, bound: inspect.BoundArguments) -> None:
    """Weights rows that every rank has, because states are summed over ranks.

    Such rows are results of `gather_batch`, for example. Each rank counts its
    share of them.

    Args:
        step: step that is traced.
        bound: arguments of `update_state`.
    """
    given = bound.arguments
    rows = [
        given[name]
        for name in ("values", "y_true", "y_pred")
        if tf.is_symbolic_tensor(given.get(name))
    ]
    same = rows and all(
        value.shape.rank and whole_batch.kind_of(step, value).name == SAME
        for value in rows
    )
    takes_weights = "sample_weight" in bound.signature.parameters
    if not same or not takes_weights or all(map(follows_from_constants, rows)):
        return
    share = whole_batch.share_of_rank()
    if given.get("sample_weight") is None:
        given["sample_weight"] = tf.fill(tf.shape(rows[0])[:1], share)
    else:
        weights = tf.convert_to_tensor(given["sample_weight"])
        weights = tf.cast(weights, tf.float32) * share
        given["sample_weight"] = weights


def _is_outermost(original: Callable[..., object], metric: Metric) -> bool:
    outermost = inspect.unwrap(type(metric).update_state)
    return inspect.unwrap(original) is outermost


def _labels_and_predictions(
    args: tuple[Nest, ...], kwargs: dict[str, Nest]
) -> tuple[tuple[Nest, ...], bool]:
    """Labels and predictions of a call, and whether it has sample weights."""
    names = ("y_true", "y_pred", "sample_weight")
    named = dict(zip(names, args, strict=False)) | kwargs
    values = tuple(named[name] for name in names[:2] if name in named)
    return values, named.get("sample_weight") is not None


def read_as_is(metric: Metric) -> None:
    """Reads the states of a metric from this rank, without a sum over ranks."""
    for variable in metric.variables:
        internals.read_from_first(keras_internals.value_of(variable))


def describe(kind: str, value: Loss | Metric) -> str:
    """Name of a loss or a metric in errors and warnings."""
    return f"{kind} {value.name!r} ({type(value).__name__})"


def _tensors_of(args: Arguments, kwargs: Keywords) -> list[Any]:
    return [
        tuple(map(_tensors, args)),
        {name: _tensors(value) for name, value in kwargs.items()},
    ]


def _tensors(value: Nest) -> Nest:
    """The nest with arrays and lists of numbers converted to tensors."""
    if isinstance(value, list | tuple):
        leaves = tf.nest.flatten(value)
        if leaves and all(isinstance(x, int | float) for x in leaves):
            return tf.convert_to_tensor(value)
    return tf.nest.map_structure(
        lambda x: tf.convert_to_tensor(x) if _is_array(x) else x, value
    )


def _is_array(value: object) -> bool:
    return isinstance(value, np.ndarray | np.generic)


def _has_rows(value: object) -> bool:
    """Whether a value has a row for each sample of this rank."""
    if isinstance(value, tf.RaggedTensor):
        return True
    if not isinstance(value, tf.Tensor) or marks.is_reduced(value):
        return False
    return value.shape.rank != 0


def whole(step: Step, who: str, values: Any, exchanged: bool = False) -> Any:
    """Values with the rows of all ranks, in the order of the batch.

    Args:
        step: step that computes the values.
        who: name of the loss or metric that uses them, for errors.
        values: nest of tensors, and of other values, which are unchanged.
        exchanged: whether ranks compute different results from the values, so
            that their gradients must be exchanged as well.
    """
    flat = tf.nest.flatten(values)
    indices = [i for i, each in enumerate(flat) if _has_rows(each)]
    masks = {i: keras_internals.mask_of(flat[i]) for i in indices}
    indices = [i for i in indices if not _is_broadcast(flat, indices, i)]
    if not indices or _is_never_run():
        return values
    masked = [i for i in indices if masks[i] is not None]
    rows = [flat[i] for i in indices] + [masks[i] for i in masked]
    found = _gathered(step, who, rows)
    for i, each in zip(indices, found, strict=False):
        flat[i] = whole_batch.connected(each, exchanged)
    for i, mask in zip(masked, found[len(indices) :], strict=True):
        keras_internals.set_mask(flat[i], mask.rows)
    return tf.nest.pack_sequence_as(values, flat)


def _is_never_run() -> bool:
    return (
        keras_internals.is_symbolic_build()
        or keras_internals.is_shape_inference()
    )


def _is_broadcast(
    flat: Sequence[tf.Tensor], indices: list[int], i: int
) -> bool:
    """Whether a value has a single row, which is broadcast to all samples."""
    others = [flat[k].shape[0] for k in indices if k != i]
    return flat[i].shape[0] == 1 and any(rows != 1 for rows in others)


def _numbers(who: str, values: Nest) -> Nest:
    """Replaces scalars of this rank with those of the global batch."""
    flat = tf.nest.flatten(values)
    indices = [i for i, each in enumerate(flat) if _is_number(each)]
    if not indices or _is_never_run():
        return values
    parts = [_averageable(who, flat[i]) for i in indices]
    for i, mean in zip(indices, whole_batch.means_of(parts), strict=True):
        dtype = flat[i].dtype
        flat[i] = tf.cast(mean if dtype.is_floating else tf.round(mean), dtype)
    return tf.nest.pack_sequence_as(values, flat)


def _is_number(value: object) -> bool:
    return (
        isinstance(value, tf.Tensor)
        and value.shape.rank == 0
        and value.dtype != tf.string
        and not marks.is_reduced(value)
        and (not tf.is_symbolic_tensor(value) or _is_computed(value))
    )


def _is_computed(value: tf.Tensor) -> bool:
    return tf.get_static_value(value) is None


def _averageable(who: str, value: tf.Tensor) -> tf.Tensor:
    if value.dtype == tf.bool:
        raise TypeError(
            f"{who} is updated with a bool scalar, whose value for the whole "
            "batch is not known. Give it a number, or the values of the "
            "samples that it is computed from."
        )
    exact = tf.float64 if value.dtype.is_integer else value.dtype
    return whole_batch.averageable(
        tf.cast(value, exact), f"A number given to {who}"
    )


def _gathered(
    step: Step, who: str, tensors: Sequence[TensorLike]
) -> list[whole_batch.Gathered]:
    """Rows of all ranks; each tensor is gathered once in a step."""
    collectives = collectives_lib.active()
    assert collectives is not None
    graph = id(internals.current_graph())
    missing = {id(x): x for x in tensors if _known(step, graph, x) is None}
    if missing:
        new = list(missing.values())
        _check_rows(step, who, new)
        _warn_of_many_bytes(who, new)
        for found in whole_batch.gather(collectives, new, LABEL):
            step.rows[graph, id(found.own)] = found
            whole_batch.store_share(found.share())
    return [step.rows[graph, id(x)] for x in tensors]


def _known(
    step: Step, graph: int, x: TensorLike
) -> whole_batch.Gathered | None:
    """Gathered rows of a tensor, or of the tensor that Keras made it from."""
    found = step.rows.get((graph, id(x)))
    if found is not None or not tf.is_symbolic_tensor(x):
        return found
    if x.op.type not in ("Cast", "ExpandDims", "Identity"):
        return None
    source = _known(step, graph, x.op.inputs[0])
    if source is None or not isinstance(source.rows, tf.Tensor):
        return None
    rows = source.rows
    if x.op.type == "Cast":
        rows = tf.cast(rows, x.dtype)
    if x.op.type == "ExpandDims":
        axis = tf.get_static_value(x.op.inputs[1])
        if axis is None or axis == 0 or axis < -rows.shape.rank:
            return None
        rows = tf.expand_dims(rows, axis)
    found = dataclasses.replace(source, own=x, rows=rows)
    step.rows[graph, id(x)] = found
    return found


def _check_rows(step: Step, who: str, tensors: Sequence[TensorLike]) -> None:
    """Rejects tensors that do not have one row for each sample of the step."""
    samples = whole_batch.samples()
    known = tf.get_static_value(samples)
    for x in tensors:
        rows = x.nrows() if isinstance(x, tf.RaggedTensor) else tf.shape(x)[0]
        static = x.shape[0]
        text = (
            f"{who} does not decompose over the samples, so it is given the "
            "whole batch; for that each of its arguments needs one row for "
            "each sample of the step. Received: a tensor of shape "
            f"{x.shape}, dtype {x.dtype.name}, with another number of rows. "
            "Give it one row for each sample, or compute it from "
            "`tfdist_ext.losses.gather_batch(...)` by hand."
        )
        if static is not None and (known is None or static != int(known)):
            raise ValueError(text)
        if static is None:
            tf.debugging.assert_equal(
                tf.cast(rows, tf.float32), tf.cast(samples, tf.float32), text
            )


def _warn_of_many_bytes(who: str, tensors: Sequence[TensorLike]) -> None:
    collectives = collectives_lib.active()
    assert collectives is not None
    samples = tf.get_static_value(whole_batch.samples())
    samples = int(samples or _expected.samples)
    rows = samples * collectives.group.world_size
    size = rows * sum(map(whole_batch.static_row_bytes, tensors))
    if size > _MANY_BYTES:
        warnings.warn(
            f"{who} is given the whole batch, for which every rank gathers "
            f"{size / (1 << 20):.1f} MB in a step. A loss or a metric of "
            "Keras that decomposes over the samples gathers nothing; in a "
            "`train_step` of your own, `tfdist_ext.losses.batch_mean` and "
            "`batch_sum` exchange one number each.",
            stacklevel=2,
        )


def add_state(
    original: Original[tf.Variable], metric: Metric, *args: Any, **kwargs: Any
) -> tf.Variable:
    """Creates a state, not summed over ranks if all of them have its value."""
    variable = original(metric, *args, **kwargs)
    local = decomposing.is_metric_class_local(type(metric))
    if collectives_lib.active() is None or local:
        return variable
    if keras_internals.is_keras_class(type(metric)):
        return variable

    def read_as_is() -> None:
        internals.read_from_first(keras_internals.value_of(variable))

    keras_internals.when_made(variable, contextlib.nullcontext, read_as_is)
    return variable


def gather_first(
    original: Original[T],
    model: Model,
    x: Nest = None,
    y: Nest = None,
    y_pred: Nest = None,
    sample_weight: Nest = None,
    *training: Any,
    **kwargs: Any,
) -> T:
    step = whole_batch.keras_step()
    if step is not None:
        given = [
            (loss, (labels, predictions, sample_weight))
            for loss, labels, predictions in keras_internals.compiled_losses(
                model, y, y_pred
            )
            if not decomposing.is_loss_local(
                loss, labels, predictions, sample_weight
            )
        ]
        if len(given) > 1:  # A single loss gathers its values in one exchange.
            who = ", ".join(describe("Loss", loss) for loss, _ in given)
            whole(step, who, [values for _, values in given])
    return original(model, x, y, y_pred, sample_weight, *training, **kwargs)
