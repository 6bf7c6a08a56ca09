# SPDX-License-Identifier: Apache-2.0
"""Stages of the functions of Keras and TensorFlow that a step calls."""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext import keras_internals
from tfdist_ext import marks
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.comm import collectives as collectives_lib
from tfdist_ext.comm.calls import Step
from tfdist_ext.embedding import capture
from tfdist_ext.embedding.pooled_lookup import look_up_together
from tfdist_ext.numbers import whole_batch
from tfdist_ext.numbers.kinds import COUPLED
from tfdist_ext.numbers.kinds import LINEAR
from tfdist_ext.numbers.kinds import MEAN
from tfdist_ext.numbers.kinds import ROWS
from tfdist_ext.numbers.kinds import SAME
from tfdist_ext.numbers.kinds import UNKNOWN
from tfdist_ext.optimizers.processed_rows import warn_of_norm
from tfdist_ext.optimizers.row_gradients import square_norms
from tfdist_ext.optimizers.row_gradients import without_duplicates
from tfdist_ext.strategy import decomposing
from tfdist_ext.strategy import whole_values
from tfdist_ext.tables.plan import ShardingPlan
from tfdist_ext.type_names import Arguments
from tfdist_ext.type_names import Gradient
from tfdist_ext.type_names import Keywords
from tfdist_ext.type_names import Layer
from tfdist_ext.type_names import Loss
from tfdist_ext.type_names import Metric
from tfdist_ext.type_names import Model
from tfdist_ext.type_names import Nest
from tfdist_ext.type_names import Original
from tfdist_ext.type_names import Scalar
from tfdist_ext.type_names import T
from tfdist_ext.type_names import TensorLike
from tfdist_ext.type_names import TensorOrSlices
from tfdist_ext.type_names import Variable

keras = tf.keras
_NAMES = re.compile(
    r"(Depthwise|Separable)?Conv\dD(Transpose)?|(Max|Average)Pooling\dD"
)
_LAYERS = tuple(
    getattr(keras.layers, name)
    for name in dir(keras.layers)
    if _NAMES.fullmatch(name)
)


def call_without_samples(
    layer: Layer,
    original: Original[TensorLike],
    args: Arguments,
    kwargs: Keywords,
) -> TensorLike:
    """Calls a layer whose input may have no samples.

    Convolution and pooling layers fail on an empty batch, so they get a
    sample of zeros, which is removed from the result.

    Args:
        layer: Keras layer.
        original: bound `__call__` of the layer.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.

    Returns:
        The result of the layer.
    """
    inputs = args[0] if args else None
    if not isinstance(layer, _LAYERS) or not isinstance(inputs, tf.Tensor):
        return original(*args, **kwargs)
    if inputs.shape.rank is None or inputs.shape[0]:
        return original(*args, **kwargs)
    shape = tf.shape(inputs)
    missing = tf.cast(shape[:1] == 0, shape.dtype)
    zeros = tf.zeros(tf.concat([missing, shape[1:]], 0), inputs.dtype)
    padded = tf.concat([inputs, zeros], 0)
    return original(padded, *args[1:], **kwargs)[: shape[0]]


Moments = tuple[tf.Tensor, tf.Tensor]


def keras_3_moments(
    original: Callable[..., Moments],
    layer: tf.keras.layers.BatchNormalization,
    inputs: TensorLike,
    mask: TensorLike,
) -> Moments:
    if not _of_all_ranks(layer):
        return original(layer, inputs, mask)
    last = len(inputs.shape) - 1
    axis = layer.axis % (last + 1) if mask is None else last
    axes = [i for i in range(last + 1) if i != axis]
    return whole_moments(inputs, axes, False, mask)


def tf_keras_moments(
    original: Callable[..., Moments],
    layer: tf.keras.layers.BatchNormalization,
    inputs: TensorLike,
    reduction_axes: Sequence[int],
    keep_dims: bool,
    mask: TensorLike = None,
) -> Moments:
    if not _of_all_ranks(layer):
        return original(layer, inputs, reduction_axes, keep_dims, mask=mask)
    return whole_moments(inputs, reduction_axes, keep_dims, mask)


def skips_empty(
    original: Callable[..., bool], layer: tf.keras.layers.BatchNormalization
) -> bool:
    """Whether a rank without samples leaves its moving averages unchanged.

    A synchronized layer updates them: it has the moments of all ranks, and
    the averages must stay equal on all ranks.
    """
    return not _of_all_ranks(layer) and original(layer)


