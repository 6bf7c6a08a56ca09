# SPDX-License-Identifier: Apache-2.0
"""Metrics of predicted probabilities: normalized entropy and calibration."""

from __future__ import annotations

import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext.metrics.sums import Sums
from tfdist_ext.metrics.sums import checked_count
from tfdist_ext.metrics.sums import flat_samples
from tfdist_ext.type_names import Config
from tfdist_ext.type_names import DTypeLike
from tfdist_ext.type_names import TensorLike

keras = tf.keras
_registered = keras.utils.register_keras_serializable(package="tfdist_ext")

# Probabilities are kept this far from 0 and 1, as in TorchRec's NE.
_ETA = 1e-12


class _OfPredictions(Sums):
    """Sums over labels and predicted probabilities.

    Subclasses define `sums_of`, and `result`.
    """

    def __init__(
        self,
        size: int,
        from_logits: bool,
        window: int | None,
        name: str,
        dtype: DTypeLike,
    ) -> None:
        super().__init__(size, window, name, dtype)
        self.from_logits = from_logits

    def update_state(
        self,
        y_true: TensorLike,
        y_pred: TensorLike,
        sample_weight: TensorLike = None,
    ) -> None:
        """Adds a batch.

        Args:
            y_true: labels between 0 and 1, of as many elements as `y_pred`.
            y_pred: probabilities or logits, `[n, ...]`.
            sample_weight: the shape of `y_pred` or of its first dimensions; 1
                by default.
        """
        self.add(
            self.sums_of(
                *flat_samples(y_true, y_pred, sample_weight, self.from_logits)
            )
        )

    def sums_of(
        self, labels: tf.Tensor, chances: tf.Tensor, weights: tf.Tensor
    ) -> tf.Tensor:
        """The sums of a batch, float64 `[size]`; the arguments are `[n]`."""
        raise NotImplementedError

    def get_config(self) -> Config:
        """The arguments that create this metric."""
        return super().get_config() | {"from_logits": self.from_logits}


@_registered
@marks.sums_over_samples
class NormalizedEntropy(_OfPredictions):
    """Cross-entropy, divided by that of the mean label: NE.

    `sum(w * ce(y, p)) / (positives * -log(m) + negatives * -log(1 - m))`, where
    `m` is the weighted mean of the labels. It is 1 for a model that always
    predicts this mean, and lower for a better model. Also called normalized
    cross-entropy.

    As `NEMetric` of TorchRec (torchrec/metrics/ne.py), after He et al.,
    "Practical Lessons from Predicting Clicks on Ads at Facebook" (ADKDD 2014).
    Probabilities and the mean are clipped to [1e-12, 1 - 1e-12].

    State: 4 numbers of float64, for each batch of the window.

    >>> metric = NormalizedEntropy()
    >>> metric.update_state([1, 0, 0, 1], [0.5, 0.5, 0.5, 0.5])
    >>> float(metric.result())
    1.0

    Args:
        from_logits: whether predictions are logits.
        window: number of last batches that count; None for all since the last
            reset.
        name: name of the metric.
        dtype: dtype of the result.
    """

    def __init__(
        self,
        from_logits: bool = False,
        window: int | None = None,
        name: str = "ne",
        dtype: DTypeLike = None,
    ) -> None:
        super().__init__(4, from_logits, window, name, dtype)

    def sums_of(
        self, labels: tf.Tensor, chances: tf.Tensor, weights: tf.Tensor
    ) -> tf.Tensor:
        """See the base class."""
        losses = _entropy(labels, 1.0 - labels, chances)
        parts = [losses, tf.ones_like(labels), labels, 1.0 - labels]
        return tf.stack([tf.reduce_sum(weights * each) for each in parts])

    def result(self) -> tf.Tensor:
        """The scalar; 0 before the first sample."""
        loss, count, positives, negatives = tf.unstack(self.totals())
        mean = tf.math.divide_no_nan(positives, count)
        norm = _entropy(positives, negatives, mean)
        return self.finished(tf.math.divide_no_nan(loss, norm))


def _entropy(
    positives: tf.Tensor, negatives: tf.Tensor, chances: tf.Tensor
) -> tf.Tensor:
    chances = tf.clip_by_value(chances, _ETA, 1.0 - _ETA)
    return -positives * tf.math.log(chances) - negatives * tf.math.log1p(
        -chances
    )


