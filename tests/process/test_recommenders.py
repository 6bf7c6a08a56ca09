# SPDX-License-Identifier: Apache-2.0
"""Models of tensorflow-recommenders train with DistributedEmbedding."""

import numpy as np
import pytest
from launching import run_ranks

pytestmark = pytest.mark.process


def test_dlrm_and_two_towers_train(tmp_path):
    losses = {}
    for ranks in (1, 2):
        output = tmp_path / f"ranks{ranks}.npz"
        run_ranks("recommenders_program.py", ranks, output, keras=2)
        losses[ranks] = np.load(output.with_suffix(".0.npz"))
    second = np.load(tmp_path / "ranks2.1.npz")
    for name in losses[2].files:
        np.testing.assert_array_equal(second[name], losses[2][name], name)
    for result in losses.values():
        for name in result.files:
            assert result[name][-1] < 0.9 * result[name][0], name
    # Negatives of the towers are those of a rank's own batch: not comparable.
    for name in ("dlrm/loss", "default_loss/loss", "all_negatives/loss"):
        np.testing.assert_allclose(
            losses[2][name], losses[1][name], rtol=1e-4, err_msg=name
        )
    np.testing.assert_allclose(
        losses[2]["rating/rmse"], losses[1]["rating/rmse"], rtol=1e-5
    )