def _of_all_ranks(layer: tf.keras.layers.BatchNormalization) -> bool:
    ranks = collectives_lib.active() is not None
    return layer.synchronized and ranks and _context() is not None


def _context() -> tf.distribute.ReplicaContext:
    return tf.distribute.get_replica_context()


def whole_moments(
    inputs: tf.Tensor,
    axes: Sequence[int],
    keep_dims: bool,
    mask: TensorLike = None,
) -> Moments:
    """The mean and the variance over the samples of all ranks.

    Args:
        inputs: this rank's values, in a replica context.
        axes: axes to sum over.
        keep_dims: whether the results have these axes, with size one.
        mask: boolean, of the shape of `inputs` without its last axis; None
            counts all values.

    Returns:
        The mean and the variance, of the inputs' dtype.
    """
    sums = tf.distribute.ReduceOp.SUM
    values = tf.cast(inputs, tf.float32) if inputs.dtype.size < 4 else inputs
    counted = tf.ones_like(values)
    if mask is not None:
        counted *= tf.cast(mask, values.dtype)[..., tf.newaxis]
    total = tf.reduce_sum(values * counted, axes, keepdims=True)
    count = tf.reduce_sum(counted, axes, keepdims=True)
    total, count = _context().all_reduce(sums, [total, count])
    mean = tf.math.divide_no_nan(total, count)
    squares = tf.square(values - mean) * counted
    squares = tf.reduce_sum(squares, axes, keepdims=True)
    squares = _context().all_reduce(sums, squares)
    variance = tf.math.divide_no_nan(squares, count)
    if not keep_dims:
        mean, variance = (tf.squeeze(x, axes) for x in (mean, variance))
    return tf.cast(mean, inputs.dtype), tf.cast(variance, inputs.dtype)


def global_norm(
    original: Original[T],
    t_list: Sequence[TensorOrSlices],
    name: str | None = None,
) -> T:
    warn_of_norm(t_list, "tf.linalg.global_norm")
    if not _has_shards(t_list):
        return original(t_list, name)
    return tf.sqrt(tf.add_n(_squares(t_list)))


def clip_by_global_norm(
    original: Original[T],
    t_list: Sequence[TensorOrSlices],
    clip_norm: Scalar,
    use_norm: Scalar | None = None,
    name: str | None = None,
) -> T:
    if use_norm is None:
        warn_of_norm(t_list, "tf.clip_by_global_norm")
    if use_norm is None and _has_shards(t_list):
        use_norm = tf.sqrt(tf.add_n(_squares(t_list)))
    return original(t_list, clip_norm, use_norm, name)


def clip_by_norm(
    original: Original[T],
    t: TensorOrSlices,
    clip_norm: Scalar,
    axes: Sequence[int] | None = None,
    name: str | None = None,
) -> T:
    warn_of_norm([t], "tf.clip_by_norm")
    if axes is not None or not _has_shards([t]):
        return original(t, clip_norm, axes, name)
    norm = tf.sqrt(_squares([t])[0])
    limit = tf.cast(clip_norm, norm.dtype)
    factor = tf.cast(limit / tf.maximum(norm, limit), t.values.dtype)
    return tf.IndexedSlices(t.values * factor, t.indices, t.dense_shape)


def _has_shards(gradients: Sequence[Gradient]) -> bool:
    collectives = collectives_lib.active()
    step = collectives.step if collectives else None
    return bool(step and step.weighted) and any(
        marks.gradient_spec(gradient) is not None for gradient in gradients
    )


def _squares(gradients: Sequence[Gradient]) -> list[tf.Tensor]:
    given = [gradient for gradient in gradients if gradient is not None]
    return square_norms(
        list(map(without_duplicates, given)),
        list(map(marks.gradient_spec, given)),
    )


def _in_keras_step(function: Callable[..., T]) -> Callable[..., T]:
    """Decorates a stage to act in steps of Keras's loops only."""

    @functools.wraps(function)
    def around(
        original: Original[T], self: object, *args: Any, **kwargs: Any
    ) -> T:
        step = whole_batch.keras_step()
        if step is None:
            return original(self, *args, **kwargs)
        return function(
            step, functools.partial(original, self), self, *args, **kwargs
        )

    return around


