# SPDX-License-Identifier: Apache-2.0
"""What users do with `fit`, at several ranks, under both Kerases."""

import pytest
import scenarios

pytestmark = pytest.mark.process

EVERY = scenarios.of(
    "compile_scenarios",
    "failure_scenarios",
    "fit_scenarios",
    "one_rank_fails_scenarios",
    "optimizer_scenarios",
    "precision_scenarios",
    "split_scenarios",
)
# Numbers that nobody has drawn, the highest use of memory so far.
ON_NEW_RANKS = {"generators", "memory"}
# The ranks are left with different models.
LAST = {"plan_mismatch"}
# Given to the strategy; scenarios of their own try them otherwise.
OPTIONS = {
    "options_arrive": {"gradient_dtype": "bfloat16", "error_feedback": True}
}
KERAS_3 = scenarios.without(EVERY, {"legacy_optimizers"})
# Layers, sums and threads that know nothing of the Keras around them.
TF_KERAS = scenarios.without(
    EVERY,
    {
        "idle_threads_sleep",
        "wire_dtypes",
        "int8_rows",
        "error_feedback",
        "optimizer_made_outside",  # tf_keras trains with it
        "bad_id_and_error_feedback",
        "options_arrive",
        "plan_mismatch",
        "split_steps_together",  # options of Keras 3
    },
)
# Those in which other ranks than one's neighbour matter.
AT_FOUR_RANKS = scenarios.only(
    EVERY,
    {
        "generators",
        "equal_start",
        "exact_metrics",
        "custom_loop",
        "gradient_dtypes",
        "error_feedback",
        "batch_norm",
        "bad_id",
        "uneven_ranks",
        "backup",
        "in_a_callback",
        "plan_mismatch",
    },
)


@pytest.mark.parametrize(
    ("ranks", "keras", "scenario"),
    [
        (ranks, keras, scenario)
        for ranks, keras, some in (
            (2, 3, KERAS_3),
            (2, 2, TF_KERAS),
            (4, 3, AT_FOUR_RANKS),
        )
        for scenario in some
    ],
)
def test_scenario(run_scenario, ranks, keras, scenario):
    name = scenario.split(".")[1]
    run_scenario(
        scenario,
        ranks=ranks,
        keras=keras,
        fresh=name in ON_NEW_RANKS,
        last=name in LAST,
        **OPTIONS.get(name, {}),
    )
