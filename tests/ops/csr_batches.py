# SPDX-License-Identifier: Apache-2.0
"""Random batches of ids, as lists with the places where samples begin."""

import numpy as np


def csr_batch(rng, samples, most, rows, weighted=False):
    """Some ids per sample, or none.

    Args:
        rng: NumPy's generator.
        samples: how many.
        most: ids that a sample may have.
        rows: ids are below.
        weighted: whether ids have weights; they are empty otherwise.

    Returns:
        int64 ids `[n]` and row_splits `[samples + 1]`, float32 weights.
    """
    counts = rng.integers(0, most + 1, samples)
    row_splits = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    ids = rng.integers(0, rows, row_splits[-1])
    weights = rng.normal(size=len(ids) * weighted).astype(np.float32)
    return ids, row_splits, weights
