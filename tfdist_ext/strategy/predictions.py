# SPDX-License-Identifier: Apache-2.0
"""Outputs of `predict` for a global batch, and tracing of its step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist_ext import batches
from tfdist_ext import marks
from tfdist_ext import thread_context
from tfdist_ext.comm import calls
from tfdist_ext.comm import exchanges
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.numbers import whole_batch
from tfdist_ext.numbers.kinds import COUPLED
from tfdist_ext.numbers.kinds import LINEAR
from tfdist_ext.numbers.kinds import SAME
from tfdist_ext.strategy import logs
from tfdist_ext.thread_context import current
from tfdist_ext.type_names import Model
from tfdist_ext.type_names import Nest
from tfdist_ext.type_names import Nested
from tfdist_ext.type_names import Original
from tfdist_ext.type_names import Strategy
from tfdist_ext.type_names import T
from tfdist_ext.type_names import TensorLike

keras = tf.keras
_LABEL = "gather"


class NoRowsError(ValueError):
    """An output does not have one row for each sample."""

    # AutoGraph inspects this method to raise the error with a longer message.
    __init__ = Exception.__init__


def concatenate(original: Original[T], value: T, strategy: Strategy) -> T:
    if marks.is_reduced(value):
        return value
    return original(value, strategy)


def outputs_of(
    fn: Callable[..., Nest], outputs: Nest, collectives: Collectives
) -> Nest:
    """Outputs of a step of Keras's loops for the global batch.

    Args:
        fn: function of the step.
        outputs: outputs of `fn` on this rank.
        collectives: collectives of the strategy, called in its scope.
    """
    outputs = logs.of_whole_batch(outputs, collectives)
    if "make_predict_function" in calls.role_of(fn):
        return of_all_ranks(outputs, collectives)
    return outputs


def of_all_ranks(outputs: Nest, collectives: Collectives) -> Nest:
    """Predictions of a model for the global batch, on every rank.

    Args:
        outputs: outputs of a step of `predict` on this rank, a nest of
            tensors, RaggedTensors and SparseTensors. Values that are reduced
            already are unchanged.
        collectives: collectives of the strategy, called in its scope.

    Raises:
        NoRowsError: an output depends on the samples and does not have a row
            for each; the error names it.
    """
    step = collectives.step
    assert step is not None
    flat = list(tf.nest.flatten(outputs))
    names = batches.names_of(outputs)
    for i, value in enumerate(flat):
        if not _is_value(value) or marks.is_reduced(value):
            continue
        if not step.checking:
            value = _of_all_ranks(value, names[i], collectives)
        flat[i] = value
        marks.set_reduced(value)
    return tf.nest.pack_sequence_as(outputs, flat)


def _is_value(value: object) -> bool:
    return isinstance(value, tf.Tensor | tf.RaggedTensor | tf.SparseTensor)


def _of_all_ranks(
    value: TensorLike, name: str, collectives: Collectives
) -> TensorLike:
    step = collectives.step
    assert step is not None
    parts = tf.nest.flatten(value, expand_composites=True)
    kinds = [whole_batch.kind_of(step, part) for part in parts]
    if all(kind.name == SAME for kind in kinds):
        return value
    if not isinstance(value, tf.Tensor):
        return _rows(value, collectives)
    kind = kinds[0]
    if kind.name in (LINEAR, COUPLED) and kind.axis is None:
        if value.dtype.is_floating:
            return _mean(value, name, collectives)
    elif kind.axis in (None, 0) and _may_have_rows(value):
        return _rows(_with_a_row_each(value, name), collectives)
    raise NoRowsError(_no_rows(value, name))


def _may_have_rows(value: tf.Tensor) -> bool:
    """Whether the shape of a tensor allows one row for each sample."""
    if value.shape.rank is None:
        return True
    rows = value.shape[0] if value.shape.rank else 0
    samples = tf.get_static_value(whole_batch.samples())
    return rows is None or samples in (None, rows)


def _with_a_row_each(value: tf.Tensor, name: str) -> tf.Tensor:
    """The tensor, after a check that it has a row for each sample.

    With SparseTensors the number of samples is unknown when the step is
    traced, while the number of rows of a result may be known.
    """
    samples = whole_batch.samples()
    rows = value.shape[0] if value.shape.rank else None
    if rows is None or tf.get_static_value(samples) is not None:
        return value
    check = tf.debugging.assert_equal(
        samples, tf.constant(rows, samples.dtype), _no_rows(value, name)
    )
    with tf.control_dependencies([check] if check is not None else []):
        return tf.identity(value)


def _no_rows(value: tf.Tensor, name: str) -> str:
    return (
        f"`predict` gets an output '{name}' of shape {value.shape} whose "
        "first dimension is not that of the samples, so the ranks' outputs "
        "cannot be joined. Return one row for each sample from `call` "
        "(tf.transpose, tf.expand_dims), or call the model itself on the "
        "whole batch: `model(x)`."
    )


def _mean(value: tf.Tensor, name: str, collectives: Collectives) -> tf.Tensor:
    """Averages a function of sums and means over the samples; else warns."""
    part = whole_batch.averageable(value, f"Output '{name}' of `predict`")
    if marks.is_reduced(part):
        return part
    ranks = tf.constant(collectives.group.world_size, part.dtype)
    (mean,) = collectives.all_reduce([part / ranks], _LABEL, weighted=True)
    return mean


def _rows(value: TensorLike, collectives: Collectives) -> TensorLike:
    return exchanges.all_gather_rows(collectives, value, _LABEL)[0]


def trace_for(model: Model, spec: Nested[tf.TypeSpec]) -> None:
    """Creates a model's function of `predict`, for batches of any size.

    Args:
        model: model of Keras 3.
        spec: specs of the batches.
    """
    model.distribute_strategy.distributed_spec = spec
    with thread_context.setting(predicting=model):
        model.make_predict_function()


def predict(
    original: Original[T], model: Model, *args: Any, **kwargs: Any
) -> T:
    strategy = model.distribute_strategy
    if getattr(strategy, "collectives", None) is None:
        return original(model, *args, **kwargs)
    strategy.distributed_spec = None
    with thread_context.setting(predicting=model):
        return original(model, *args, **kwargs)


def make_predict_function(
    original: Original[T], model: Model, *args: Any, **kwargs: Any
) -> T:
    before = model.predict_function
    made = original(model, *args, **kwargs)
    function = model.predict_function
    if (
        current.predicting is model
        and function is not before
        and isinstance(function, tf.types.experimental.PolymorphicFunction)
        and model.steps_per_execution == 1
    ):
        _trace(function, model.distribute_strategy)
    return made


def _trace(
    function: tf.types.experimental.PolymorphicFunction, strategy: Strategy
) -> None:
    """Traces a step for the specs of the loop's dataset.

    Args:
        function: function that Keras calls with a list of one batch.
        strategy: strategy that has distributed the dataset.
    """
    spec, collectives = strategy.distributed_spec, strategy.collectives
    if spec is None or not any(map(_varies, tf.nest.flatten(spec))):
        return
    try:
        function.get_concrete_function([spec])
        collectives.barrier("step of predict traced")
    except NoRowsError:
        raise
    except Exception as error:
        # The model needs to know the batch size, or has an error, which the
        # first batch will raise again. All ranks do the same.
        collectives.give_up("tracing a step of predict", error)


def _varies(spec: tf.TypeSpec) -> bool:
    """Whether the batch size is unknown; False for Keras's None."""
    if isinstance(spec, tf.OptionalSpec):
        return False
    shape = tf.TensorShape(spec.shape)
    return shape.rank is not None and shape.rank > 0 and shape[0] is None
