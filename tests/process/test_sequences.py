# SPDX-License-Identifier: Apache-2.0
"""Models of sequences: any number of ranks trains what Keras's layer does."""

import pytest

pytestmark = pytest.mark.process

CASES = [
    (2, 3, "gru4rec/row/sgd"),
    (4, 3, "gru4rec/row/sgd"),
    (2, 3, "sasrec/auto/sgd"),
    (4, 3, "bst/auto/sgd"),
    (2, 3, "hstu/row/sgd"),
    (4, 2, "sasrec/row/adam"),
    (2, 2, "bert4rec/column/adam"),
]


@pytest.mark.parametrize(("ranks", "keras", "case"), CASES)
def test_training_equals_keras_in_one_process(one_process, ranks, keras, case):
    one_process.check("sequence_cases", case, ranks, keras)