def allow_means(
    original: Original[T], loss: Loss, *args: Any, **kwargs: Any
) -> T:
    """Lets losses of tf_keras be means where the ranks are averaged.

    The stock function allows means only for losses passed to `compile`,
    even with a single rank.
    """
    strategy = tf.distribute.get_strategy()
    single = getattr(strategy, "collectives", strategy) is None
    averaged = single or whole_batch.keras_loop_step() is not None
    with keras_internals.means_allowed(loss, averaged):
        return original(loss, *args, **kwargs)


def tell_forward_sums(
    original: Original[T],
    context: tf.distribute.ReplicaContext,
    *args: Any,
    **kwargs: Any,
) -> T:
    """Records whether a sum over the ranks is called in a forward pass."""
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
    step: Step,
    original: Original[Nest],
    layer: Layer,
    *args: Any,
    **kwargs: Any,
) -> Nest:
    """Calls a layer and marks its results as one row for each sample.

    The forward pass of a rank runs on its own samples, with any ops.
    """
    outputs = call_without_samples(layer, original, args, kwargs)
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
    original: Original[tf.Tensor],
    loss: Loss,
    y_true: Nest,
    y_pred: Nest,
    sample_weight: Nest = None,
) -> tf.Tensor:
    """Loss of a batch, in a form that is averaged over the ranks."""
    if not decomposing.is_loss_local(loss, y_true, y_pred, sample_weight):
        return whole_values.loss_of_batch(
            step, original, loss, y_true, y_pred, sample_weight
        )
    divisor = _divisor(loss, y_pred, sample_weight)
    if divisor is None:
        value = original(y_true, y_pred, sample_weight)
    else:
        # With a mask of zeros only, tf_keras would divide zero by zero.
        with keras_internals.mask_or(y_pred, tf.equal(divisor, 0)):
            value = original(y_true, y_pred, sample_weight)
    if loss.reduction in (None, "none"):
        return value
    if value.shape == [0]:  # Eager Keras 3, without samples.
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


def _divisor(loss: Loss, y_pred: Nest, sample_weight: Nest) -> tf.Tensor | None:
    """Divisor of a loss that need not be proportional to the samples.

    Returns:
        float32 scalar of this rank: the number of elements that the mask
        keeps, or the sum of the weights. None for a loss that divides by its
        size.
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
    original: Original[T],
    metric: Metric,
    values: TensorLike,
    sample_weight: Nest = None,
) -> T:
    """Counts a scalar that every rank has once, as one process would."""
    value = _scalar(values)
    if value is None:
        return original(values, sample_weight)
    mean = whole_batch.averageable(value, f"The value given to `{metric.name}`")
    # The mean is NaN on a rank without samples.
    value = tf.where(whole_batch.samples() > 0, mean, 0)
    if sample_weight is None:
        sample_weight = tf.cast(whole_batch.share_of_rank(), value.dtype)
    return original(value, sample_weight)


@_in_keras_step
def track_sum(
    step: Step,
    original: Original[T],
    metric: Metric,
    values: TensorLike,
    sample_weight: Nest = None,
) -> T:
    """Adds a mean over the samples once, instead of once for every rank."""
    value = _scalar(values)
    if value is None or not tf.is_symbolic_tensor(value):
        return original(values, sample_weight)
    kind = whole_batch.kind_of(step, value)
    if (
        kind.name == LINEAR and kind.parts <= {MEAN, SAME}
    ) or kind.name == SAME:
        part = value * tf.cast(whole_batch.share_of_rank(), value.dtype)
        values = tf.where(whole_batch.samples() > 0, part, 0)
    return original(values, sample_weight)


def _scalar(values: TensorLike) -> tf.Tensor | None:
    if isinstance(values, tf.RaggedTensor | tf.SparseTensor | list | tuple):
        return None
    value = tf.convert_to_tensor(values)
    if value.shape.rank != 0:
        return None
    return value if value.dtype.is_floating else tf.cast(value, tf.float32)


@_in_keras_step
def gradient(
    step: Step,
    original: Original[list[Gradient]],
    tape: tf.GradientTape,
    target: Nest,
    sources: Nest,
    output_gradients: Nest = None,
    unconnected_gradients: str = tf.UnconnectedGradients.NONE,
) -> Nest:
    """The gradient of the global batch.

    Gradients by variables are summed over the ranks here, so that a step
    that clips or logs them gets the values that one process gets. A tensor
    with a row for each sample has the gradient of this rank's rows.
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
) -> tuple[list[tf.Tensor], list[tf.Tensor | None] | None]:
    """Targets and weights whose gradients the ranks can average."""
    targets = tf.nest.flatten(target)
    given: list[tf.Tensor | None] = [None] * len(targets)
    if output_gradients is not None:
        given = tf.nest.flatten(output_gradients)
    pairs: whole_batch.Pairs = []
    for value, weight in zip(targets, given, strict=True):
        if tf.is_tensor(value) and value.dtype.is_floating:
            pairs += whole_batch.targets_of(step, value, weight)
        else:
            pairs.append((value, weight))
    whole_batch.warn_of_constants(step)
    if not pairs:  # The value does not depend on any source.
        return targets, [tf.zeros_like(value) for value in targets]
    values, weights = map(list, zip(*pairs, strict=True))
    if all(weight is None for weight in weights):
        return values, None
    return values, [
        tf.ones_like(value) if weight is None else weight
        for value, weight in pairs
    ]


