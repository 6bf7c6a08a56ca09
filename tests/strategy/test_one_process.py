# SPDX-License-Identifier: Apache-2.0
"""One process, without TF_CONFIG: what is exchanged stays as it is."""

import numpy as np
import pytest
import tensorflow as tf

import tfdist_ext


def test_all_gather_of_the_only_rank_is_its_own_with_a_gradient():
    strategy = tfdist_ext.HybridParallelStrategy()
    rows = tf.constant([[1.0, 2.0], [3.0, 4.0]])

    def replica(value):
        context = tf.distribute.get_replica_context()
        with tf.GradientTape() as tape:
            tape.watch(value)
            gathered = context.all_gather(value, axis=0)
            loss = tf.reduce_sum(gathered * gathered)
        return gathered, tape.gradient(loss, value)

    for run in (strategy.run, tf.function(strategy.run)):
        gathered, gradient = run(replica, (rows,))
        np.testing.assert_array_equal(gathered, rows)
        np.testing.assert_array_equal(gradient, 2 * rows)
    np.testing.assert_array_equal(strategy.gather(rows, axis=1), rows)


def test_what_has_no_kernel_is_refused_by_its_name():
    strategy = tfdist_ext.HybridParallelStrategy()
    layers = tfdist_ext.layers
    table = layers.TableConfig("t", 8, 2)
    feature = layers.FeatureConfig("f", table, (None, 1), (None, 2))
    many = layers.DistributedEmbedding({"f": feature}, name="many")
    with pytest.raises(ValueError, match="'many' has several tables"):
        strategy.gather_table(many)
    for layer in (
        layers.SharedExchange([layers.FullSparse(2, 8)], name="none"),
        layers.FullSparse(2, 8, name="none"),  # not built
    ):
        with pytest.raises(ValueError, match="'none' has no kernel"):
            strategy.gather_table(layer)
