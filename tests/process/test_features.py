# SPDX-License-Identifier: Apache-2.0
"""Raw strings and numbers: any number of ranks trains what one process does."""

import pytest

pytestmark = pytest.mark.process


CASES = [
    (2, 3, "in_model"),
    (2, 3, "feature_space"),
    (3, 2, "in_model"),
    (3, 2, "feature_space"),
]


@pytest.mark.parametrize(("ranks", "keras", "case"), CASES)
def test_training_equals_keras_in_one_process(one_process, ranks, keras, case):
    one_process.check("feature_cases", case, ranks, keras)
