# SPDX-License-Identifier: Apache-2.0
"""The area under the ROC curve within each user or session: GAUC."""

from __future__ import annotations

import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext.metrics.sums import Sums
from tfdist_ext.metrics.sums import checked_count
from tfdist_ext.metrics.sums import checked_window
from tfdist_ext.metrics.sums import flat_samples
from tfdist_ext.type_names import Config
from tfdist_ext.type_names import DTypeLike
from tfdist_ext.type_names import TensorLike
from tfdist_ext.type_names import Variable

keras = tf.keras
_registered = keras.utils.register_keras_serializable(package="tfdist_ext")

WEIGHTINGS = ("samples", "positives", "groups")


@_registered
class GAUC(keras.metrics.Metric):  # type: ignore[name-defined]
    """The mean of the AUC of each user or session, exactly.

    The AUC of a group is the probability that a positive sample of the group
    has a higher prediction than a negative one; equal predictions count half.
    Groups without positives or without negatives have none and do not count.
    The mean is weighted by `weighting`:

    - "samples": by the samples of the group, as in Zhou et al., "Deep Interest
      Network for Click-Through Rate Prediction" (KDD 2018);
    - "positives": by its positive samples, as `gauc` of RecBole
      (recbole/evaluator/metrics.py);
    - "groups": not weighted, as `GAUCMetric` of TorchRec
      (torchrec/metrics/gauc.py), which in addition leaves out groups whose
      predictions are all equal. Here their AUC is 0.5.

    A group may have samples in any batch and on any rank. For this, every rank
    stores the samples of all ranks, 28 bytes each, and each batch is sent to
    all ranks. Each result sorts the stored samples. `BucketedGAUC` is an
    approximation without these costs.

    >>> metric = GAUC(max_samples=100)
    >>> metric.update_state([1, 0, 0, 1], [0.8, 0.3, 0.9, 0.5],
    ...                     groups=[1, 1, 2, 2])
    >>> float(metric.result())
    0.5

    In `fit` and `evaluate` a model passes the groups itself, see the page
    "Metrics".

    Args:
        max_samples: number of samples that can be stored: those of an
            evaluation, or of the window's batches.
        weighting: "samples", "positives" or "groups".
        window: number of last batches that count; None for all since the last
            reset.
        name: name of the metric.
        dtype: dtype of the result.

    Raises:
        ValueError: an argument has another value.
    """

    def __init__(
        self,
        max_samples: int,
        weighting: str = "samples",
        window: int | None = None,
        name: str = "gauc",
        dtype: DTypeLike = None,
    ) -> None:
        super().__init__(name=name, dtype=dtype)
        self.max_samples = checked_count("max_samples", max_samples, 1, name)
        self.weighting = _checked_weighting(weighting, name)
        self.window = checked_window(window, name)
        # The group, and the number of the update.
        self._keys = self._state("keys", (max_samples, 2), "int64")
        # The label, the prediction and the weight.
        self._rows = self._state("rows", (max_samples, 3), "float32")
        # How many rows are stored, and how many updates there were.
        self._counts = self._state("counts", (2,), "int64")

    def _state(self, name: str, shape: tuple[int, ...], dtype: str) -> Variable:
        return self.add_weight(
            name=name, shape=shape, initializer="zeros", dtype=dtype
        )

    def update_state(
        self,
        y_true: TensorLike,
        y_pred: TensorLike,
        sample_weight: TensorLike = None,
        *,
        groups: TensorLike,
    ) -> None:
        """Adds a batch.

        Args:
            y_true: labels between 0 and 1, `[n]` or `[n, 1]`.
            y_pred: predictions, `[n]` or `[n, 1]`; only their order counts.
            sample_weight: `[n]` or `[n, 1]`; 1 by default. A pair of samples
                has the product of their weights.
            groups: integers, `[n]` or `[n, 1]`: the users or sessions.

        Raises:
            tf.errors.InvalidArgumentError: there are more than `max_samples`
                samples.
        """
        values = flat_samples(y_true, y_pred, sample_weight)
        rows = tf.cast(tf.stack(values, axis=1), tf.float32)
        groups = tf.reshape(tf.cast(groups, tf.int64), [-1])
        stored, number = tf.unstack(tf.convert_to_tensor(self._counts))
        keys = tf.stack([groups, tf.fill(tf.shape(groups), number)], axis=1)
        old_keys = tf.convert_to_tensor(self._keys)[:stored]
        old_rows = tf.convert_to_tensor(self._rows)[:stored]
        if self.window is not None:
            counts = old_keys[:, 1] > number - self.window
            old_keys = tf.boolean_mask(old_keys, counts)
            old_rows = tf.boolean_mask(old_rows, counts)
        keys = tf.concat([old_keys, keys], axis=0)
        rows = tf.concat([old_rows, rows], axis=0)
        count = tf.shape(keys, tf.int64)[0]
        with tf.control_dependencies(self._checks(count)):
            missing = tf.cast(self.max_samples, tf.int64) - count
        self._keys.assign(_filled(keys, missing, self.max_samples))
        self._rows.assign(_filled(rows, missing, self.max_samples))
        self._counts.assign(tf.stack([count, number + 1]))

    def _checks(self, count: tf.Tensor) -> list[tf.Operation]:
        check = tf.debugging.assert_less_equal(
            count,
            tf.cast(self.max_samples, tf.int64),
            f"Metric '{self.name}' can store max_samples={self.max_samples} "
            "samples, and has received more since its reset or in its window. "
            "Raise `max_samples`, lower `window`, or use BucketedGAUC.",
        )
        return [] if check is None else [check]

    def result(self) -> tf.Tensor:
        """The scalar; 0 if no group has positives and negatives."""
        stored = tf.convert_to_tensor(self._counts)[0]
        groups = tf.convert_to_tensor(self._keys)[:stored, 0]
        rows = tf.convert_to_tensor(self._rows)[:stored]
        rows = tf.cast(rows, tf.float64)
        # By group, and by prediction in each.
        order = tf.argsort(rows[:, 1])
        groups, rows = tf.gather(groups, order), tf.gather(rows, order)
        order = tf.argsort(groups, stable=True)
        groups, rows = tf.gather(groups, order), tf.gather(rows, order)
        labels, predictions, weights = tf.unstack(rows, axis=1)
        groups, count = _numbered(_differ(groups))
        ties, runs = _numbered(_differ(groups) | _differ(predictions))
        positives = tf.math.unsorted_segment_sum(weights * labels, ties, runs)
        negatives = tf.math.unsorted_segment_sum(
            weights * (1.0 - labels), ties, runs
        )
        group_of = tf.math.unsorted_segment_max(groups, ties, runs)
        # Negatives of the group with lower predictions.
        before = tf.cumsum(negatives, exclusive=True)
        of_group = tf.math.unsorted_segment_sum(negatives, group_of, count)
        before -= tf.gather(tf.cumsum(of_group, exclusive=True), group_of)
        pairs = positives * (before + 0.5 * negatives)
        won = tf.math.unsorted_segment_sum(pairs, group_of, count)
        of_positives = tf.math.unsorted_segment_sum(positives, group_of, count)
        value = _mean(won, of_positives, of_group, self.weighting)
        return tf.cast(value, self.dtype)

    def reset_state(self) -> None:
        """Removes all samples."""
        self._counts.assign(tf.zeros([2], tf.int64))

    def get_config(self) -> Config:
        """The arguments that create this metric."""
        config: Config = super().get_config()
        return config | {
            "max_samples": self.max_samples,
            "weighting": self.weighting,
            "window": self.window,
        }


