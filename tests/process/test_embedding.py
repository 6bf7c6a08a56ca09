# SPDX-License-Identifier: Apache-2.0
"""DistributedEmbedding: every placement trains what one process trains."""

import numpy as np
import pytest
from comparing import check_ranks
from launching import run_ranks

pytestmark = pytest.mark.process

CASES = [
    "whole/sgd",
    "whole/adagrad",
    "grid/adagrad",
    "dedup/sgd/weighted",
    "auto/sgd",
    "hot/adagrad/weighted",
]
# Compared with one process of ours, whose rules are tested against NumPy.
OUR_RULES = [
    "whole/row_wise_adagrad",
    "grid/row_wise_adagrad",
    "grid/own",
    "hot/mixed",
]
# More ranks change exchanges, not updates.
AT_FOUR_RANKS = [
    "whole/adagrad",
    "grid/own",
    "dedup/sgd/weighted",
    "auto/sgd",
    "hot/mixed",
]
PROGRAM = "embedding_program.py"


@pytest.fixture(scope="module", params=[3, 2], ids=["keras3", "tf_keras"])
def reference(request, tmp_path_factory):
    """Results of stock ops in one process, and of ours in one process."""
    keras = request.param
    folder = tmp_path_factory.mktemp(f"keras{keras}")
    single = folder / "single.npz"
    run_ranks(PROGRAM, 1, single, *CASES, *OUR_RULES, keras=keras)
    run_ranks(
        PROGRAM,
        1,
        folder / "stock.npz",
        *CASES,
        "--stock",
        folder / "single.0.npz",
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
    run_ranks(PROGRAM, ranks, output, *cases, keras=keras)
    first = np.load(folder / "single.0.npz")
    check_ranks(output, ranks, first, expected)
