# SPDX-License-Identifier: Apache-2.0
"""Losses and metrics that look at samples together see the whole batch."""

import pytest
import whole_batch_cases

pytestmark = pytest.mark.process


# In tf_keras there is no such loss.
KERAS_3_ONLY = ("dice of Keras", "tversky", "circle")
CASES = [
    (ranks, keras, name)
    for ranks, keras in ((3, 3), (2, 2))
    for name in whole_batch_cases.CASES
    if keras == 3 or name not in KERAS_3_ONLY
]


@pytest.mark.parametrize(("ranks", "keras", "name"), CASES)
def test_ranks_equal_one_process(run_scenario, ranks, keras, name):
    (expected,) = run_scenario(
        *("whole_batch_scenarios.trained", name),
        ranks=1,
        keras=keras,
        strategy=False,
    )
    run_scenario(
        *("whole_batch_scenarios.as_one_process", {name: expected}),
        ranks=ranks,
        keras=keras,
    )


SCENARIOS = (
    "gathers_every_dtype",
    "gathers_once",
    "half_precision",
    "in_own_loops",
    "refuses_optimizers_outside",
    "refuses_other_rows",
    "several_outputs_gather_once",
    "warns_of_many_bytes",
)


@pytest.mark.parametrize(("ranks", "keras"), [(3, 3), (2, 2)])
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(run_scenario, ranks, keras, name):
    run_scenario(f"whole_batch_scenarios.{name}", ranks=ranks, keras=keras)
