# SPDX-License-Identifier: Apache-2.0
"""Makes steps of Keras's loops mean on several ranks what they mean on one.

Ranks are averaged there (`whole_batch`). Sums over the samples, and trackers
that count a step once, have to be seen where they arise: in Keras's losses,
in its `Mean` and `Sum`, and where a tape differentiates a loss. The wrappers
here act in such steps of our strategy only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist_ext import keras_internals
from tfdist_ext import marks
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.batches import whole_batch
from tfdist_ext.batches.kinds import COUPLED
from tfdist_ext.batches.kinds import LINEAR
from tfdist_ext.batches.kinds import MEAN
from tfdist_ext.batches.kinds import ROWS
from tfdist_ext.batches.kinds import SAME
from tfdist_ext.batches.kinds import UNKNOWN
from tfdist_ext.collectives import collectives as collectives_lib
from tfdist_ext.collectives.step import Step
from tfdist_ext.keras_training import decomposing
from tfdist_ext.keras_training import no_samples
from tfdist_ext.keras_training import whole_values

keras = tf.keras
Nest = Any


def _in_keras_step(function: Callable[..., Any]) -> Callable[..., Any]:
    """A stage that acts in steps of Keras's loops only."""

    @functools.wraps(function)
    def around(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        step = whole_batch.keras_step()
        if step is None:
            return original(self, *args, **kwargs)
        return function(
            step, functools.partial(original, self), self, *args, **kwargs
        )

    return around


def allow_means(original: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
    """Lets losses of tf_keras be means where the ranks are averaged.

    Stock allows that to the losses in `compile` only, whatever the ranks.
    """
    strategy = tf.distribute.get_strategy()
    single = getattr(strategy, "collectives", strategy) is None
    averaged = single or whole_batch.keras_loop_step() is not None
    with keras_internals.means_allowed(loss, averaged):
        return original(loss, *args, **kwargs)


def tell_forward_sums(
    original: Any, context: Any, *args: Any, **kwargs: Any
) -> Any:
    """Lets sums over the ranks in a model be told from those of gradients."""
    collectives = collectives_lib.active()
    step = collectives.step if collectives else None
    if step is None:
        return original(context, *args, **kwargs)
    outer, step.forward = step.forward, internals.is_recording()
    try:
        return original(context, *args, **kwargs)
    finally:
        step.forward = outer


@_in_keras_step
def call_layer(
    step: Step, original: Any, layer: Any, *args: Any, **kwargs: Any
) -> Nest:
    """The results of a layer, each row of which belongs to one sample.

    The forward pass of a rank is that of its own samples, whatever ops it
    consists of.
    """
    outputs = no_samples.call(layer, original, args, kwargs)
    dependence = whole_batch.dependence_in(step)
    for value in tf.nest.flatten(outputs):
        if not (isinstance(value, tf.Tensor) and tf.is_symbolic_tensor(value)):
            continue
        kind = dependence.of(value)
        if kind.axis == 0 and kind.name == COUPLED:
            whole_batch.warn_of_layer(layer, value)
        elif kind.name != UNKNOWN:
            continue
        if dependence.may_be_batched(value):
            marks.set_dependence(value, ROWS)
    return outputs


@_in_keras_step
def call_loss(
    step: Step,
    original: Any,
    loss: Any,
    y_true: Any,
    y_pred: Any,
    sample_weight: Any = None,
) -> tf.Tensor:
    """The loss of a batch, as it is to be averaged over the ranks."""
    if not decomposing.is_loss_local(loss, y_true, y_pred, sample_weight):
        return whole_values.loss_of_batch(
            step, original, loss, y_true, y_pred, sample_weight
        )
    divisor = _divisor(loss, y_pred, sample_weight)
    if divisor is None:
        value = original(y_true, y_pred, sample_weight)
    else:
        # Where nothing counts, tf_keras would divide zero by zero.
        with keras_internals.mask_or(y_pred, tf.equal(divisor, 0)):
            value = original(y_true, y_pred, sample_weight)
    if loss.reduction in (None, "none"):
        return value
    if value.shape == [0]:  # Keras 3, eagerly, where a rank has no samples
        value = tf.reduce_sum(value)
    if value.shape.rank != 0:
        return value
    if loss.reduction == "sum":
        return whole_batch.total_of(value)
    if divisor is not None:
        value *= tf.cast(whole_batch.ratio_of_parts(divisor), value.dtype)
    if tf.is_symbolic_tensor(value):
        marks.set_dependence(value, MEAN)
    return value


def _divisor(loss: Any, y_pred: Any, sample_weight: Any) -> tf.Tensor | None:
    """What a loss divides by that need not grow as the samples do.

    float32 scalar of this rank: how many elements a mask leaves, or the sum
    of the weights. None of a loss that divides by its size.
    """
    if loss.reduction in (None, "none", "sum"):
        return None
    mask = keras_internals.mask_of(y_pred)
    mask = None if mask is None else tf.cast(mask, tf.float32)
    weighted = loss.reduction == "mean_with_sample_weight"
    if not weighted or sample_weight is None:
        return None if mask is None else tf.reduce_sum(mask)
    weights = tf.cast(sample_weight, tf.float32)
    if mask is not None:
        missing = mask.shape.rank - weights.shape.rank
        weights = weights[(..., *[tf.newaxis] * missing)] * mask
    return tf.reduce_sum(weights)


@_in_keras_step
def track_mean(
    step: Step,
    original: Any,
    metric: Any,
    values: Any,
    sample_weight: Any = None,
) -> Any:
    """Counts a number that each rank has once, as one process would."""
    value = _scalar(values)
    if value is None:
        return original(values, sample_weight)
    mean = whole_batch.averageable(value, f"The value given to `{metric.name}`")
    # Of a rank without samples the mean is no number.
    value = tf.where(whole_batch.samples() > 0, mean, 0)
    if sample_weight is None:
        sample_weight = tf.cast(whole_batch.share(), value.dtype)
    return original(value, sample_weight)


@_in_keras_step
def track_sum(
    step: Step,
    original: Any,
    metric: Any,
    values: Any,
    sample_weight: Any = None,
) -> Any:
    """Adds a mean over the samples once, not once for every rank."""
    value = _scalar(values)
    if value is None or not tf.is_symbolic_tensor(value):
        return original(values, sample_weight)
    kind = whole_batch.kind_of(step, value)
    if (
        kind.name == LINEAR and kind.parts <= {MEAN, SAME}
    ) or kind.name == SAME:
        part = value * tf.cast(whole_batch.share(), value.dtype)
        values = tf.where(whole_batch.samples() > 0, part, 0)
    return original(values, sample_weight)


def _scalar(values: Any) -> tf.Tensor | None:
    if isinstance(values, tf.RaggedTensor | tf.SparseTensor | list | tuple):
        return None
    value = tf.convert_to_tensor(values)
    if value.shape.rank != 0:
        return None
    return value if value.dtype.is_floating else tf.cast(value, tf.float32)


@_in_keras_step
def gradient(
    step: Step,
    original: Any,
    tape: Any,
    target: Nest,
    sources: Nest,
    output_gradients: Nest = None,
    unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
) -> Nest:
    """The gradient of the whole batch.

    By a variable it is summed over the ranks here, so that whatever a step
    does with it (clips it, logs its norm) sees what one process sees. By a
    tensor with a row for each sample, each rank gets its own rows.
    """
    del tape
    flat = tf.nest.flatten(sources)
    targets, weights = _averageable(step, target, output_gradients)
    outer, step.backward = step.backward, True
    try:
        found = original(targets, flat, weights, unconnected_gradients)
    finally:
        step.backward = outer
    found = _of_whole_batch(step, flat, found)
    return tf.nest.pack_sequence_as(sources, found)


def _averageable(
    step: Step, target: Nest, output_gradients: Nest
) -> tuple[list[Any], list[Any] | None]:
    """What to differentiate for gradients that the ranks can average."""
    targets = tf.nest.flatten(target)
    given: list[Any] = [None] * len(targets)
    if output_gradients is not None:
        given = tf.nest.flatten(output_gradients)
    pairs: whole_batch.Pairs = []
    for value, weight in zip(targets, given, strict=True):
        if tf.is_tensor(value) and value.dtype.is_floating:
            pairs += whole_batch.targets_of(step, value, weight)
        else:
            pairs.append((value, weight))
    whole_batch.warn_of_constants(step)
    if not pairs:  # a value that nothing can be differentiated by
        return targets, [tf.zeros_like(value) for value in targets]
    values, weights = map(list, zip(*pairs, strict=True))
    if all(weight is None for weight in weights):
        return values, None
    return values, [
        tf.ones_like(value) if weight is None else weight
        for value, weight in pairs
    ]


def _of_whole_batch(
    step: Step, sources: list[Any], found: list[Any]
) -> list[Any]:
    """Gradients of the whole batch, from what is to be averaged."""
    result = list(found)
    shared = []
    for i, (source, gradient) in enumerate(zip(sources, found, strict=True)):
        if gradient is None:
            continue
        if _is_variable(source):
            shared.append(i)
            continue
        kind = whole_batch.kind_of(step, source)
        if kind.name == SAME:
            shared.append(i)
        else:
            part = tf.cast(whole_batch.share(), gradient.dtype)
            # Of a rank without samples, no number counts.
            result[i] = tf.math.multiply_no_nan(gradient, part)
            if tf.is_symbolic_tensor(result[i]) and kind.axis == 0:
                marks.set_dependence(result[i], ROWS)
    extended = tf.distribute.get_strategy().extended
    for i, gradient in zip(
        shared,
        extended.reduce_gradients([found[i] for i in shared]),
        strict=True,
    ):
        result[i] = gradient
    return result


def _is_variable(source: Any) -> bool:
    kinds: tuple[Any, ...] = (tf.Variable,)
    if keras_internals.KERAS_3:
        kinds = (tf.Variable, keras.Variable)
    return isinstance(source, kinds)
