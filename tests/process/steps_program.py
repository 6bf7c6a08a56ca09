# SPDX-License-Identifier: Apache-2.0
"""Trains models with steps of their own; run on two or more ranks.

Usage: steps_program.py FOLDER

Each is compared with the same model of one process, trained beside it.
"""

import pathlib
import sys

import numpy as np
from step_models import KERAS_3
from step_models import MODELS
from step_models import branching
from step_models import fitted

import tfdist_ext

# With fixed batch sizes too, where a sum is not told by an open dimension.
FIXED = ("Default", "OwnTracker", "GlobalBatch", "SumAndMean", "Vector")
EAGER = ("LossObject", "SumObject", "ByHand", "Vector")


def main():
    strategy = tfdist_ext.HybridParallelStrategy(timeout=60)
    cases = [(name, {}) for name in MODELS]
    cases += [(name, {"drop": True}) for name in FIXED]
    cases += [(name, {"run_eagerly": True}) for name in EAGER]
    if not KERAS_3:  # Keras 3 converts nothing
        cases.append(("Default", {"loss": branching}))
    wrong = []
    for name, options in cases:
        expected_logs, expected = fitted(None, name, **options)
        logs, weights = fitted(strategy, name, **options)
        try:
            for a, b in zip(weights, expected, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
            assert set(logs) == set(expected_logs)
            for key, values in expected_logs.items():
                np.testing.assert_allclose(logs[key], values, rtol=1e-4)
        except AssertionError as error:
            wrong.append(f"{name} {options}: {error}")
    assert not wrong, "\n".join(wrong)
    (pathlib.Path(sys.argv[1]) / f"done.{strategy.rank}").touch()


if __name__ == "__main__":
    main()
