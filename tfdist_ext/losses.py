# SPDX-License-Identifier: Apache-2.0
"""Losses over the global batch.

`batch_mean`, `batch_sum` and `gather_batch` are for custom losses. `Retrieval`
is a softmax over the candidates of the global batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext.comm import collectives as collectives_lib
from tfdist_ext.comm import exchanges
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.comm.exchanges import check_same
from tfdist_ext.keras_internals import is_shape_inference
from tfdist_ext.keras_internals import is_symbolic_build
from tfdist_ext.numbers import whole_batch
from tfdist_ext.type_names import Loss
from tfdist_ext.type_names import Metric
from tfdist_ext.type_names import Nest
from tfdist_ext.type_names import TensorLike
from tfdist_ext.type_names import WithGradient

keras = tf.keras


def gather_candidates(x: TensorLike) -> tf.Tensor:
    """Rows of all ranks, this rank's rows first, for losses over a batch.

    Row i of `x` is row i of the result. A loss whose labels are
    `tf.eye(queries, candidates)` therefore needs no change to compare with
    the candidates of the global batch:

        rank 0 has [a b], rank 1 has [c]
        rank 0 gets [a b c], rank 1 gets [c a b]

    The gradient of a row is computed from the losses of all ranks. In `fit`
    it is the gradient of one process, for means and sums over the samples.
    In a step of a custom loop passed to `strategy.run` it is the sum over the
    ranks.

    All ranks must call this function, as they do in a step. Outside of a
    step, without a strategy and in a single process it returns `x`.

    Args:
        x: `[n, ...]`, floating, integer, bool or string. n may differ between
            the ranks and may be 0, the other dimensions may not.

    Returns:
        `[sum of n, ...]`, of the dtype of `x`; differentiable if floating.

    Raises:
        TypeError: another dtype, or a ragged or sparse tensor.
        ValueError: a scalar.
        tf.errors.InvalidArgumentError: the ranks have rows of different
            shapes or dtypes; raised on every rank.
    """
    rows, first = in_order(x)
    if first is None:
        return rows
    step = whole_batch.keras_step()
    if step is not None:
        whole_batch.dependence_in(step).own_rows_first = True
    own_first = tf.roll(rows, -first, axis=0)
    own_first.set_shape(rows.shape)
    return own_first


def in_order(x: TensorLike) -> tuple[tf.Tensor, tf.Tensor | None]:
    """Rows of all ranks in the order of the batch.

    Args:
        x: see `gather_candidates`.

    Returns:
        The rows in rank order; and the index of this rank's first row, int32,
        or None if nothing is gathered.
    """
    x = _checked(x)
    collectives = collectives_lib.active()
    step = collectives.step if collectives else None
    if collectives is None or step is None:
        return x, None
    if step.whole or step.checking:  # Every rank has the global batch.
        return x, None
    if is_symbolic_build() or is_shape_inference():
        return x, None
    kind = f"{x.dtype.name} [n{''.join(f', {d}' for d in x.shape[1:])}]"
    check_same(collectives, [f"gather_candidates of {kind}"])
    if x.dtype.is_floating:
        x = _gradient_of_all(x)
    rows, sizes = exchanges.all_gather(collectives, x, "gather_candidates")
    first = tf.reduce_sum(sizes[: collectives.group.rank])
    if x.dtype.is_floating:
        rows = _gradient_by_samples(rows)
    return rows, tf.cast(first, tf.int32)


def _checked(x: TensorLike) -> tf.Tensor:
    if isinstance(x, tf.RaggedTensor | tf.SparseTensor):
        raise TypeError(
            "gather_candidates takes dense tensors, one row for each "
            f"candidate. Received: {type(x).__name__}. Pool or pad its rows "
            "first, or gather its parts."
        )
    x = tf.convert_to_tensor(x)
    if not exchanges.can_gather(x.dtype):
        raise TypeError(
            "gather_candidates takes floating, integer, bool and string "
            f"tensors. Received: dtype {x.dtype.name}."
        )
    if x.shape.rank == 0:
        raise ValueError(
            "gather_candidates takes tensors whose first dimension counts "
            "candidates. Received: a scalar."
        )
    return x


# Ranks weight their gradients by their samples later. The gradient of a rank's
# loss by rows of other ranks must be weighted by its own samples, not theirs.


@tf.custom_gradient
def _gradient_by_samples(rows: tf.Tensor) -> WithGradient:
    """Identity whose gradient is weighted by this rank's share of samples."""

    def gradient(upstream: tf.Tensor) -> tf.Tensor:
        if whole_batch.keras_step() is None:
            return upstream
        share = tf.cast(whole_batch.share_of_rank(), upstream.dtype)
        # A rank without samples contributes zero, even for a NaN.
        return tf.math.multiply_no_nan(upstream, share)

    return tf.identity(rows), gradient


