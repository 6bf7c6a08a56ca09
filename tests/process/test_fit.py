# SPDX-License-Identifier: Apache-2.0
"""What users do with `fit`, at several ranks, under both Kerases."""

import pytest
from launching import run_ranks

pytestmark = pytest.mark.process

SCENARIOS = [
    "memory",  # first: it looks at the highest use so far
    "equal_start",
    "execution",
    "exact_metrics",
    "custom_loop",
    "mixed_precision",
    "wire_dtypes",
    "gradient_dtypes",
    "refusals",
    "batch_norm",
    "bad_id",
    "uneven_ranks",
    "callbacks",
    "backup",
    "plan_mismatch",  # last: it ends the group
]


@pytest.mark.parametrize(
    ("ranks", "keras"), [(2, 3), (4, 3), (2, 2)], ids=["2", "4", "2-tf_keras"]
)
def test_scenarios(tmp_path, ranks, keras):
    run_ranks("fit_program.py", ranks, tmp_path, *SCENARIOS, keras=keras)
    for name in SCENARIOS:
        assert all((tmp_path / f"{name}.{r}").exists() for r in range(ranks))
