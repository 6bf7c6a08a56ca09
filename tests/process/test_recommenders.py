# SPDX-License-Identifier: Apache-2.0
"""Models of tensorflow-recommenders train with DistributedEmbedding."""

import numpy as np
import pytest

pytestmark = pytest.mark.process


def test_dlrm_and_two_towers_train(run_scenario):
    scenario = "recommenders_scenarios.train"
    one = run_scenario(scenario, ranks=1, keras=2)[0]
    first, second = run_scenario(scenario, ranks=2, keras=2)
    for name, values in first.items():
        np.testing.assert_array_equal(second[name], values, name)
    for result in (one, first):
        for name, values in result.items():
            assert values[-1] < 0.9 * values[0], name
    # Negatives of the towers are those of a rank's own batch: not comparable.
    for name in ("dlrm/loss", "default_loss/loss", "all_negatives/loss"):
        np.testing.assert_allclose(
            first[name], one[name], rtol=1e-4, err_msg=name
        )
    np.testing.assert_allclose(
        first["rating/rmse"], one["rating/rmse"], rtol=1e-5
    )