@tf.custom_gradient
def _gradient_of_all(x: tf.Tensor) -> WithGradient:
    """Identity whose gradient is divided by this rank's share of samples.

    The ranks weight the gradient by this share later.
    """

    def gradient(upstream: tf.Tensor) -> tf.Tensor:
        if whole_batch.keras_step() is None:
            return upstream
        share = tf.cast(whole_batch.share_of_rank(), upstream.dtype)
        return tf.math.divide_no_nan(upstream, share)

    return tf.identity(x), gradient


# Dtypes whose sums are rounded or overflow.
_NARROW = (tf.float16, tf.bfloat16)


def batch_mean(values: TensorLike, weights: TensorLike = None) -> tf.Tensor:
    """The mean of values of all samples of the batch, on every rank.

    `sum(weights * values) / sum(weights)` over the samples of all ranks; 0
    if the weights sum to 0. Every rank gets the value of one process, with
    any part of the batch. In a single process, and outside of a step, it is
    the plain mean.

    >>> float(batch_mean([1.0, 2.0, 6.0]))
    3.0
    >>> float(batch_mean([1.0, 2.0, 6.0], weights=[1.0, 1.0, 0.0]))
    1.5

    In a `train_step`, differentiate the result without scaling:

        losses = tf.square(labels - predictions)
        loss = tfdist_ext.losses.batch_mean(losses, weights=mask)

    In a step of a custom loop passed to `strategy.run`, gradients are summed
    over the ranks, and the sum is the gradient of this mean as well. All
    ranks must call this function; they exchange two numbers.

    Args:
        values: `[n, ...]` or a scalar of this rank, floating; the mean is over
            all elements.
        weights: shape of `values`, or of its first dimensions, or another
            shape that broadcasts to it; 1 by default.

    Returns:
        A scalar of the dtype of `values`, equal on all ranks; differentiable,
        also by `weights`.

    Raises:
        TypeError: values are not floating.
    """
    values = _floating("batch_mean", values)
    dtype = values.dtype
    values = _wide(values)
    if weights is None:
        weights = tf.ones_like(values)
    else:
        weights = _broadcast(weights, values)
    total, count = _totals(
        [tf.reduce_sum(weights * values), tf.reduce_sum(weights)]
    )
    return _of_batch(tf.cast(tf.math.divide_no_nan(total, count), dtype))


def batch_sum(values: TensorLike) -> tf.Tensor:
    """The sum of values of all samples of the batch, on every rank.

    Like `batch_mean`, it is equal on all ranks and equal to one process. In a
    single process, and outside of a step, it is the plain sum.

    >>> float(batch_sum([1.0, 2.0, 6.0]))
    9.0

    Args:
        values: `[n, ...]` or a scalar of this rank, floating; the sum is over
            all elements.

    Returns:
        A scalar of the dtype of `values`, equal on all ranks; differentiable.

    Raises:
        TypeError: values are not floating.
    """
    values = _floating("batch_sum", values)
    (total,) = _totals([tf.reduce_sum(_wide(values))])
    return _of_batch(tf.cast(total, values.dtype))


