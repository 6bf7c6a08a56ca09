# SPDX-License-Identifier: Apache-2.0
"""Metrics of the best k items of a catalogue: recall, NDCG, MRR, hits.

They compare the identifiers that a search has found, such as those of
`tfdist_ext.layers.ShardedTopK`, with the relevant ones. The search ranks the
full catalogue; nothing is sampled.
"""

from __future__ import annotations

import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext.metrics.sums import Sums
from tfdist_ext.metrics.sums import checked_count
from tfdist_ext.type_names import Config
from tfdist_ext.type_names import DTypeLike
from tfdist_ext.type_names import TensorLike

keras = tf.keras
_registered = keras.utils.register_keras_serializable(package="tfdist_ext")


class _MeanOfQueries(Sums):
    """The weighted mean of a value for each query that has relevant items.

    Subclasses define `values`, and `prefix`, with which their names begin.
    """

    prefix = ""

    def __init__(
        self,
        k: int = 10,
        padding: int | str = -1,
        window: int | None = None,
        name: str | None = None,
        dtype: DTypeLike = None,
    ) -> None:
        name = f"{self.prefix}{k}" if name is None else name
        checked_count("k", k, 1, name)
        super().__init__(2, window, name, dtype)
        self.k = k
        self.padding = padding

    def update_state(
        self,
        y_true: TensorLike,
        y_pred: TensorLike,
        sample_weight: TensorLike = None,
    ) -> None:
        """Adds a batch.

        Args:
            y_true: identifiers of the relevant items, `[n]` for one of each
                query, or `[n, m]`, filled up with `padding`, or ragged. Each
                item is listed once.
            y_pred: identifiers that a search has found, `[n, k or more]`, the
                best first.
            sample_weight: weights of the queries, `[n]` or `[n, 1]`; 1 by
                default.

        Raises:
            ValueError: `y_pred` has another number of dimensions than two, or
                fewer than k columns.
        """
        hits, relevant = _hits(
            y_true, y_pred, self.k, self.padding, str(self.name)
        )
        counts = tf.cast(relevant > 0, tf.float64)
        if sample_weight is not None:
            weights = tf.cast(sample_weight, tf.float64)
            counts *= tf.reshape(weights, [-1])
        values = self.values(hits, tf.maximum(relevant, 1.0))
        parts = [tf.reduce_sum(counts * values), tf.reduce_sum(counts)]
        self.add(tf.stack(parts))

    def values(self, hits: tf.Tensor, relevant: tf.Tensor) -> tf.Tensor:
        """The value of each query, float64 `[n]`.

        Args:
            hits: 1 where a found item is relevant, else 0; float64 `[n, k]`.
            relevant: number of relevant items, at least 1; float64 `[n]`.
        """
        raise NotImplementedError

    def result(self) -> tf.Tensor:
        """The scalar; 0 before the first query."""
        total, count = tf.unstack(self.totals())
        return self.finished(tf.math.divide_no_nan(total, count))

    def get_config(self) -> Config:
        """The arguments that create this metric."""
        more = {"k": self.k, "padding": self.padding}
        return super().get_config() | more


