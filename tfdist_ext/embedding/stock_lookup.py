# SPDX-License-Identifier: Apache-2.0
"""Lookups made of TensorFlow's own ops, for models that leave the ranks.

While a model is traced to be served, its layers ask `answer_of` before they
exchange anything: they need not know what a table is where it is served.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext.batches.ids import Ids
from tfdist_ext.embedding import combiners
from tfdist_ext.embedding.capture import Lookup
from tfdist_ext.embedding.feature import Feature
from tfdist_ext.embedding.wire import Wire
from tfdist_ext.tables.shard_spec import ShardSpec

Answer = Callable[[Lookup], list[tf.Tensor]]
# The rows float32 `[n, dim]` of ids int64 `[n]`.
RowsOf = Callable[[tf.Tensor], tf.Tensor]


class _Now(threading.local):
    answer: Answer | None = None


_now = _Now()


@contextlib.contextmanager
def answering(answer: Answer) -> Iterator[None]:
    """Lookups of this thread inside are answered by `answer`."""
    before, _now.answer = _now.answer, answer
    try:
        yield
    finally:
        _now.answer = before


def is_asked() -> bool:
    """Whether this thread traces a model that leaves the ranks."""
    return _now.answer is not None


def answer_of(lookup: Lookup) -> list[tf.Tensor] | None:
    """The answer to a lookup of a model that leaves, None of all others."""
    return None if _now.answer is None else _now.answer(lookup)


def all_rows(table: Any, spec: ShardSpec) -> tf.Tensor:
    """The rows of a table in a model that leaves, float32 `[rows, dim]`.

    Args:
        table: its variable.
        spec: of any part of it.
    """
    every = tf.range(spec.rows + 1, dtype=tf.int64)
    ids = Ids(every[:-1], every, tf.zeros([0]))
    asked = Lookup([[ids]], [Feature(spec.table, 0, spec)], [table], Wire())
    answer = answer_of(asked)
    assert answer is not None
    return answer[0]


def look_up(
    lists: Sequence[Ids], feature: Feature, rows_of: RowsOf
) -> tf.Tensor:
    """Combines the rows of every sample, in the order of its ids.

    Args:
        lists: the ids, whose results are summed.
        feature: how they are combined, and what a bad id does: "error" is
            that of the op that reads the rows.
        rows_of: reads rows of the table.

    Returns:
        float32 `[b, dim]`.
    """
    ids = tf.concat([tf.cast(part.values, tf.int64) for part in lists], 0)
    samples = [
        tf.ragged.row_splits_to_segment_ids(part.row_splits) for part in lists
    ]
    count = tf.size(lists[0].row_splits, tf.int64) - 1
    if feature.out_of_range == "ignore":
        known = (ids >= 0) & (ids < feature.spec.rows)
        rows = rows_of(tf.where(known, ids, 0))
        rows = tf.where(known[:, tf.newaxis], rows, 0.0)
    else:
        rows = rows_of(ids)
    if any(part.weights.shape.num_elements() != 0 for part in lists):
        weights = tf.concat([_weights(part) for part in lists], 0)
        rows *= weights[:, tf.newaxis]
    sums = tf.math.unsorted_segment_sum(rows, tf.concat(samples, 0), count)
    sums.set_shape([None, feature.spec.dim])
    return combiners.combine(sums, lists, feature)


def _weights(part: Ids) -> tf.Tensor:
    """The weight of every id; one where none are given."""
    missing = tf.size(part.values) - tf.size(part.weights)
    return tf.concat([part.weights, tf.ones([missing])], 0)