def gather_batch(tensors: Nest) -> Nest:
    """Rows of the global batch, in its order, on every rank.

    For a loss that does not decompose over the samples. The loss that every
    rank computes from these rows is that of one process. Each rank gets the
    gradient of its own rows.

        rank 0 has [a b], rank 1 has [c]
        both get [a b c]

    >>> gather_batch({"x": tf.constant([1, 2])})["x"].numpy().tolist()
    [1, 2]

    Every rank computes the *same* loss of all samples:

        labels, scores = tfdist_ext.losses.gather_batch((labels, scores))
        loss = correlation_loss(labels, scores)

    With `gather_candidates`, in contrast, a rank computes the loss of its
    *own* samples, each compared with the samples of all ranks. There the
    gradients are exchanged as well; here each rank does the work of all
    ranks. Do not mix rows of both functions in one loss.

    All ranks must call this function; they exchange all tensors at once. In a
    single process, and outside of a step, it returns `tensors`.

    Args:
        tensors: nest of dense or ragged tensors `[n, ...]`, floating, integer,
            bool or string, all of the same n on a rank; n may differ between
            ranks and may be 0, the other dimensions may not.

    Returns:
        The same nest with `[sum of n, ...]`; floating ones differentiable.

    Raises:
        TypeError: another dtype, or a sparse tensor.
        ValueError: a scalar.
        tf.errors.InvalidArgumentError: the ranks have rows of different
            shapes or dtypes; raised on every rank.
    """
    collectives = _exchanging()
    flat = [_rows(each) for each in tf.nest.flatten(tensors)]
    if collectives is not None and flat:
        found = whole_batch.gather(collectives, flat, "losses/gather_batch")
        flat = [whole_batch.connected(each) for each in found]
        if whole_batch.keras_step() is not None:
            for rows in flat:
                marks.set_reduced(rows)
    return tf.nest.pack_sequence_as(tensors, flat)


def _exchanging() -> Collectives | None:
    """Collectives of the step that is running; None if nothing is exchanged."""
    collectives = collectives_lib.active()
    step = collectives.step if collectives else None
    if step is None or step.checking or step.whole:
        return None
    if is_symbolic_build() or is_shape_inference():
        return None
    return collectives


def _floating(function: str, values: TensorLike) -> tf.Tensor:
    if isinstance(values, tf.RaggedTensor):
        values = values.flat_values
    values = tf.convert_to_tensor(values)
    if not values.dtype.is_floating:
        raise TypeError(
            f"{function} takes floating values. Received: dtype "
            f"{values.dtype.name}. Cast them: tf.cast(values, tf.float32)."
        )
    return values


def _wide(values: tf.Tensor) -> tf.Tensor:
    return tf.cast(values, tf.float32) if values.dtype in _NARROW else values


def _broadcast(weights: TensorLike, values: tf.Tensor) -> tf.Tensor:
    """Weights broadcast to the shape of the values."""
    if isinstance(weights, tf.RaggedTensor):
        weights = weights.flat_values
    weights = tf.cast(weights, values.dtype)
    missing = (values.shape.rank or 0) - (weights.shape.rank or 0)
    if weights.shape.rank:
        weights = weights[(..., *[tf.newaxis] * missing)]
    return tf.broadcast_to(weights, tf.shape(values))


