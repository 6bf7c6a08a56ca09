# SPDX-License-Identifier: Apache-2.0
"""Sparse layers of a model share exchanges by themselves."""

import numpy as np
import pytest

pytestmark = pytest.mark.process
LAYERS = ["sparse_a", "sparse_b", "sparse_c"]

# Layers whose lookups travel in one exchange.
SHARED = {
    "functional": [LAYERS],
    "other_wire": [LAYERS[1:], ["sparse_a"]],
    "sequential": [LAYERS],
    "subclassed": [LAYERS],
    "dependent": [LAYERS[:2], ["sparse_c"]],
    "twice": [[*LAYERS, "sparse_c"]],
    "composite": None,  # the name of a DistributedEmbedding is Keras's
}


@pytest.fixture(scope="module")
def alone(pools, tmp_path_factory):
    """What one process trains, by Keras and model."""
    known = {}

    def train(keras, kind):
        if (keras, kind) not in known:
            (known[keras, kind],) = pools.run(
                "sharing_scenarios.train",
                tmp_path_factory.getbasetemp(),
                kind,
                ranks=1,
                keras=keras,
            )
        return known[keras, kind]

    return train


# What depends on the Keras does not on the number of ranks.
@pytest.mark.parametrize(("ranks", "keras"), [(2, 3), (3, 3), (2, 2)])
@pytest.mark.parametrize("kind", SHARED)
def test_sharing_changes_no_result(run_scenario, alone, ranks, keras, kind):
    expected = alone(keras, kind)
    answers = run_scenario(
        "sharing_scenarios.train", kind, ranks=ranks, keras=keras
    )
    tolerance = 1e-2 if kind == "other_wire" else 1e-5
    for losses, evaluated, predicted, exchanges in answers:
        np.testing.assert_allclose(losses, expected[0], rtol=tolerance)
        np.testing.assert_allclose(evaluated, expected[1], rtol=tolerance)
        np.testing.assert_allclose(
            predicted, expected[2], rtol=10 * tolerance, atol=tolerance
        )
        assert exchanges == answers[0][3]
        assert exchanges
        for step in exchanges:
            check_groups(kind, step)


def check_groups(kind, step):
    groups = [line[: -len("/ids")] for line in step if line.endswith("/ids")]
    results = [line for line in step if line.endswith("/results")]
    assert len(groups) == len(results)
    if SHARED[kind] is None:
        assert len(groups) == 1
    else:
        found = sorted(group.split(", ") for group in groups)
        assert found == sorted(SHARED[kind])


@pytest.mark.parametrize("keras", [3, 2])
@pytest.mark.parametrize("ranks", [2])
def test_a_function_is_not_kept_with_zeros(run_scenario, ranks, keras):
    """Traced in a capture, it would train nothing and not say so."""
    for error in run_scenario(
        "sharing_scenarios.error_of_a_function", ranks=ranks, keras=keras
    ):
        assert "got a gradient that does not come from its layer" in error


@pytest.mark.parametrize("keras", [3, 2])
@pytest.mark.parametrize("ranks", [2])
def test_a_plan_names_the_reason_of_a_failed_capture(
    run_scenario, ranks, keras
):
    for summary in run_scenario(
        "sharing_scenarios.plan_after_a_failed_capture",
        ranks=ranks,
        keras=keras,
    ):
        assert summary.endswith(
            "share no exchange: a tf.function calls layer 'sparse_a'"
        )


@pytest.mark.parametrize("keras", [3, 2])
@pytest.mark.parametrize("ranks", [2])
def test_loops_of_ones_own_share_too(run_scenario, ranks, keras):
    for lines in run_scenario(
        "sharing_scenarios.loop_of_ones_own", ranks=ranks, keras=keras
    ):
        assert sum("/ids#" in line for line in lines) == 1


@pytest.mark.parametrize("keras", [3, 2])
@pytest.mark.parametrize("ranks", [2])
def test_an_error_of_the_call_is_the_users(run_scenario, ranks, keras):
    assert (
        run_scenario(
            "sharing_scenarios.error_of_the_call", ranks=ranks, keras=keras
        )
        == ["an error"] * 2
    )
