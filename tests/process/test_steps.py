# SPDX-License-Identifier: Apache-2.0
"""A `train_step` of one process trains and logs the same on several ranks."""

import pytest
from launching import run_ranks

pytestmark = pytest.mark.process


@pytest.mark.parametrize(
    ("ranks", "keras"), [(3, 3), (2, 2)], ids=["3", "2-tf_keras"]
)
def test_steps_equal_one_process(tmp_path, ranks, keras):
    run_ranks("steps_program.py", ranks, tmp_path, keras=keras)
    assert all((tmp_path / f"done.{rank}").exists() for rank in range(ranks))
