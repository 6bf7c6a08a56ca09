# SPDX-License-Identifier: Apache-2.0
"""Middle stage: pooled lookup in the local shard, no communication."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist_ext.embedding.input_dist import OwnedIds
from tfdist_ext.ops import embedding_ops


def lookup(table: Any, ids: OwnedIds) -> tf.Tensor:
    """Sums the weighted rows of every sample served.

    Args:
        table: float32 variable `[local_rows, local_dim]`.
        ids: rows and weights from `input_dist`.

    Returns:
        float32 `[s, local_dim]`.
    """
    return embedding_ops.lookup(table, ids.row_splits, ids.rows, ids.weights)
