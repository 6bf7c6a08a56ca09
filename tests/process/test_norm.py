# SPDX-License-Identifier: Apache-2.0
"""Normalisation of the whole batch, with what one process computes."""

import norm_scenarios
import numpy as np
import pytest

pytestmark = pytest.mark.process


@pytest.mark.parametrize("kind", norm_scenarios.KINDS)
@pytest.mark.parametrize(("ranks", "keras"), [(2, 2), (2, 3), (3, 3)])
def test_synchronized_norm_is_that_of_one_process(
    run_scenario, ranks, keras, kind
):
    scenario = "norm_scenarios.train"
    (expected,) = run_scenario(
        scenario, kind, ranks=1, keras=keras, strategy=False
    )
    for found in run_scenario(scenario, kind, ranks=ranks, keras=keras):
        for value, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(value, wanted, 1e-4, 1e-5)
