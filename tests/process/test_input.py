# SPDX-License-Identifier: Apache-2.0
"""What Keras's loops read, at one and several ranks, under both Kerases."""

import pytest
from launching import run_ranks

pytestmark = pytest.mark.process

AT_ONE_RANK = ["generators", "datasets_of_generators", "no_data"]
SCENARIOS = [
    *AT_ONE_RANK,
    "shapes_that_only_data_tell",
    "arrays_stay",
    "other_settings",
    "other_data",
]


@pytest.mark.parametrize(
    ("ranks", "keras", "scenarios"),
    [(1, 3, AT_ONE_RANK), (2, 3, SCENARIOS), (2, 2, SCENARIOS)],
    ids=["1", "2", "2-tf_keras"],
)
def test_scenarios(tmp_path, ranks, keras, scenarios):
    run_ranks("input_program.py", ranks, tmp_path, *scenarios, keras=keras)
    for name in scenarios:
        assert all((tmp_path / f"{name}.{r}").exists() for r in range(ranks))