def _filled(values: tf.Tensor, missing: tf.Tensor, size: int) -> tf.Tensor:
    filled = tf.pad(values, [[0, missing], [0, 0]])
    return tf.ensure_shape(filled, [size, values.shape[1]])


def _differ(values: tf.Tensor) -> tf.Tensor:
    """Whether each value differs from the one before; False for the first."""
    return tf.concat(
        [tf.zeros_like(values[:1], tf.bool), values[1:] != values[:-1]], 0
    )


def _numbered(differ: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Numbers of runs of equal values, and how many there are."""
    numbers = tf.cumsum(tf.cast(differ, tf.int64))
    return numbers, tf.reduce_max(tf.concat([numbers + 1, [0]], axis=0))


def _mean(
    won: tf.Tensor, positives: tf.Tensor, negatives: tf.Tensor, weighting: str
) -> tf.Tensor:
    """The mean of the groups' AUC.

    Args:
        won: weights of the pairs whose positive sample is first, by group.
        positives: weights of the positive samples, by group.
        negatives: weights of the negative samples, by group.
        weighting: one of `WEIGHTINGS`.
    """
    pairs = positives * negatives
    areas = tf.math.divide_no_nan(won, pairs)
    weights = {
        "samples": positives + negatives,
        "positives": positives,
        "groups": tf.ones_like(positives),
    }[weighting]
    weights = tf.where(pairs > 0, weights, 0)
    total = tf.reduce_sum(weights * areas)
    return tf.math.divide_no_nan(total, tf.reduce_sum(weights))


def _checked_weighting(weighting: str, name: str) -> str:
    if weighting in WEIGHTINGS:
        return str(weighting)
    raise ValueError(
        f"Argument `weighting` must be one of {WEIGHTINGS}. Received: "
        f"weighting={weighting!r} (metric '{name}')."
    )


@_registered
@marks.sums_over_samples
class BucketedGAUC(Sums):
    """The mean of the AUC of each user or session, from buckets.

    `GAUC` with predictions rounded down to a multiple of `1 / num_buckets`. The
    AUC of a group differs from the exact one by at most half of the share of
    its pairs of a positive and a negative sample that are in one bucket,
    because such a pair counts half.

    No samples are stored or sent. State: two float32 for each bucket of each
    group, thus 51 MB for 100000 groups and 64 buckets. Ranks send it to each
    other when the result is read. Above 16384 numbers this is at the end of an
    epoch; the logs of steps are then averages of the ranks' results. A float32
    counts exactly up to 16.7 million samples of a bucket.

    >>> metric = BucketedGAUC(num_groups=3, num_buckets=10)
    >>> metric.update_state([1, 0, 0, 1], [0.8, 0.3, 0.9, 0.5],
    ...                     groups=[1, 1, 2, 2])
    >>> float(metric.result())
    0.5

    Args:
        num_groups: number of groups; `groups` are below it.
        num_buckets: number of buckets of equal width.
        weighting: see `GAUC`.
        from_logits: whether predictions are logits.
        name: name of the metric.
        dtype: dtype of the result.

    Raises:
        ValueError: an argument has another value.
    """

    def __init__(
        self,
        num_groups: int,
        num_buckets: int = 64,
        weighting: str = "samples",
        from_logits: bool = False,
        name: str = "gauc",
        dtype: DTypeLike = None,
    ) -> None:
        checked_count("num_groups", num_groups, 1, name)
        checked_count("num_buckets", num_buckets, 2, name)
        size = num_groups * num_buckets * 2
        super().__init__(size, None, name, dtype, "float32")
        self.num_groups = num_groups
        self.num_buckets = num_buckets
        self.weighting = _checked_weighting(weighting, name)
        self.from_logits = from_logits

    def update_state(
        self,
        y_true: TensorLike,
        y_pred: TensorLike,
        sample_weight: TensorLike = None,
        *,
        groups: TensorLike,
    ) -> None:
        """Adds a batch.

        Args:
            y_true: labels between 0 and 1, `[n]` or `[n, 1]`.
            y_pred: probabilities or logits, `[n]` or `[n, 1]`.
            sample_weight: `[n]` or `[n, 1]`; 1 by default.
            groups: integers in `[0, num_groups)`, `[n]` or `[n, 1]`: the users
                or sessions.

        Raises:
            tf.errors.InvalidArgumentError: a group is not below `num_groups`,
                or is negative.
        """
        labels, chances, weights = flat_samples(
            y_true, y_pred, sample_weight, self.from_logits
        )
        groups = tf.reshape(tf.cast(groups, tf.int64), [-1])
        check = tf.debugging.Assert(
            tf.reduce_all((groups >= 0) & (groups < self.num_groups)),
            [
                f"Metric '{self.name}' takes groups in [0, {self.num_groups})."
                " Raise `num_groups`, or number the groups from 0. Received:",
                groups,
            ],
        )
        with tf.control_dependencies([] if check is None else [check]):
            buckets = tf.cast(tf.floor(chances * self.num_buckets), tf.int64)
        buckets = tf.clip_by_value(buckets, 0, self.num_buckets - 1)
        rows = tf.stack([weights * labels, weights * (1.0 - labels)], axis=1)
        found = tf.math.unsorted_segment_sum(
            rows,
            groups * self.num_buckets + buckets,
            self.num_groups * self.num_buckets,
        )
        self.add(tf.reshape(found, [-1]))

    def result(self) -> tf.Tensor:
        """The scalar; 0 if no group has positives and negatives."""
        shape = [self.num_groups, self.num_buckets, 2]
        sums = tf.cast(tf.reshape(self.totals(), shape), tf.float64)
        positives, negatives = sums[..., 0], sums[..., 1]
        before = tf.cumsum(negatives, axis=1, exclusive=True)
        won = tf.reduce_sum(positives * (before + 0.5 * negatives), axis=1)
        value = _mean(
            won,
            tf.reduce_sum(positives, axis=1),
            tf.reduce_sum(negatives, axis=1),
            self.weighting,
        )
        return self.finished(value)

    def get_config(self) -> Config:
        """The arguments that create this metric."""
        config = super().get_config()
        del config["window"]
        return config | {
            "num_groups": self.num_groups,
            "num_buckets": self.num_buckets,
            "weighting": self.weighting,
            "from_logits": self.from_logits,
        }
