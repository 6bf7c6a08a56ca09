# SPDX-License-Identifier: Apache-2.0
"""Any number of ranks trains what one process of stock ops trains."""

import pytest

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
MODULE = "train_cases"


@pytest.mark.parametrize(
    ("ranks", "keras", "case"),
    [(2, 3, case) for case in [*CASES, *OUR_RULES]]
    + [(4, 3, case) for case in AT_FOUR_RANKS]
    + [(2, 2, case) for case in WITH_TF_KERAS],
)
def test_training_equals_stock_ops_in_one_process(
    one_process, ranks, keras, case
):
    one_process.check(MODULE, case, ranks, keras, case in OUR_RULES)
