# SPDX-License-Identifier: Apache-2.0
"""The rank of held-out items among all items of the catalogue."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from quality.parts import Parts
from tfdist_ext import metrics
from tfdist_ext.layers import ShardedTopK

keras = tf.keras

K = 10


class FullRanking(keras.Model):  # type: ignore[name-defined]
    """Finds the best items of a partitioned table for queries.

    Args:
      queries: A model that computes the rows of queries.
      table: The layer with the rows of items; row 0 is no item.
      items: Rows of the table.
    """

    def __init__(self, queries: Any, table: Any, items: int) -> None:
        super().__init__()
        self.queries = queries
        every = np.arange(1, items)
        self.index = ShardedTopK(k=K).index(table, every, rows=every)

    def call(self, inputs: tuple[Any, tf.Tensor]) -> tf.Tensor:
        """Items `[b, 10]`, the best first, except those to leave out."""
        given, left_out = inputs
        rows = self.queries(given, training=False)
        if left_out.shape[1] == 0:
            return self.index(rows)[1]
        return self.index.query_with_exclusions(rows, left_out)[1]

    def compute_loss(self, *args: Any, **kwargs: Any) -> tf.Tensor:
        return tf.constant(0.0)  # Nothing is trained here.


def evaluate(
    parts: Parts,
    model: Any,
    given: np.ndarray,
    relevant: list[np.ndarray],
    left_out: list[np.ndarray],
) -> dict[str, float]:
    """Recall, NDCG, hits and MRR of the first ten items.

    Args:
      parts: With tables of tfdist_ext; of stock Keras, numpy ranks them.
      model: Has `queries`, a model, and `items`, a table with row 0 for none.
      given: Inputs of `queries`, `[n, ...]`.
      relevant: Items of each query, from 1.
      left_out: Items of each query that are not ranked.
    """
    count = model.items.input_dim
    if parts.strategy is None:
        rows = model.queries.predict(given, batch_size=256, verbose=0)
        table = np.array(model.items.embeddings)
        return by_numpy(rows @ table.T, relevant, left_out)
    with parts.scope():
        ranking = FullRanking(model.queries, model.items, count)
        kinds = (
            metrics.RecallAtK,
            metrics.NDCGAtK,
            metrics.HitAtK,
            metrics.MRRAtK,
        )
        ranking.compile(metrics=[kind(K) for kind in kinds])
    columns = ((given, _filled(left_out)), _filled(relevant))
    dataset = tf.data.Dataset.from_tensor_slices(columns).batch(64)
    logs = ranking.evaluate(dataset, return_dict=True, verbose=0)
    return {
        name: float(logs[f"{name.partition('@')[0].lower()}_at_{K}"])
        for name in ("recall@10", "NDCG@10", "hit@10", "MRR@10")
    }


def _filled(lists: list[np.ndarray]) -> np.ndarray:
    filled = np.full([len(lists), max(map(len, lists))], -1, np.int64)
    for row, each in zip(filled, lists, strict=True):
        row[: len(each)] = each
    return filled


def by_numpy(
    scores: np.ndarray, relevant: list[np.ndarray], left_out: list[np.ndarray]
) -> dict[str, float]:
    """The same from scores of all items, in one process.

    Args:
      scores: `[n, items]`; column 0 is no item.
      relevant: See `evaluate`.
      left_out: See `evaluate`.
    """
    found = []
    discounts = 1 / np.log2(np.arange(2, K + 2))
    for row, wanted, others in zip(scores, relevant, left_out, strict=True):
        row = row.copy()
        row[0] = row[others] = -np.inf
        best = np.argsort(-row, kind="stable")[:K]
        hits = np.isin(best, wanted)
        gain = discounts[hits].sum() / discounts[: min(K, len(wanted))].sum()
        hit = float(hits.any())
        first = hit / (1 + hits.argmax())
        found.append((hits.sum() / len(wanted), gain, hit, first))
    means = np.mean(found, axis=0)
    names = ("recall@10", "NDCG@10", "hit@10", "MRR@10")
    return dict(zip(names, map(float, means), strict=True))
