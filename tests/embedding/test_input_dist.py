# SPDX-License-Identifier: Apache-2.0
"""Ids go where their rows are looked up."""

import types

import pytest
import tensorflow as tf

from tfdist_ext.embedding.exchange import input_dist
from tfdist_ext.embedding.feature import Feature
from tfdist_ext.embedding.feature import Ids
from tfdist_ext.tables.placement import ShardSpec


@pytest.mark.parametrize("storage", ["host", "device"])
def test_ids_are_coded_for_where_their_table_lies(storage):
    """In blocks for a GPU, where nothing keeps TensorFlow from using it."""
    spec = ShardSpec("t", 9, 2, 0, 2, 2, 1, (0, 1), storage=storage)
    alone = types.SimpleNamespace(
        step=None,
        group=types.SimpleNamespace(rank=0, world_size=2),
        all_to_all=lambda payload, splits, label: (payload, splits),
    )
    with tf.Graph().as_default() as graph, tf.device("GPU:0"):
        ids = tf.constant([1, 5], tf.int64), tf.constant([0, 1, 2], tf.int64)
        lists = [[Ids(*ids, tf.zeros([0]))]]
        input_dist(lists, [Feature("f", 0, spec)], alone, "label")
    ops = {op.type: op for op in graph.get_operations()}
    on_gpu = storage == "device"
    assert ops["Tfdist>EncodeIds"].get_attr("in_blocks") == on_gpu
    place = ops["Tfdist>DecodeIds"].device
    assert place.endswith("GPU:0" if on_gpu else "CPU:0"), place
