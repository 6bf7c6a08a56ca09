# SPDX-License-Identifier: Apache-2.0
"""The task of retrieval: softmax over the candidates of the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext.losses.gathering import in_order

keras = tf.keras

# Far from all scores, and far from overflow where scores are added to it.
_FAR = float(np.finfo(np.float32).max) / 100.0


class Retrieval(keras.layers.Layer):  # type: ignore[name-defined]
    """The candidate of each query is to be found among those of the batch.

    A drop-in for `tfrs.tasks.Retrieval`, with its arguments, for either Keras.
    Negatives are the candidates of all ranks (`gather_candidates`), so that
    any number of ranks gives one process's loss and gradients.

    >>> task = Retrieval(temperature=0.5)
    >>> task(tf.eye(2), tf.eye(2)).shape
    TensorShape([])

    Args:
        loss: of Keras, of one-hot labels and scores; by default
            `CategoricalCrossentropy(from_logits=True, reduction="sum")`.
        metrics: one or several `tfrs.metrics.FactorizedTopK`, or others with
            its `update_state`. Under a strategy of several ranks, their
            candidates are to be a `tfdist_ext.layers.ShardedTopK`.
        batch_metrics: of Keras, of the labels and scores.
        loss_metrics: of Keras, of the loss.
        temperature: by which scores are divided.
        num_hard_negatives: how many negatives with the highest scores count,
            of the whole batch; all if it is None or not positive.
        remove_accidental_hits: whether negatives with the id of a query's own
            candidate do not count.
        name: of the layer.
    """

    # XLA cannot compile what the ranks exchange.
    supports_jit = False

    def __init__(
        self,
        loss: Any = None,
        metrics: Any = None,
        batch_metrics: Sequence[Any] | None = None,
        loss_metrics: Sequence[Any] | None = None,
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
    def factorized_metrics(self) -> Sequence[Any]:
        """The metrics over all candidates there are."""
        return list(self._factorized_metrics)

    @factorized_metrics.setter
    def factorized_metrics(self, value: Any) -> None:
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
            candidate_embeddings: `[m, dim]`, the first n of them those of the
                queries; more are negatives of all queries of all ranks.
            sample_weight: `[n]`.
            candidate_sampling_probability: `[m]`, of each candidate to be in
                a batch: its logarithm is taken from the scores.
            candidate_ids: `[m]`, integers or strings.
            compute_metrics: whether to update `metrics`.
            compute_batch_metrics: whether to update `batch_metrics`.
            score_mask: bool, `[n, candidates of all ranks]` in the order of
                `gather_candidates`; false where a candidate does not count.

        Returns:
            What the loss gives, a scalar by default.

        Raises:
            ValueError: without `candidate_ids`, where hits are to be removed.
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
            own = candidate_embeddings[:queries]  # more are negatives
            self._update_factorized(
                query_embeddings, own, candidate_ids, sample_weight
            )
        return loss

    def _update_factorized(
        self, queries: Any, candidates: Any, ids: Any, weights: Any
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
    """Products with the candidates of all ranks, labels, the first own column.

    At least float32, where numbers as far as `_FAR` can be told.
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


def _hits(ids: Any, labels: tf.Tensor, name: str) -> tf.Tensor:
    """1 where a negative has the id of the query's own candidate, else 0."""
    if ids is None:
        raise ValueError(
            "remove_accidental_hits=True needs `candidate_ids`, by which hits "
            f"are told (Retrieval '{name}')."
        )
    ids = tf.convert_to_tensor(ids)
    every, _ = in_order(ids)
    own = ids[: tf.shape(labels)[0], tf.newaxis]
    same = tf.equal(own, every[tf.newaxis, :])
    return tf.cast(same, labels.dtype) - labels


def _masked(scores: tf.Tensor, mask: Any, first: tf.Tensor | int) -> tf.Tensor:
    """Scores without those that a mask, this rank's columns first, leaves."""
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
