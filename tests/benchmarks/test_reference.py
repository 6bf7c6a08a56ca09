# SPDX-License-Identifier: Apache-2.0
"""The oracle agrees with a gradient worked out in NumPy."""

import numpy as np
import pytest

from benchmarks import reference
from benchmarks import workloads


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _data():
    """Two ranks, two samples each, one table; id 7 occurs on both ranks."""
    one = workloads.Batch(
        (np.array([[7, 7], [3, 9]]),), np.array([[1.0], [0.0]], np.float32)
    )
    two = workloads.Batch(
        (np.array([[7, 3], [9, 9]]),), np.array([[0.0], [1.0]], np.float32)
    )
    return reference.compact(((one, two),), 1)


def test_compact_renumbers_the_touched_rows():
    data = _data()
    np.testing.assert_array_equal(data.touched[0], [3, 7, 9])
    np.testing.assert_array_equal(data.steps[0][0].ids[0], [[1, 1], [0, 2]])


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_step_of_a_linear_model_matches_numpy(optimizer):
    data = _data()
    rows = np.array([[0.1, 0.2], [0.3, -0.4], [0.5, 0.6]], np.float32)
    kernel = np.array([[0.7], [-0.8]], np.float32)
    bias = np.array([0.05], np.float32)
    got = reference.train(data, (rows,), (kernel, bias), optimizer, 0.5)

    counts = np.array([[0, 2, 0], [1, 0, 1], [1, 1, 0], [0, 0, 2]])
    labels = np.array([[1.0], [0.0], [0.0], [1.0]])
    pooled = counts @ rows
    p = _sigmoid(pooled @ kernel + bias)
    entropy = -labels * np.log(p) - (1 - labels) * np.log(1 - p)
    d_logit = (p - labels) / 4
    for value, gradient, trained in (
        (rows, counts.T @ (d_logit @ kernel.T), got.rows[0]),
        (kernel, pooled.T @ d_logit, got.dense[0]),
        (bias, d_logit.sum(axis=0), got.dense[1]),
    ):
        change = 0.5 * gradient
        if optimizer == "adagrad":
            change = change / np.sqrt(0.1 + gradient**2 + 1e-7)
        np.testing.assert_allclose(trained, value - change, rtol=1e-5)
    want = [[entropy[:2].sum() / 4, entropy[2:].sum() / 4]]
    np.testing.assert_allclose(got.losses, want, rtol=1e-5)


def test_the_linear_head_adds_a_bias():
    pooled = [np.float32([[1], [2]]), np.float32([[3], [4]])]
    got = reference.logits("linear", pooled, [np.float32([0.5])])
    np.testing.assert_allclose(got, [[4.5], [6.5]])


def test_the_dot_head_multiplies_two_towers():
    """One layer per tower: kernel, bias."""
    one, other = np.float32([[1, 2]]), np.float32([[3, 4]])
    eye = np.eye(2, dtype=np.float32)
    shift = np.float32([0, 1])
    got = reference.logits("dot", [one, other], [eye, shift, 2 * eye, shift])
    np.testing.assert_allclose(got, [[1 * 6 + 3 * 9]])


@pytest.mark.parametrize(("bias", "kink"), [(-0.3, 0.0), (-0.2, 0.25)])
def test_a_unit_at_the_kink_of_its_relu_is_found(bias, kink):
    """Sums of rows are 0.6 and 0.3; the inputs of the ReLU are -bias less."""
    rows = np.array([[0.0], [0.3], [0.0]], np.float32)
    data = reference.compact(
        (
            (
                workloads.Batch(
                    (np.array([[7, 7], [3, 7]]),),
                    np.array([[1.0], [0.0]], np.float32),
                ),
                workloads.Batch(
                    (np.array([[7, 9], [7, 7]]),),
                    np.array([[1.0], [0.0]], np.float32),
                ),
            ),
        ),
        1,
    )
    one, shift = np.ones([1, 1], np.float32), np.float32([bias])
    dense = (one, shift, one, np.float32([0.0]))
    got = reference.train(data, (rows,), dense, "sgd", 0.1)
    np.testing.assert_allclose(got.kink, kink, atol=1e-6)
