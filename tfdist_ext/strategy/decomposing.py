# SPDX-License-Identifier: Apache-2.0
"""Keras's losses and metrics that decompose over the samples of a batch.

Their value on the global batch follows from the values that each rank
computes on its own samples: such a loss is a mean or a sum of one value per
sample, and the states of such a metric are sums over samples. All other losses
and metrics are computed on the global batch. The lists are explicit. A name is
listed if its definition decomposes, and a test compares every public loss and
metric of Keras with one process.

These losses and metrics of Keras are not listed: `dice`, `tversky` and `circle`
reduce over the batch; `hinge` and `squared_hinge` check all labels to
distinguish 0 and 1 from -1 and 1; `ctc` fails on a rank without samples;
`MeanTensor` and `MeanRelativeError` have a state for each position in the
batch.

Metrics of this package are marked in their classes, see
`marks.sums_over_samples`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import tensorflow as tf

from tfdist_ext import keras_internals
from tfdist_ext import marks
from tfdist_ext.type_names import Loss
from tfdist_ext.type_names import Metric
from tfdist_ext.type_names import Nest
from tfdist_ext.type_names import TensorLike

keras = tf.keras

# Losses that are a mean of values of elements over the last axis.
_ELEMENT_MEANS = (
    "binary_crossentropy",
    "binary_focal_crossentropy",
    "huber",
    "log_cosh",
    "logcosh",
    "mean_absolute_error",
    "mean_absolute_percentage_error",
    "mean_squared_error",
    "mean_squared_logarithmic_error",
    "mae",
    "mape",
    "mse",
    "msle",
    "poisson",
)
_LOSSES = (
    *_ELEMENT_MEANS,
    "categorical_crossentropy",
    "categorical_focal_crossentropy",
    "categorical_generalized_cross_entropy",
    "categorical_hinge",
    "cosine_similarity",
    "kl_divergence",
    "kld",
    "sparse_categorical_crossentropy",
)
# Metrics of single elements, in any number of dimensions.
_ELEMENT_METRICS = ("Accuracy", "BinaryAccuracy")
_METRIC_FUNCTIONS = (
    "binary_accuracy",
    "categorical_accuracy",
    "concordance_correlation",
    "pearson_correlation",
    "sparse_categorical_accuracy",
    "sparse_top_k_categorical_accuracy",
    "top_k_categorical_accuracy",
)
# Functions whose labels have one dimension less than their predictions.
_SPARSE = (
    "sparse_categorical_accuracy",
    "sparse_categorical_crossentropy",
    "sparse_top_k_categorical_accuracy",
)
_METRICS = (
    "AUC",
    "Accuracy",
    "BinaryAccuracy",
    "BinaryCrossentropy",
    "BinaryIoU",
    "CategoricalAccuracy",
    "CategoricalCrossentropy",
    "CategoricalHinge",
    "ConcordanceCorrelation",
    "CosineSimilarity",
    "F1Score",
    "FBetaScore",
    "FalseNegatives",
    "FalsePositives",
    "IoU",
    "KLDivergence",
    "LogCoshError",
    "Mean",
    "MeanAbsoluteError",
    "MeanAbsolutePercentageError",
    "MeanIoU",
    "MeanSquaredError",
    "MeanSquaredLogarithmicError",
    "OneHotIoU",
    "OneHotMeanIoU",
    "PearsonCorrelation",
    "Poisson",
    "Precision",
    "PrecisionAtRecall",
    "R2Score",
    "Recall",
    "RecallAtPrecision",
    "RootMeanSquaredError",
    "SensitivityAtSpecificity",
    "SparseCategoricalAccuracy",
    "SparseCategoricalCrossentropy",
    "SparseTopKCategoricalAccuracy",
    "SpecificityAtSensitivity",
    "Sum",
    "TopKCategoricalAccuracy",
    "TrueNegatives",
    "TruePositives",
)
_METRIC_METHODS = ("update_state", "result", "reset_state")


def is_loss_local(
    loss: Loss, y_true: Nest, y_pred: Nest, sample_weight: Nest
) -> bool:
    """Whether a loss can be computed on each rank's own samples.

    Args:
        loss: an instance of Keras's `Loss`.
        y_true: labels of the call.
        y_pred: predictions of the call.
        sample_weight: sample weights of the call, or None.
    """
    kind = type(loss)
    stock = keras.losses.MeanSquaredError
    if kind.call is not stock.call or kind.__call__ is not stock.__call__:
        return False
    function = getattr(loss, "fn", None)
    if not _is_one_of(function, _named(_LOSSES)):
        return False
    arguments = keras_internals.function_arguments(loss)
    weighted = sample_weight is not None
    return _is_by_sample(function, arguments, (y_true, y_pred), weighted)


def is_metric_local(
    metric: Metric, args: tuple[object, ...], weighted: bool
) -> bool:
    """Whether the states of a metric are sums over the samples of each rank.

    Args:
        metric: an instance of Keras's `Metric`.
        args: arguments of the call of `update_state`, without weights.
        weighted: whether the call has weights.
    """
    if not is_metric_class_local(type(metric)):
        return False
    if not isinstance(metric, keras.metrics.MeanMetricWrapper):
        return True
    known = _known_class(type(metric))
    if known in [getattr(keras.metrics, name) for name in _ELEMENT_METRICS]:
        return True
    function = keras_internals.metric_function(metric)
    arguments = keras_internals.function_arguments(metric)
    functions = _named((*_LOSSES, *_METRIC_FUNCTIONS))
    stock = known is not keras.metrics.MeanMetricWrapper
    if len(args) < 2 or not (stock or _is_one_of(function, functions)):
        return False
    return _is_by_sample(function, arguments, args[:2], weighted)


def is_metric_class_local(kind: type[Metric]) -> bool:
    """Whether a class has the states and the result of a listed metric."""
    known = _known_class(kind)
    return known is not None and all(
        getattr(kind, name) is getattr(known, name) for name in _METRIC_METHODS
    )


@functools.cache
def _named(names: tuple[str, ...]) -> tuple[Callable[..., tf.Tensor], ...]:
    """Functions of these names that the installed Keras has."""
    found = [
        getattr(module, name, None)
        for name in names
        for module in (keras.losses, keras.metrics)
    ]
    return tuple(each for each in found if each is not None)


def _is_one_of(function: object, known: tuple[object, ...]) -> bool:
    return any(function is each for each in known)


@functools.cache
def _metric_classes() -> tuple[type[Metric], ...]:
    names = (*_METRICS, "MeanMetricWrapper")
    found = [getattr(keras.metrics, name, None) for name in names]
    return tuple(each for each in found if each is not None)


def _known_class(kind: type[Metric]) -> type[Metric] | None:
    """First class in the method resolution order that is listed or marked.

    None if a class of Keras that is not listed comes before it.
    """
    for each in kind.__mro__:
        if each in _metric_classes() or marks.has_sums_over_samples(each):
            return each
        if keras_internals.is_keras_class(each):
            return None
    return None


def _is_by_sample(
    function: object,
    arguments: dict[str, object],
    values: tuple[object, ...],
    weighted: bool,
) -> bool:
    """Whether a listed function returns a value for each sample.

    If labels and predictions have one dimension, the function reduces the
    dimension of the batch. This decomposes only for a mean of equally weighted
    elements.
    """
    if arguments.get("ignore_class") is not None:
        return False
    axis = arguments.get("axis", -1)
    if not isinstance(axis, int) or axis == 0 or axis < -1:
        return False
    if any(isinstance(value, tf.RaggedTensor) for value in values):
        return False
    ranks = [_rank(value) for value in values]
    if _is_one_of(function, _named(_SPARSE)):
        ranks = ranks[1:]
    if None in ranks:
        return False
    if min(rank for rank in ranks if rank is not None) >= 2:
        return True
    means = _named((*_ELEMENT_MEANS, "binary_accuracy"))
    masked = keras_internals.mask_of(values[-1]) is not None
    return _is_one_of(function, means) and not weighted and not masked


def _rank(value: TensorLike) -> int | None:
    if not hasattr(value, "shape"):
        try:
            value = tf.convert_to_tensor(value)
        except (TypeError, ValueError):
            return None
    rank = tf.TensorShape(value.shape).rank
    return None if rank is None else int(rank)
