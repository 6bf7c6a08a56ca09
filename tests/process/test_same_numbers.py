# SPDX-License-Identifier: Apache-2.0
"""Any number of ranks trains what one process of stock ops trains."""

import pytest
from comparing import OneProcess

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
# Of all placements: more ranks change exchanges, not updates.
AT_FOUR_RANKS = [
    "row/keras_adam",
    "column/adagrad",
    "auto/sgd",
    "replicated/sgd/regularized",
]
# Rules depend on the Keras, placements do not: each rule once, and whatever
# Keras itself places or regularizes.
WITH_TF_KERAS = [
    "row/sgd",
    "row/adagrad",
    "row/keras_adam",
    "row/keras_sgd",
    "column/keras_adagrad",
    "replicated/adagrad",
    "auto/sgd",
    "row/sgd/regularized",
    "replicated/sgd/regularized",
    "column/adam",
    "row/row_wise_adagrad",
]
PROGRAM = "train_program.py"


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