def _of_whole_batch(
    step: Step, sources: list[Variable], found: list[Gradient]
) -> list[Gradient]:
    """Gradients of the global batch, from values that are to be averaged."""
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
            part = tf.cast(whole_batch.share_of_rank(), gradient.dtype)
            # A rank without samples contributes zero, even for a NaN.
            result[i] = tf.math.multiply_no_nan(gradient, part)
            if tf.is_symbolic_tensor(result[i]) and kind.axis == 0:
                marks.set_dependence(result[i], ROWS)
    extended = tf.distribute.get_strategy().extended
    variables = [sources[i] for i in shared if _is_variable(sources[i])]
    with step.summing(list(map(keras_internals.value_of, variables))):
        sums = extended.reduce_gradients([found[i] for i in shared])
    for i, gradient in zip(shared, sums, strict=True):
        result[i] = gradient
    return result


def _is_variable(source: object) -> bool:
    kinds: tuple[type, ...] = (tf.Variable,)
    if keras_internals.KERAS_3:
        kinds = (tf.Variable, keras.Variable)
    return isinstance(source, kinds)


def share_exchanges(
    original: Original[T], model: Model, *args: Any, **kwargs: Any
) -> T:
    call = functools.partial(original, model, *args, **kwargs)
    collectives = collectives_lib.active()
    if (
        collectives is None
        or collectives.step is None
        or tf.executing_eagerly()
        or capture.is_active()
        or sum(1 for _ in _sparse_layers(model)) < 2
    ):
        return call()
    return capture.shared(
        call,
        collectives,
        functools.partial(look_up_together, collectives=collectives),
        functools.partial(_forget, model),
        functools.partial(_share_nothing, model),
    )


def _share_nothing(model: Model, reason: str) -> None:
    """Logs why a model's lookups share no exchange, and notes it in plans."""
    note = f"The layers of model '{model.name}' share no exchange: {reason}"
    logging.getLogger("tfdist_ext").debug("%s", note)
    noted: dict[int, ShardingPlan] = {}  # layers with one plan keep one plan
    for layer in keras_internals.layers_of(model):
        plan = vars(layer).get("plan")
        if isinstance(plan, ShardingPlan):
            noted.setdefault(id(plan), dataclasses.replace(plan, note=note))
            layer.plan = noted[id(plan)]


def _sparse_layers(layer: Layer) -> Iterator[Layer]:
    """Layers inside of a layer that look up in tables in their own calls."""
    for inner in keras_internals.inner_layers(layer):
        if getattr(inner, "looks_up_tables", False):
            yield inner
        else:
            yield from _sparse_layers(inner)


def _forget(model: Model, graph: tf.Graph) -> None:
    """Removes the tensors of a graph from the lists that layers have."""

    def is_of_graph(value: tf.Tensor) -> bool:
        return tf.is_symbolic_tensor(value) and value.graph is graph

    for layer in keras_internals.layers_of(model):
        for value in vars(layer).values():
            if isinstance(value, list) and any(map(is_of_graph, value)):
                internals.keep_in_list(value, lambda v: not is_of_graph(v))