@_registered
@marks.sums_over_samples
class Calibration(_OfPredictions):
    """The sum of predictions, divided by the sum of labels.

    `sum(w * p) / sum(w * y)`. It is 1 for a model that predicts as many clicks
    as there are, and 0 if the labels sum to 0, as `CalibrationMetric` of
    TorchRec (torchrec/metrics/calibration.py).

    State: 2 numbers of float64, for each batch of the window.

    >>> metric = Calibration()
    >>> metric.update_state([1, 0, 0, 1], [0.5, 0.25, 0.25, 0.5])
    >>> float(metric.result())
    0.75

    Args:
        from_logits: whether predictions are logits.
        window: number of last batches that count; None for all since the last
            reset.
        name: name of the metric.
        dtype: dtype of the result.
    """

    def __init__(
        self,
        from_logits: bool = False,
        window: int | None = None,
        name: str = "calibration",
        dtype: DTypeLike = None,
    ) -> None:
        super().__init__(2, from_logits, window, name, dtype)

    def sums_of(
        self, labels: tf.Tensor, chances: tf.Tensor, weights: tf.Tensor
    ) -> tf.Tensor:
        """See the base class."""
        parts = (chances, labels)
        return tf.stack([tf.reduce_sum(weights * each) for each in parts])

    def result(self) -> tf.Tensor:
        """The scalar; 0 if the labels sum to 0 or less."""
        predicted, actual = tf.unstack(self.totals())
        ratio = tf.math.divide_no_nan(predicted, actual)
        return self.finished(tf.where(actual > 0, ratio, 0))


@_registered
@marks.sums_over_samples
class ExpectedCalibrationError(_OfPredictions):
    """How far predicted probabilities are from the rates of positives: ECE.

    Probabilities are sorted into bins of equal width. The result is the mean
    over the bins of `|mean prediction - mean label|`, weighted by the samples
    of each bin.

    After Naeini et al., "Obtaining Well Calibrated Probabilities Using
    Bayesian Binning" (AAAI 2015), for the probability of the label 1. Bin `i`
    of `b` is `[i / b, (i + 1) / b)`; a probability of 1 is in the last one.

    State: 3 numbers of float64 for each bin, for each batch of the window.

    >>> metric = ExpectedCalibrationError(num_bins=2)
    >>> metric.update_state([1, 0, 1, 1], [0.25, 0.25, 0.75, 0.75])
    >>> float(metric.result())
    0.25

    Args:
        num_bins: number of bins.
        from_logits: whether predictions are logits.
        window: number of last batches that count; None for all since the last
            reset.
        name: name of the metric.
        dtype: dtype of the result.
    """

    def __init__(
        self,
        num_bins: int = 15,
        from_logits: bool = False,
        window: int | None = None,
        name: str = "ece",
        dtype: DTypeLike = None,
    ) -> None:
        checked_count("num_bins", num_bins, 1, name)
        super().__init__(3 * num_bins, from_logits, window, name, dtype)
        self.num_bins = num_bins

    def sums_of(
        self, labels: tf.Tensor, chances: tf.Tensor, weights: tf.Tensor
    ) -> tf.Tensor:
        """See the base class."""
        bins = tf.cast(tf.floor(chances * self.num_bins), tf.int32)
        bins = tf.clip_by_value(bins, 0, self.num_bins - 1)
        rows = tf.stack([weights, weights * chances, weights * labels], axis=1)
        found = tf.math.unsorted_segment_sum(rows, bins, self.num_bins)
        return tf.reshape(found, [-1])

    def result(self) -> tf.Tensor:
        """The scalar, between 0 and 1; 0 before the first sample."""
        sums = tf.reshape(self.totals(), [self.num_bins, 3])
        gaps = tf.reduce_sum(tf.abs(sums[:, 1] - sums[:, 2]))
        count = tf.reduce_sum(sums[:, 0])
        return self.finished(tf.math.divide_no_nan(gaps, count))

    def get_config(self) -> Config:
        """The arguments that create this metric."""
        return super().get_config() | {"num_bins": self.num_bins}
