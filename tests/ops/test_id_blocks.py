# SPDX-License-Identifier: Apache-2.0
"""Sections cut into blocks, as GPUs read them, say what whole ones say."""

import numpy as np
import pytest

from tests.ops.id_exchange import NONE
from tests.ops.id_exchange import batch_of
from tests.ops.id_exchange import decode
from tests.ops.id_exchange import encode
from tests.ops.id_exchange import placed
from tfdist_ext.ops import id_ops

BLOCK = 128  # entries; kBlockEntries of id_section.h


def both(lists, limit, unique=False):
    """Sends lists whole and in blocks: their bytes, and what is decoded."""
    sizes, decoded = [], []
    placements = [placed("emb", limit, 1, 1)]
    for in_blocks in (False, True):
        options = {"unique": [unique], "in_blocks": in_blocks}
        encoded = encode(id_ops, [lists], placements, 0, 1, **options)
        sizes.append(len(encoded[0]))
        decoded.append(decode(id_ops, [encoded], placements, 0))
    for whole, blocks in zip(*decoded, strict=True):
        np.testing.assert_array_equal(blocks, whole)
    return sizes, decoded[0]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("limit", [3, 1000, 2**40])
@pytest.mark.parametrize("most", [1, 7, 300])
def test_samples_of_many_lengths(weighted, limit, most):
    rng = np.random.default_rng(most)
    splits = np.concatenate([[0], np.cumsum(rng.integers(0, most + 1, 400))])
    ids = limit - 1 - rng.integers(0, min(limit, 2**62), splits[-1]) // 2
    weights = NONE
    if weighted:
        weights = rng.normal(size=len(ids)).astype(np.float32)
    both([(ids, splits, weights)], limit)


@pytest.mark.parametrize("unique", [False, True])
@pytest.mark.parametrize(
    "samples", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 5000]
)
def test_one_id_per_sample(samples, unique):
    """As many as a block has, and one more or less."""
    ids = np.random.default_rng(0).choice(2**30, samples, replace=False)
    ids = np.sort(ids) * 2**10
    lists = [(ids, np.arange(samples + 1), NONE)]
    (whole, blocks), decoded = both(lists, 2**40, unique)
    np.testing.assert_array_equal(decoded[1], ids)
    assert (blocks > whole) == (samples > BLOCK)


def test_a_sample_longer_than_a_block():
    ids = np.arange(3000)
    both([(ids, np.array([0, 2, 2990, 3000]), NONE)], 3000)


@pytest.mark.parametrize("most", [1, 20, 100])
def test_blocks_take_few_bytes(most):
    rng = np.random.default_rng(0)
    (whole, blocks), _ = both([batch_of(rng, 4096, most, 10**6)], 10**6)
    assert whole < blocks < 1.03 * whole
