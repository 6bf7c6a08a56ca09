# SPDX-License-Identifier: Apache-2.0
"""DistributedEmbedding: every placement trains what one process trains."""

import pytest

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
MODULE = "embedding_cases"


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
