# SPDX-License-Identifier: Apache-2.0
"""Loops and batches of Keras give on several ranks what one process gives."""

import loop_scenarios
import numpy as np
import pytest

pytestmark = pytest.mark.process

BOTH = ((3, 3), (2, 2))  # ranks, and which Keras
CASES = [
    ("on_batch", "sum_over_batch_size"),
    ("on_batch", "sum"),
    ("logs_of_batches",),
    ("integers", False),
    ("integers", True),
    ("mean_of_integers",),
    ("eager_steps", "sum_over_batch_size"),
    ("eager_steps", "sum"),
    ("triples",),
    *(
        ("predictions", kind, one_batch)
        for kind in loop_scenarios.OUTPUTS
        if kind != "transposed"
        for one_batch in (False, True)
    ),
]


def _runs(cases):
    return [
        pytest.param(ranks, keras, case, id=f"{ranks}-{keras}-{case}")
        for ranks, keras in BOTH
        for case in cases
    ]


def assert_close(found, expected):
    if isinstance(expected, dict):
        assert set(found) == set(expected)
        for key, value in expected.items():
            assert_close(found[key], value)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other)
    elif isinstance(expected, bytes | str):
        assert found == expected
    else:
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("ranks", "keras", "case"), _runs(CASES))
def test_loop_equals_one_process(run_scenario, ranks, keras, case):
    name, *arguments = case
    scenario = f"loop_scenarios.{name}"
    (expected,) = run_scenario(
        scenario, *arguments, ranks=1, keras=keras, strategy=False
    )
    found = run_scenario(scenario, *arguments, ranks=ranks, keras=keras)
    for each in found:
        assert_close(each, expected)


def test_own_step_is_trained_by_one_rank(run_scenario):
    (expected,) = run_scenario(
        "loop_scenarios.triples", ranks=1, strategy=False
    )
    (found,) = run_scenario("loop_scenarios.triples", ranks=1)
    assert_close(found, expected)


@pytest.mark.parametrize(
    ("ranks", "keras", "kind"),
    [(2, 3, "draws"), (2, 3, "seed"), (2, 2, "seed"), (2, 2, "ragged")],
)
def test_arrays_have_the_order_of_rank_0(run_scenario, ranks, keras, kind):
    scenario = "loop_scenarios.arrays_after_draws"
    found = run_scenario(scenario, kind, ranks=ranks, keras=keras)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("known lengths", ("'0' [8, 3], '1' [4, 1]", "padded_batch")),
        ("lengths", ("'0' [8, ...], '1' [4, ...]", "padded_batch")),
        ("table", ("'0/1' [100, ...]", "keep constants in the model")),
        ("cache", ("Ranks [0, 1] cache", "strategy.rank")),
        ("later", ("in their batches 7 no feature", "deterministic=False")),
    ],
)
def test_dataset_is_refused(run_scenario, name, texts):
    for found in run_scenario("refused_scenarios.refusal", name, ranks=2):
        for text in texts:
            assert text in found


@pytest.mark.parametrize("name", ["scalar", "own cache", "deterministic"])
def test_dataset_is_not_refused(run_scenario, name):
    assert run_scenario("refused_scenarios.refusal", name, ranks=2) == ["", ""]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("stateful", "Each of the 2 ranks has only a part of every batch"),
        ("lengths", "different numbers of samples"),
        ("values", "with different settings"),
    ],
)
def test_model_is_refused(run_scenario, name, text):
    for found in run_scenario(
        "refused_scenarios.refused_models", name, ranks=2
    ):
        assert text in found


@pytest.mark.parametrize("keras", [3, 2])
@pytest.mark.parametrize("one_batch", [False, True])
def test_output_without_rows_is_refused(run_scenario, keras, one_batch):
    scenario = "refused_scenarios.refused_output"
    for found in run_scenario(scenario, one_batch, ranks=2, keras=keras):
        assert "one row for each sample" in found
