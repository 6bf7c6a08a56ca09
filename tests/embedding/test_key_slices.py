# SPDX-License-Identifier: Apache-2.0
"""Which rank owns which buckets of a vocabulary."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist_ext.embedding.key_texts import KeySlices
from tfdist_ext.ops import vocabulary_ops
from tfdist_ext.tables.table_config import DynamicVocabulary


class InFourBuckets(DynamicVocabulary):
    """Of few keys all the same."""

    buckets = 4


@pytest.mark.parametrize(
    ("ranks", "first_rank"), [(1, 0), (2, 1), (3, 0), (3, 1), (5, 4)]
)
def test_every_bucket_has_one_owner(ranks, first_rank):
    config = InFourBuckets(40)
    every = np.arange(4)
    gathered = []
    for rank in range(ranks):
        slices = KeySlices(config, rank, ranks, first_rank)
        own = every[slice(*slices.owned(4))]
        assert (slices.owners(own, 4) == rank).all()
        gathered.append(own)
        handle = vocabulary_ops.vocabulary(
            "t", config, tf.constant([1, 2], tf.int64), rank, ranks, first_rank
        )
        assert len(vocabulary_ops.export_keys(handle)[1]) == len(own)
    in_order = slices.in_order(np.concatenate(gathered))
    np.testing.assert_array_equal(in_order, every)


def test_tables_of_one_bucket_have_different_owners():
    owners = [
        KeySlices(DynamicVocabulary(9), 0, 4, first).owners(np.array([0]), 1)
        for first in range(4)
    ]
    assert sorted(np.concatenate(owners)) == [0, 1, 2, 3]
