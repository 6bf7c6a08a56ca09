# SPDX-License-Identifier: Apache-2.0
"""Models with steps of their own, each against the same of one process."""

import numpy as np
from step_models import fitted


def as_one_process(strategy, folder, name, options):
    """Trains a model, and beside it the same without the strategy.

    Args:
        strategy: of some ranks.
        folder: nothing is written.
        name: of the model.
        options: of `fitted`.
    """
    expected_logs, expected = fitted(None, name, **options)
    logs, weights = fitted(strategy, name, **options)
    for a, b in zip(weights, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert set(logs) == set(expected_logs)
    for key, values in expected_logs.items():
        np.testing.assert_allclose(logs[key], values, rtol=1e-4)