def _totals(parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Sums over the ranks; each rank gets the gradient of its own parts."""
    collectives = _exchanging()
    if collectives is None:
        return list(parts)
    exchange = collectives.all_reduce
    share = whole_batch.share_of_rank() if whole_batch.keras_step() else None

    @tf.custom_gradient
    def total(*own: tf.Tensor) -> WithGradient:
        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            if share is None:
                return list(upstream)
            # Ranks average gradients weighted by their shares of samples.
            return [
                tf.math.divide_no_nan(each, tf.cast(share, each.dtype))
                for each in upstream
            ]

        return exchange(own, "losses/batch"), gradient

    return list(total(*parts))


def _of_batch(value: tf.Tensor) -> tf.Tensor:
    """Marks a value as equal on all ranks in steps of Keras's loops."""
    if whole_batch.keras_step() is not None:
        marks.set_reduced(value)
    return value


def _rows(x: TensorLike) -> tf.Tensor:
    if isinstance(x, tf.SparseTensor):
        raise TypeError(
            "gather_batch takes dense and ragged tensors. Received: "
            "SparseTensor. Use tf.sparse.to_dense or tf.RaggedTensor."
            "from_sparse first."
        )
    x = x if isinstance(x, tf.RaggedTensor) else tf.convert_to_tensor(x)
    if not exchanges.can_gather(x.dtype):
        raise TypeError(
            "gather_batch takes floating, integer, bool and string tensors. "
            f"Received: dtype {x.dtype.name}."
        )
    if x.shape.rank == 0:
        raise ValueError(
            "gather_batch takes tensors whose first dimension counts samples. "
            "Received: a scalar. Its mean over the batch is batch_mean(x)."
        )
    return x


__all__ = [
    "Retrieval",
    "batch_mean",
    "batch_sum",
    "gather_batch",
    "gather_candidates",
]


# Larger than all scores, but sums with scores do not overflow.
_FAR = float(np.finfo(np.float32).max) / 100.0


class Retrieval(keras.layers.Layer):  # type: ignore[name-defined]
    """Retrieval task: finds each query's candidate among those of the batch.

    Replaces `tfrs.tasks.Retrieval`, with the same arguments, in Keras 2 and 3.
    The negatives are the candidates of all ranks (`gather_candidates`), so
    that any number of ranks computes the loss and gradients of one process.

    >>> task = Retrieval(temperature=0.5)
    >>> task(tf.eye(2), tf.eye(2)).shape
    TensorShape([])

    Args:
        loss: Keras loss of one-hot labels and scores; by default
            `CategoricalCrossentropy(from_logits=True, reduction="sum")`.
        metrics: one or several `tfrs.metrics.FactorizedTopK`, or other
            metrics with the same `update_state`. With several ranks, their
            candidates must be a `tfdist_ext.layers.ShardedTopK`.
        batch_metrics: Keras metrics of the labels and scores.
        loss_metrics: Keras metrics of the loss.
        temperature: number that scores are divided by.
        num_hard_negatives: number of negatives of the global batch, those
            with the highest scores, that count; all if it is None or not
            positive.
        remove_accidental_hits: whether negatives with the id of a query's own
            candidate are excluded.
        name: name of the layer.
    """

    # XLA cannot compile exchanges.
    supports_jit = False

    def __init__(
        self,
        loss: Loss = None,
        metrics: Sequence[Metric] | Metric | None = None,
        batch_metrics: Sequence[Metric] | None = None,
        loss_metrics: Sequence[Metric] | None = None,
        temperature: float | None = None,
        num_hard_negatives: int | None = None,
        remove_accidental_hits: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.supports_jit = False
        self._loss = loss or keras.losses.CategoricalCrossentropy(
            from_logits=True, reduction="sum"
        )
        self.factorized_metrics = metrics
        self._batch_metrics = list(batch_metrics or [])
        self._loss_metrics = list(loss_metrics or [])
        self._temperature = temperature
        self._num_hard_negatives = num_hard_negatives
        self._remove_accidental_hits = remove_accidental_hits

    @property
    def factorized_metrics(self) -> Sequence[Metric]:
        """The metrics over all candidates."""
        return list(self._factorized_metrics)

    @factorized_metrics.setter
    def factorized_metrics(
        self, value: Sequence[Metric] | Metric | None
    ) -> None:
        if value is None:
            value = []
        if not isinstance(value, list | tuple):
            value = [value]
        self._factorized_metrics = list(value)

    def call(
        self,
        query_embeddings: tf.Tensor,
        candidate_embeddings: tf.Tensor,
        sample_weight: tf.Tensor | None = None,
        candidate_sampling_probability: tf.Tensor | None = None,
        candidate_ids: tf.Tensor | None = None,
        compute_metrics: bool = True,
        compute_batch_metrics: bool = True,
        score_mask: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """The loss of this rank's queries; updates the metrics.

        Args:
            query_embeddings: `[n, dim]`; or `[n, heads, dim]`, of which the
                head with the highest score counts.
            candidate_embeddings: `[m, dim]`. The first n are the candidates
                of the queries; others are negatives for all ranks' queries.
            sample_weight: `[n]`, weights of the queries.
            candidate_sampling_probability: `[m]`, of drawing each candidate;
                its logarithm is subtracted from the scores.
            candidate_ids: `[m]`, integers or strings.
            compute_metrics: whether to update `metrics`.
            compute_batch_metrics: whether to update `batch_metrics`.
            score_mask: bool, `[n, candidates of all ranks]` in the order of
                `gather_candidates`; False excludes a candidate.

        Returns:
            Result of the loss, a scalar by default.

        Raises:
            ValueError: `remove_accidental_hits` needs `candidate_ids`.
        """
        scores, labels, first = _scores(query_embeddings, candidate_embeddings)
        queries = tf.shape(scores)[0]
        if self._temperature is not None:
            scores /= self._temperature
        if candidate_sampling_probability is not None:
            chances, _ = in_order(candidate_sampling_probability)
            chances = tf.clip_by_value(chances, 1e-6, 1.0)
            scores -= tf.cast(tf.math.log(chances), scores.dtype)
        if self._remove_accidental_hits:
            scores -= _FAR * _hits(candidate_ids, labels, self.name)
        if score_mask is not None:
            scores = _masked(scores, score_mask, first)
        if (self._num_hard_negatives or 0) > 0:
            scores, labels = _hardest(scores, labels, self._num_hard_negatives)
        loss = self._loss(labels, scores, sample_weight=sample_weight)
        for metric in self._loss_metrics:
            metric.update_state(loss)
        for metric in self._batch_metrics if compute_batch_metrics else []:
            metric.update_state(labels, scores, sample_weight=sample_weight)
        if compute_metrics and query_embeddings.shape.rank == 2:
            if candidate_ids is not None:
                candidate_ids = tf.convert_to_tensor(candidate_ids)[:queries]
            own = candidate_embeddings[:queries]  # The others are negatives.
            self._update_factorized(
                query_embeddings, own, candidate_ids, sample_weight
            )
        return loss

    def _update_factorized(
        self,
        queries: TensorLike,
        candidates: TensorLike,
        ids: TensorLike,
        weights: TensorLike,
    ) -> None:
        for metric in self._factorized_metrics:
            metric.update_state(
                queries,
                candidates,
                true_candidate_ids=ids,
                sample_weight=weights,
            )


def _scores(
    queries: tf.Tensor, candidates: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor | int]:
    """Scores of all ranks' candidates, labels, and this rank's first column.

    Scores are at least float32, which can represent `_FAR`.
    """
    candidates, first = in_order(candidates)
    first = 0 if first is None else first
    if queries.shape.rank == 3:
        scores = tf.einsum("qne,ce->qnc", queries, candidates)
        scores = tf.reduce_max(scores, axis=1)
    else:
        scores = tf.matmul(queries, candidates, transpose_b=True)
    if scores.dtype.size < tf.float32.size:
        scores = tf.cast(scores, tf.float32)
    columns = first + tf.range(tf.shape(scores)[0])
    labels = tf.one_hot(columns, tf.shape(scores)[1], dtype=scores.dtype)
    return scores, labels, first


def _hits(ids: TensorLike, labels: tf.Tensor, name: str) -> tf.Tensor:
    """1 if a negative has the id of the query's own candidate, else 0."""
    if ids is None:
        raise ValueError(
            "remove_accidental_hits=True needs `candidate_ids`, which "
            f"identify the hits (Retrieval '{name}')."
        )
    ids = tf.convert_to_tensor(ids)
    every, _ = in_order(ids)
    own = ids[: tf.shape(labels)[0], tf.newaxis]
    same = tf.equal(own, every[tf.newaxis, :])
    return tf.cast(same, labels.dtype) - labels


def _masked(
    scores: tf.Tensor, mask: TensorLike, first: tf.Tensor | int
) -> tf.Tensor:
    """Masks scores; the mask's columns begin with this rank's candidates."""
    mask = tf.cast(mask, tf.bool)
    check = tf.debugging.assert_equal(
        tf.shape(mask),
        tf.shape(scores),
        "`score_mask` needs a row for each query of this rank and a column "
        "for each candidate of all ranks, in the order of gather_candidates.",
    )
    with tf.control_dependencies([] if check is None else [check]):
        mask = tf.roll(mask, first, axis=1)
    return tf.where(mask, scores, tf.cast(-_FAR, scores.dtype))


def _hardest(
    scores: tf.Tensor, labels: tf.Tensor, number: int | None
) -> tuple[tf.Tensor, tf.Tensor]:
    """The candidate of each query, and the negatives with highest scores."""
    assert number is not None
    count = tf.minimum(number + 1, tf.shape(scores)[1])
    _, places = tf.math.top_k(scores + labels * _FAR, count, sorted=False)
    return (
        tf.gather(scores, places, batch_dims=1),
        tf.gather(labels, places, batch_dims=1),
    )
