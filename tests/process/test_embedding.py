# SPDX-License-Identifier: Apache-2.0
"""DistributedEmbedding: every placement trains what one process trains."""

import pytest
from comparing import OneProcess

pytestmark = pytest.mark.process

CASES = [
    "whole/sgd",
    "whole/adagrad",
    "grid/adagrad",
    "dedup/sgd/weighted",
    "auto/sgd",
    "whole/adagrad/weighted",
]
# Compared with one process of ours, whose rules are tested against NumPy.
OUR_RULES = [
    "whole/row_wise_adagrad",
    "grid/row_wise_adagrad",
    "grid/own",
    "dedup/mixed",
]
# More ranks change exchanges, not updates.
AT_FOUR_RANKS = [
    "whole/adagrad",
    "grid/own",
    "dedup/sgd/weighted",
    "auto/sgd",
    "dedup/mixed",
]
# Rules depend on the Keras, placements do not.
WITH_TF_KERAS = [
    "whole/sgd",
    "dedup/sgd/weighted",
    "auto/sgd",
    "whole/adagrad/weighted",
    "whole/row_wise_adagrad",
    "grid/own",
    "dedup/mixed",
]
PROGRAM = "embedding_program.py"


@pytest.fixture(scope="module", params=[3, 2], ids=["keras3", "tf_keras"])
def reference(request, tmp_path_factory):
    """What one process trains, of stock ops and of ours."""
    keras = request.param
    folder = tmp_path_factory.mktemp(f"keras{keras}")
    cases, rules = CASES, OUR_RULES
    if keras == 2:
        cases, rules = (
            [case for case in listed if case in WITH_TF_KERAS]
            for listed in (cases, rules)
        )
    return OneProcess.train(PROGRAM, keras, folder, cases, rules)


@pytest.mark.parametrize("ranks", [2, 4])
def test_training_equals_stock_ops_in_one_process(reference, ranks):
    if (reference.keras, ranks) == (2, 4):
        pytest.skip("tf_keras at 4 ranks tells nothing that 2 ranks do not")
    reference.check(
        ranks, list(reference.ours) if ranks == 2 else AT_FOUR_RANKS
    )
