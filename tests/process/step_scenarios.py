# SPDX-License-Identifier: Apache-2.0
"""Models with steps of their own, each against the same of one process."""

import numpy as np
from step_models import fitted


def of_one_process(strategy, folder, name, options):
    """Logs and weights of a model that is trained without a strategy.

    Args:
        strategy: None.
        folder: nothing is written.
        name: of the model.
        options: of `fitted`.
    """
    return fitted(strategy, name, **options)


def as_one_process(strategy, folder, name, options, expected):
    """Trains a model, which must become what it becomes in one process.

    Args:
        strategy: of some ranks.
        folder: nothing is written.
        name: of the model.
        options: of `fitted`.
        expected: what `of_one_process` returns.
    """
    expected_logs, expected_weights = expected
    logs, weights = fitted(strategy, name, **options)
    for a, b in zip(weights, expected_weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert set(logs) == set(expected_logs)
    for key, values in expected_logs.items():
        np.testing.assert_allclose(logs[key], values, rtol=1e-4)
