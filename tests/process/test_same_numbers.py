# SPDX-License-Identifier: Apache-2.0
"""Any number of ranks trains what one process of stock ops trains."""

import numpy as np
import pytest
from comparing import check_ranks
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
# Of all rules and placements: more ranks change exchanges, not updates.
AT_FOUR_RANKS = [
    "row/keras_adam",
    "column/adagrad",
    "auto/sgd",
    "replicated/sgd/regularized",
    "row/row_wise_adagrad",
    "column/adam",
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


@pytest.mark.parametrize("ranks", [2, 4])
def test_training_equals_stock_ops_in_one_process(reference, ranks):
    keras, folder, expected = reference
    if (keras, ranks) == (2, 4):
        pytest.skip("tf_keras at 4 ranks tells nothing that 2 ranks do not")
    output = folder / f"ranks{ranks}.npz"
    cases = [*CASES, *OUR_RULES] if ranks == 2 else AT_FOUR_RANKS
    run_ranks("train_program.py", ranks, output, *cases, keras=keras)
    first = np.load(folder / "single.0.npz")
    check_ranks(output, ranks, first, expected)
