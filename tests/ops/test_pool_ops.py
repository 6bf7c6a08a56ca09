# SPDX-License-Identifier: Apache-2.0
"""Sums of rows of a tensor per sample against stock TensorFlow."""

import numpy as np
import pytest
import tensorflow as tf

from tests.ops.csr_batches import csr_batch
from tests.reference import lookup as reference_lookup
from tfdist_ext.ops import lookup_ops

NONE = np.zeros(0, np.float32)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("width", [1, 7, 16, 58])
@pytest.mark.parametrize(
    "samples,most,rows", [(0, 0, 0), (3, 0, 4), (1, 1, 1), (40, 30, 50)]
)
def test_pool_same_as_twin(samples, most, rows, width, weighted, graph):
    rng = np.random.default_rng(0)
    positions, row_splits, weights = csr_batch(
        rng, samples, most, rows, weighted
    )
    matrix = tf.random.stateless_normal([rows, width], [1, 2])

    def run(module):
        with tf.GradientTape() as tape:
            tape.watch(matrix)
            pooled = module.pool(matrix, row_splits, positions, weights)
            loss = tf.reduce_sum(pooled**2)
        return pooled, tf.convert_to_tensor(tape.gradient(loss, matrix))

    ours = (tf.function(run) if graph else run)(lookup_ops)
    for mine, twin in zip(ours, run(reference_lookup), strict=True):
        assert mine.shape == twin.shape
        np.testing.assert_allclose(mine, twin, rtol=1e-4, atol=1e-4)


def test_rows_that_nobody_asked_for_have_no_gradient():
    matrix = tf.ones([5, 2])
    with tf.GradientTape() as tape:
        tape.watch(matrix)
        pooled = lookup_ops.pool(matrix, [0, 2, 3], [1, 3, 1], NONE)
    np.testing.assert_array_equal(
        tape.gradient(pooled, matrix), [[0, 0], [2, 2], [0, 0], [1, 1], [0, 0]]
    )


@pytest.mark.parametrize(
    "row_splits,positions,weights",
    [
        ([0, 2], [1, 5], 0),
        ([0, 2], [1, -1], 0),
        ([0, 3], [1, 1], 0),
        ([0, 2, 1], [1, 1], 0),
        ([0, 2], [1, 1], 1),
        ([], [], 0),
    ],
)
def test_malformed_inputs_are_refused(row_splits, positions, weights):
    inputs = (
        np.array(row_splits, np.int64),
        np.array(positions, np.int64),
        np.ones(weights, np.float32),
    )
    with pytest.raises(tf.errors.InvalidArgumentError):
        lookup_ops.pool(tf.ones([5, 2]), *inputs)
