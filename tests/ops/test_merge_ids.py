# SPDX-License-Identifier: Apache-2.0
"""Lists of ids merged for a table on one rank."""

import numpy as np
import pytest
import tensorflow as tf

from tests.ops.csr_batches import csr_batch
from tests.reference import ids as reference_ids
from tfdist_ext.ops import id_ops

LIMIT = 50


def batch_of(seed, dtype, weighted):
    rng = np.random.default_rng(seed)
    ids, row_splits, weights = csr_batch(rng, 20, 6, LIMIT, weighted)
    return ids.astype(dtype), row_splits, weights


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("policy", ["error", "ignore"])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_merge_same_as_twin(dtype, policy, count, weighted):
    lists = []
    for seed in range(count):
        lists.append(batch_of(seed, dtype, weighted and seed == 0))
    inputs = tuple(zip(*lists, strict=True))
    limit = LIMIT if policy == "error" else 30
    options = {"vocabulary_size": limit, "out_of_range": policy, "layer": "emb"}
    ours = id_ops.merge_ids(*inputs, **options)
    twin = reference_ids.merge_ids(*inputs, **options)
    for mine, other in zip(ours, twin, strict=True):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("module", [id_ops, reference_ids])
def test_merge_names_the_bad_id(module):
    none = np.zeros(0, np.float32)
    lists = [np.array([1, 2]), np.array([7, -3])]
    splits = [np.array([0, 1, 2])] * 2
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match="Layer 'emb': id 7 in sample 0 of rank 0 is out of range",
    ):
        module.merge_ids(
            lists, splits, [none] * 2, vocabulary_size=5, layer="emb"
        )
