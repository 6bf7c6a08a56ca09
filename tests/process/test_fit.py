# SPDX-License-Identifier: Apache-2.0
"""What users do with `fit`, at several ranks, under both Kerases."""

import pytest
from launching import run_ranks

pytestmark = pytest.mark.process

SCENARIOS = [
    "generators",  # first: others may draw numbers
    "memory",  # early: it looks at the highest use so far
    "equal_start",
    "idle_threads_sleep",
    "execution",
    "exact_metrics",
    "custom_loop",
    "mixed_precision",
    "wire_dtypes",
    "gradient_dtypes",
    "error_feedback",
    "moving_average",
    "rows_that_occur_again",
    "loss_scale",
    "accumulation",
    "refusals",
    "eager_steps",
    "optimizer_made_outside",
    "built_outside",
    "batch_norm",
    "bad_id",
    "bad_id_and_error_feedback",
    "uneven_ranks",
    "callbacks",
    "backup",
    "terminate_on_nan",
    "jit_compile",
    "in_a_callback",
    "in_a_dataset",
    "while_tracing",
    "in_predict_and_evaluate",
]

# Layers, sums and threads that know nothing of the Keras around them.
WITHOUT_TF_KERAS = [
    "idle_threads_sleep",
    "wire_dtypes",
    "error_feedback",
    "accumulation",
    "optimizer_made_outside",  # tf_keras trains with it
    "bad_id_and_error_feedback",
]
WITH_TF_KERAS = [
    "legacy_optimizers",
    *(s for s in SCENARIOS if s not in WITHOUT_TF_KERAS),
]

# Those in which other ranks than one's neighbour matter.
AT_FOUR_RANKS = [
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
]


@pytest.mark.parametrize(
    ("ranks", "keras", "scenarios"),
    [(2, 3, SCENARIOS), (4, 3, AT_FOUR_RANKS), (2, 2, WITH_TF_KERAS)],
    ids=["2", "4", "2-tf_keras"],
)
def test_scenarios(tmp_path, ranks, keras, scenarios):
    run_ranks("fit_program.py", ranks, tmp_path, *scenarios, keras=keras)
    for name in scenarios:
        assert all((tmp_path / f"{name}.{r}").exists() for r in range(ranks))