def _hits(
    y_true: TensorLike,
    y_pred: TensorLike,
    k: int,
    padding: int | str,
    name: str,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Which of the first k items are relevant, and how many items are.

    Returns:
        float64 `[n, k]` and float64 `[n]`.
    """
    found = _first(y_pred, k, name)
    if isinstance(y_true, tf.RaggedTensor):
        y_true = y_true.to_tensor(default_value=padding)
    y_true = tf.convert_to_tensor(y_true)
    if y_true.dtype != found.dtype and tf.string not in (
        y_true.dtype,
        found.dtype,
    ):
        y_true = tf.cast(y_true, found.dtype)
    if y_true.shape.rank == 1:
        y_true = y_true[:, tf.newaxis]
    counts = tf.not_equal(y_true, tf.cast(padding, y_true.dtype))
    same = tf.equal(found[:, :, tf.newaxis], y_true[:, tf.newaxis, :])
    hits = tf.reduce_any(same & counts[:, tf.newaxis, :], axis=2)
    relevant = tf.reduce_sum(tf.cast(counts, tf.float64), axis=1)
    return tf.cast(hits, tf.float64), relevant


def _first(y_pred: TensorLike, k: int, name: str) -> tf.Tensor:
    found = tf.convert_to_tensor(y_pred)
    columns = found.shape[1] if found.shape.rank == 2 else 0
    if columns is None or columns >= k:
        return found[:, :k]
    raise ValueError(
        f"Metric '{name}' needs the identifiers of the best {k} items of each "
        f"query, [n, {k} or more], the best first. Received: y_pred of shape "
        f"{found.shape}. Search for more items, such as with "
        f"`ShardedTopK(k={k})`, or lower `k`."
    )


def _discounts(k: int) -> tf.Tensor:
    """1 / log2(rank + 1), float64 `[k]`."""
    ranks = tf.range(2, k + 2, dtype=tf.float64)
    return tf.math.log(tf.constant(2.0, tf.float64)) / tf.math.log(ranks)


@_registered
@marks.sums_over_samples
class RecallAtK(_MeanOfQueries):
    """The share of a query's relevant items that are among the first k.

    The mean over the queries that have relevant items. As `recall` of RecBole
    (recbole/evaluator/metrics.py) and `RecallSessionMetric` of TorchRec.

    State: 2 numbers of float64, for each batch of the window.

    >>> metric = RecallAtK(k=2)
    >>> metric.update_state([[7, 9]], [[7, 1, 9]])
    >>> float(metric.result())
    0.5

    Args:
        k: number of items.
        padding: identifier that fills up `y_true` and is no item; "" for
            strings.
        window: number of last batches that count; None for all since the last
            reset.
        name: name of the metric; "recall_at_K" by default.
        dtype: dtype of the result.
    """

    prefix = "recall_at_"

    def values(self, hits: tf.Tensor, relevant: tf.Tensor) -> tf.Tensor:
        """The recall of each query."""
        return tf.reduce_sum(hits, axis=1) / relevant


@_registered
@marks.sums_over_samples
class HitAtK(_MeanOfQueries):
    """The share of queries with a relevant item among the first k.

    The mean over the queries that have relevant items. As `hit` of RecBole
    (recbole/evaluator/metrics.py). With one relevant item per query it equals
    the recall.

    State: 2 numbers of float64, for each batch of the window.

    >>> metric = HitAtK(k=2)
    >>> metric.update_state([7, 8], [[1, 7, 9], [1, 2, 8]])
    >>> float(metric.result())
    0.5

    Args:
        k: number of items.
        padding: identifier that fills up `y_true` and is no item; "" for
            strings.
        window: number of last batches that count; None for all since the last
            reset.
        name: name of the metric; "hit_at_K" by default.
        dtype: dtype of the result.
    """

    prefix = "hit_at_"

    def values(self, hits: tf.Tensor, relevant: tf.Tensor) -> tf.Tensor:
        """1 for each query with a hit."""
        return tf.reduce_max(hits, axis=1)


@_registered
@marks.sums_over_samples
class MRRAtK(_MeanOfQueries):
    """The reciprocal rank of the first relevant item; 0 if it is after k.

    The mean over the queries that have relevant items. As `mrr` of RecBole
    (recbole/evaluator/metrics.py).

    State: 2 numbers of float64, for each batch of the window.

    >>> metric = MRRAtK(k=3)
    >>> metric.update_state([7, 8], [[1, 7, 9], [1, 2, 3]])
    >>> float(metric.result())
    0.25

    Args:
        k: number of items.
        padding: identifier that fills up `y_true` and is no item; "" for
            strings.
        window: number of last batches that count; None for all since the last
            reset.
        name: name of the metric; "mrr_at_K" by default.
        dtype: dtype of the result.
    """

    prefix = "mrr_at_"

    def values(self, hits: tf.Tensor, relevant: tf.Tensor) -> tf.Tensor:
        """The reciprocal rank of each query."""
        ranks = tf.range(1, self.k + 1, dtype=tf.float64)
        return tf.reduce_max(hits / ranks, axis=1)


@_registered
@marks.sums_over_samples
class NDCGAtK(_MeanOfQueries):
    """Normalized discounted cumulative gain of the first k items.

    `sum over the hits of 1 / log2(rank + 1)`, divided by that of the best
    order, in which the first min(k, relevant items) are hits. The mean over the
    queries that have relevant items. As `ndcg` of RecBole
    (recbole/evaluator/metrics.py), after Järvelin and Kekäläinen, "Cumulated
    Gain-Based Evaluation of IR Techniques" (TOIS 2002), with gains of 0 and 1.
    `NDCGMetric` of TorchRec is another metric: it ranks the items of a session
    by given gains.

    State: 2 numbers of float64, for each batch of the window.

    >>> metric = NDCGAtK(k=3)
    >>> metric.update_state([7, 8], [[7, 1, 9], [1, 2, 8]])
    >>> float(metric.result())
    0.75

    Args:
        k: number of items.
        padding: identifier that fills up `y_true` and is no item; "" for
            strings.
        window: number of last batches that count; None for all since the last
            reset.
        name: name of the metric; "ndcg_at_K" by default.
        dtype: dtype of the result.
    """

    prefix = "ndcg_at_"

    def values(self, hits: tf.Tensor, relevant: tf.Tensor) -> tf.Tensor:
        """The NDCG of each query."""
        discounts = _discounts(self.k)
        gained = tf.reduce_sum(hits * discounts, axis=1)
        best = tf.cast(tf.minimum(relevant, self.k), tf.int32) - 1
        return gained / tf.gather(tf.cumsum(discounts), best)


@_registered
@marks.sums_over_samples
class ItemCoverageAtK(Sums):
    """The share of the catalogue that is among the first k of any query.

    As `itemcoverage` of RecBole (recbole/evaluator/metrics.py).

    State: a float32 for each item, for each batch of the window. Ranks send it
    to each other when the result is read. Above 16384 items this is at the end
    of an epoch; the logs of steps are then averages of the ranks' results.

    >>> metric = ItemCoverageAtK(num_items=4, k=2)
    >>> metric.update_state(None, [[0, 3, 1], [3, 0, 2]])
    >>> float(metric.result())
    0.5

    Args:
        num_items: number of items; identifiers are below it.
        k: number of items of each query.
        window: number of last batches that count; None for all since the last
            reset.
        name: name of the metric; "item_coverage_at_K" by default.
        dtype: dtype of the result.
    """

    def __init__(
        self,
        num_items: int,
        k: int = 10,
        window: int | None = None,
        name: str | None = None,
        dtype: DTypeLike = None,
    ) -> None:
        name = f"item_coverage_at_{k}" if name is None else name
        checked_count("num_items", num_items, 1, name)
        checked_count("k", k, 1, name)
        super().__init__(num_items, window, name, dtype, "float32")
        self.num_items = num_items
        self.k = k

    def update_state(
        self,
        y_true: TensorLike,
        y_pred: TensorLike,
        sample_weight: TensorLike = None,
    ) -> None:
        """Adds a batch.

        Args:
            y_true: not used; may be None.
            y_pred: integer identifiers that a search has found,
                `[n, k or more]`, the best first. Negative ones do not count.
            sample_weight: weights of the queries, `[n]` or `[n, 1]`; queries
                of weight 0 do not count.

        Raises:
            ValueError: `y_pred` has another number of dimensions than two, or
                fewer than k columns.
        """
        del y_true
        found = tf.cast(_first(y_pred, self.k, str(self.name)), tf.int64)
        if sample_weight is not None:
            counts = tf.reshape(tf.not_equal(sample_weight, 0), [-1, 1])
            found = tf.where(counts, found, -1)
        found = tf.reshape(found, [-1])
        ones = tf.ones_like(found, tf.float32)
        self.add(tf.math.unsorted_segment_sum(ones, found, self.num_items))

    def result(self) -> tf.Tensor:
        """The scalar, between 0 and 1."""
        seen = tf.cast(self.totals() > 0, tf.float64)
        return self.finished(tf.reduce_mean(seen))

    def get_config(self) -> Config:
        """The arguments that create this metric."""
        more = {"num_items": self.num_items, "k": self.k}
        return super().get_config() | more
