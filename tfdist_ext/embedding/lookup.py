# SPDX-License-Identifier: Apache-2.0
"""Middle stage: pooled lookup in the local shards, no communication."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext.embedding.feature import Feature
from tfdist_ext.embedding.input_dist import OwnedIds
from tfdist_ext.ops import lookup_ops


def lookup(
    tables: Sequence[Any], features: Sequence[Feature], ids: OwnedIds
) -> tuple[tf.Tensor, tf.Tensor]:
    """Sums the weighted rows of every sample served, of all tables at once.

    Args:
        tables: variables of `local_shape`.
        features: which table each feature reads.
        ids: rows and weights from `input_dist`.

    Returns:
        float32 `[v]`, the sums one after the other in the order of `ids`, and
        int64 `[world_size]`, how many of the numbers each rank asked for.
    """
    used = sorted({feature.table for feature in features})
    return lookup_ops.lookup(
        [tables[index] for index in used],
        ids.row_splits,
        ids.rows,
        ids.weights,
        ids.served,
        feature_tables=[used.index(feature.table) for feature in features],
    )
