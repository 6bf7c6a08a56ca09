# SPDX-License-Identifier: Apache-2.0
"""Which ids are frequent, learnt while training: they get shorter codes."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist_ext.collectives.collectives import Collectives
from tfdist_ext.embedding.feature import Feature
from tfdist_ext.embedding.feature import Ids

# Ids are noted in the first lookups of every period, then counted. Popularity
# changes slowly, and a count costs as much as some steps.
_PERIOD = 4096
_NOTED_LOOKUPS = 16
_NOTED_IDS = 1 << 20
# More than this gain little: the tail of a Zipf distribution is flat.
_FREQUENT_IDS = 1 << 13


class FrequentIds:
    """The frequent ids of some tables, the same on all ranks.

    Ranks count what they have looked up lately and add their counts, in one
    exchange every few thousand steps. Nothing of it is saved: it changes how
    ids are coded on the wire, not what they mean.

    Args:
        rows: of each table.
        collectives: of the strategy in scope.
        label: names the exchange in errors.
    """

    def __init__(
        self, rows: Sequence[int], collectives: Collectives, label: str
    ) -> None:
        self._rows = tuple(rows)
        self._collectives = collectives
        self._label = f"{label}/frequent ids"
        # A key is an id and its table: id * tables + table.
        self._lookups = _local_variable([])
        self._noted = _local_variable([])
        self._keys = _local_variable([_NOTED_IDS])
        self._frequent = [_local_variable([_FREQUENT_IDS]) for _ in rows]
        self._sizes = [_local_variable([]) for _ in rows]

    def of_tables(self) -> list[tf.Tensor]:
        """Per table int64 `[k]`, the most frequent first; empty at first."""
        return [
            ids[:size]
            for ids, size in zip(self._frequent, self._sizes, strict=True)
        ]

    def note(
        self, ids: Sequence[Sequence[Ids]], features: Sequence[Feature]
    ) -> None:
        """Notes what a lookup asks for; counts when it is time.

        Args:
            ids: per feature, the lists of ids.
            features: what they are looked up in.
        """
        phase = self._lookups.read_value() % _PERIOD

        def note_keys() -> tf.Tensor:
            keys = tf.concat(
                [
                    tf.cast(part.values, tf.int64) * len(self._rows)
                    + feature.table
                    for lists, feature in zip(ids, features, strict=True)
                    if not feature.deduplicate
                    for part in lists
                ],
                0,
            )
            start = tf.where(phase == 0, tf.zeros([], tf.int64), self._noted)
            keys = keys[: _NOTED_IDS - start]
            end = start + tf.size(keys, tf.int64)
            self._keys.scatter_update(
                tf.IndexedSlices(keys, tf.range(start, end))
            )
            return self._noted.assign(end)

        tf.cond(
            phase < _NOTED_LOOKUPS,
            note_keys,
            lambda: tf.zeros([], tf.int64),
        )
        tf.cond(
            tf.equal(phase, _NOTED_LOOKUPS - 1),
            self._count,
            lambda: tf.zeros([], tf.int64),
        )
        self._lookups.assign_add(1)

    def _count(self) -> tf.Tensor:
        keys, _, counts = tf.unique_with_counts(
            self._keys[: self._noted], tf.int64
        )
        repeated = tf.where(counts > 1)[:, 0]
        mine = tf.stack(
            [tf.gather(keys, repeated), tf.gather(counts, repeated)], 1
        )
        gathered = self._collectives.all_gather(mine, self._label)
        # Sorted by key first: the same order on all ranks, also among equals.
        keys, which = tf.unique(tf.sort(gathered[:, 0]), tf.int64)
        del which
        order = tf.searchsorted(keys, gathered[:, 0], out_type=tf.int64)
        totals = tf.math.unsorted_segment_sum(
            gathered[:, 1], order, tf.size(keys, tf.int64)
        )
        keys = tf.gather(keys, tf.argsort(-totals, stable=True))
        for table, rows in enumerate(self._rows):
            ids = keys // len(self._rows)
            known = (ids >= 0) & (ids < rows)
            mine = known & (keys % len(self._rows) == table)
            ids = tf.boolean_mask(ids, mine)[:_FREQUENT_IDS]
            size = tf.size(ids, tf.int64)
            self._frequent[table].scatter_update(
                tf.IndexedSlices(ids, tf.range(size))
            )
            self._sizes[table].assign(size)
        return tf.size(keys, tf.int64)


def _local_variable(shape: Sequence[int]) -> tf.Variable:
    """Of this rank alone, not saved."""
    with tf.init_scope():
        return tf.Variable(
            tf.zeros(shape, tf.int64),
            trainable=False,
            synchronization=tf.VariableSynchronization.NONE,
        )


def for_features(
    features: Sequence[Feature], collectives: Collectives | None, label: str
) -> FrequentIds | None:
    """For the tables of some features, None if no coded ids travel."""
    coded = [
        feature
        for feature in features
        if feature.spec.partitioned and not feature.deduplicate
    ]
    if collectives is None or not coded:
        return None
    rows = {feature.table: feature.spec.rows for feature in features}
    tables = [rows.get(table, 0) for table in range(max(rows) + 1)]
    return FrequentIds(tables, collectives, label)
