# SPDX-License-Identifier: Apache-2.0
"""What the owners of some tables send to a rank that asked them."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tests.ops import row_rules
from tfdist_ext.tables.placement import FeaturePlacement

# Three ranks: by row, by row and column, on one; widths of all kinds.
PLACEMENTS = [
    FeaturePlacement("row", 97, 5, 3, 1, (2, 0, 1)),
    FeaturePlacement("grid", 97, 67, 1, 2, (0, 2)),
    FeaturePlacement("none", 97, 3, 1, 1, (2,)),
    FeaturePlacement("one", 97, 16, 1, 1, (1,)),
]
SAMPLES = (8, 300, 0, 5)


def sent(
    factor: float,
) -> tuple[tf.Tensor, np.ndarray, np.ndarray, list[tf.Tensor]]:
    """Parts, samples and splits of `join_parts`, and gradients of its results.

    Args:
        factor: of the gradients.
    """
    rng = np.random.default_rng(6)
    ids, splits, numbers = [], np.zeros([3, len(PLACEMENTS)], np.int64), 0
    for rank in range(3):
        for f, placement in enumerate(PLACEMENTS):
            if rank not in placement.ranks:
                continue
            sent = np.flatnonzero(rng.random(SAMPLES[f]) < 0.6)
            ids.append(sent)
            splits[rank, f] = len(sent)
            part = placement.ranks.index(rank) % placement.column_parts
            edges = np.arange(placement.column_parts + 1) * placement.dim
            width = np.diff(edges // placement.column_parts)[part]
            numbers += len(sent) * int(width)
    parts = tf.constant(rng.normal(size=numbers).astype(np.float32))
    grads = [
        tf.constant(row_rules.values(rng, samples, placement.dim) * factor)
        for samples, placement in zip(SAMPLES, PLACEMENTS, strict=True)
    ]
    return parts, np.concatenate(ids).astype(np.int32), splits, grads
