# SPDX-License-Identifier: Apache-2.0
"""Any number of ranks trains what one process of stock ops trains."""

import numpy as np
import pytest
from launching import run_ranks

pytestmark = pytest.mark.process

CASES = [
    "row/sgd",
    "row/adagrad",
    "row/keras_adam",
    "column/sgd",
    "column/adagrad",
    "column/keras_adam",
    "row/keras_sgd",
    "column/keras_adagrad",
    "replicated/adagrad",
    "auto/sgd",
    "row/sgd/regularized",
    "replicated/sgd/regularized",
]
# Compared with one process of ours, whose rules are tested against NumPy.
OUR_RULES = [
    "row/adam",
    "column/adam",
    "row/row_wise_adagrad",
    "column/row_wise_adagrad",
]


@pytest.fixture(scope="module", params=[3, 2], ids=["keras3", "tf_keras"])
def reference(request, tmp_path_factory):
    """Results of stock ops in one process, and the tables they start from."""
    keras = request.param
    folder = tmp_path_factory.mktemp(f"keras{keras}")
    single = folder / "single.npz"
    cases = [*CASES, *OUR_RULES]
    run_ranks("train_program.py", 1, single, *cases, keras=keras)
    initial = folder / "single.0.npz"
    run_ranks(
        "train_program.py",
        1,
        folder / "stock.npz",
        *CASES,
        "--stock",
        initial,
        keras=keras,
    )
    return keras, folder, np.load(folder / "stock.0.npz")


def largest_error(actual, expected):
    """Largest difference, relative to the largest value."""
    scale = max(np.abs(expected).max(), 1e-12)
    return np.abs(actual - expected).max() / scale


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_training_equals_stock_ops_in_one_process(reference, ranks):
    keras, folder, expected = reference
    output = folder / f"ranks{ranks}.npz"
    cases = [*CASES, *OUR_RULES]
    run_ranks("train_program.py", ranks, output, *cases, keras=keras)
    results = [
        np.load(output.with_suffix(f".{rank}.npz")) for rank in range(ranks)
    ]
    first = np.load(folder / "single.0.npz")
    for name in results[0].files:
        values = [result[name] for result in results]
        if "/initial/" in name:
            np.testing.assert_array_equal(values[0], first[name], name)
        else:
            stock = expected if name in expected.files else first
            error = largest_error(values[0], stock[name])
            assert error <= 1e-5, (name, error)
        # Ranks stay bitwise equal, metrics and predictions included.
        for other in values[1:]:
            np.testing.assert_array_equal(other, values[0], name)
