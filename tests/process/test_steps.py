# SPDX-License-Identifier: Apache-2.0
"""A `train_step` of one process trains and logs the same on several ranks."""

import pytest
import step_models

pytestmark = pytest.mark.process

# With fixed batch sizes too, where a sum is not told by an open dimension.
FIXED = ("Default", "OwnTracker", "GlobalBatch", "SumAndMean", "Vector")
EAGER = ("LossObject", "SumObject", "ByHand", "Vector")
CASES = [
    *((name, {}) for name in step_models.MODELS),
    *((name, {"drop": True}) for name in FIXED),
    *((name, {"run_eagerly": True}) for name in EAGER),
]
KERAS_3_ONLY = ("Function",)  # stock: merge_call in a new graph
TF_KERAS = [
    *(case for case in CASES if case[0] not in KERAS_3_ONLY),
    # Keras 3 converts nothing.
    ("Default", {"loss": step_models.branching}),
    ("Default", {"activation": step_models.branching_activation}),
]


@pytest.mark.parametrize(
    ("ranks", "keras", "model", "options"),
    [
        pytest.param(
            *(ranks, keras, name, options),
            id="-".join([str(ranks), str(keras), name, *options]),
        )
        for ranks, keras, cases in ((3, 3, CASES), (2, 2, TF_KERAS))
        for name, options in cases
    ],
)
def test_step_equals_one_process(run_scenario, ranks, keras, model, options):
    (expected,) = run_scenario(
        "step_scenarios.of_one_process",
        *(model, options),
        ranks=1,
        keras=keras,
        strategy=False,
    )
    run_scenario(
        "step_scenarios.as_one_process",
        *(model, options, expected),
        ranks=ranks,
        keras=keras,
    )
