# SPDX-License-Identifier: Apache-2.0
"""Counts of the samples that have looked up each row of a gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from tfdist_ext.ops.id_ops import unique_ids
from tfdist_ext.ops.optimizer_ops import sum_duplicate_rows


@dataclasses.dataclass(frozen=True)
class RowCounts:
    """The inputs of a lookup that say how many samples have each row.

    Nothing is computed before `count` is called.

    Attributes:
        row_splits: int64 `[S + 1]`, row splits of the samples.
        rows: int64 `[n]`, rows of the table of the sample's feature.
        served: int64 `[world_size, F]`, samples of every rank and feature.
        feature_tables: index of every feature's table.
        table: index of the table whose rows are counted.
        table_rows: number of rows of the table on this rank.
        of_samples: returns how many samples each of the S entries stands for,
            float32 `[S]`; None if each stands for one.
    """

    row_splits: tf.Tensor
    rows: tf.Tensor
    served: tf.Tensor
    feature_tables: tuple[int, ...]
    table: int
    table_rows: int
    of_samples: Callable[[], tf.Tensor] | None

    def count(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Counts the samples.

        A sample that has a row twice in one feature counts once; one that has
        it in two features of a table counts twice.

        Returns:
            The unique rows, int64 `[u]`, ascending, and their samples, float32
            `[u, 1]`.
        """
        count = tf.size(self.row_splits) - 1
        ranks_features = tf.reshape(self.served, [-1])
        tables = tf.tile(self.feature_tables, tf.shape(self.served)[:1])
        # Tables of the samples, then entries of this table.
        tables = tf.repeat(tables, ranks_features)
        samples, rows = pairs(self.row_splits, self.rows)
        mine = tf.gather(tables, samples) == self.table
        samples = tf.boolean_mask(samples, mine)
        rows = tf.boolean_mask(rows, mine)
        samples, rows = without_repetitions(samples, rows, self.table_rows)
        each = tf.ones([count])
        if self.of_samples is not None:
            each = self.of_samples()
        return sum_duplicate_rows(rows, tf.gather(each, samples)[:, tf.newaxis])


def pairs(
    row_splits: tf.Tensor, rows: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Samples and rows of all entries, int64 `[n]` each.

    Args:
        row_splits: int64 `[S + 1]`, row splits of the samples.
        rows: int64 `[n]`.
    """
    lengths = row_splits[1:] - row_splits[:-1]
    samples = tf.repeat(tf.range(tf.size(lengths, tf.int64)), lengths)
    return samples, rows


def without_repetitions(
    samples: tf.Tensor, rows: tf.Tensor, table_rows: int | tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """The distinct pairs of a sample and a row, int64 `[m]` each.

    Args:
        samples: int64 `[n]`.
        rows: int64 `[n]`, below `table_rows`.
        table_rows: number of rows of the table.
    """
    factor = tf.maximum(tf.cast(table_rows, tf.int64), 1)
    found, _ = unique_ids(samples * factor + rows)
    return found // factor, found % factor
