# SPDX-License-Identifier: Apache-2.0
"""Rows in 8 bits: where they are refused, and what plans count."""

import pytest
import tensorflow as tf

import tfdist_ext
from tfdist_ext.embedding.feature import Feature
from tfdist_ext.embedding.feature import Ids
from tfdist_ext.embedding.feature import Wire
from tfdist_ext.embedding.pooled_lookup import pooled_lookup
from tfdist_ext.tables.placement import ShardSpec


def test_tables_on_gpus_are_refused():
    spec = ShardSpec("t", 9, 2, 0, 2, 2, 1, (0, 1), storage="device")
    ids = Ids(
        tf.constant([1], tf.int64), tf.constant([0, 1], tf.int64), tf.zeros([0])
    )
    wire = Wire("ads", "int8")
    with pytest.raises(ValueError, match=r"'ads'.*int8.*GPU.*storage='host'"):
        pooled_lookup(
            [[ids]], [Feature("f", 0, spec)], [tf.zeros([5, 2])], object(), wire
        )


def test_plans_count_the_bytes_of_numbers_and_scales():
    table = tfdist_ext.TableConfig("t", 10_000, 64)
    feature = tfdist_ext.FeatureConfig("f", table, (None, 1), (None, 64))
    sent = {}
    for dtype in ("float32", "int8"):
        number = Wire(dtype=dtype).bytes_of_number
        plan = tfdist_ext.plan(
            [table],
            [feature],
            world_size=4,
            batch_size=1024,
            forced={"t": "row_wise"},
            wire_bytes=number,
        )
        sent[dtype] = plan.bytes_per_step
    assert Wire(dtype="int8").bytes_of_number == 1.0625
    # Ids take some bytes too.
    assert 1.0625 / 4 < sent["int8"] / sent["float32"] < 0.28
