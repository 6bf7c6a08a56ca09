# SPDX-License-Identifier: Apache-2.0
"""What users do with layers and tables, at several ranks."""

import pytest
from launching import run_ranks

pytestmark = pytest.mark.process

SCENARIOS = [
    "parallel_map",
    "parallel_iterations",
    "threads",
    "dataset_of_steps",
    "failing_calls",
    "whole_tables_in",
    "restored_from_config",
    "whole_tables_out",
    "kernels_read",
    "kernels_read_by_keras",
    "copies",
    "copies_without_tables",
]


@pytest.mark.parametrize(
    ("ranks", "keras"), [(3, 3), (2, 2)], ids=["3", "2-tf_keras"]
)
def test_scenarios(tmp_path, ranks, keras):
    run_ranks("layers_program.py", ranks, tmp_path, *SCENARIOS, keras=keras)
    for name in SCENARIOS:
        assert all((tmp_path / f"{name}.{r}").exists() for r in range(ranks))
