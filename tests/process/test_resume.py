# SPDX-License-Identifier: Apache-2.0
"""Runs that were ended go on, at the same number of ranks bit by bit."""

import pytest

pytestmark = pytest.mark.process


@pytest.mark.parametrize(("ranks", "keras"), [(2, 3), (2, 2)])
def test_goes_on(run_scenario, ranks, keras):
    run_scenario("resume_scenarios.goes_on", ranks=ranks, keras=keras)


@pytest.mark.parametrize(
    ("scenario", "ranks", "keras"),
    [
        ("with_adam", 2, 3),
        ("with_each_optimizer", 3, 3),
        ("with_each_optimizer", 4, 2),
    ],
)
def test_saves_the_state_of_a_step_while_training_goes_on(
    run_scenario, scenario, ranks, keras
):
    run_scenario(f"snapshot_scenarios.{scenario}", ranks=ranks, keras=keras)


@pytest.mark.parametrize(("ranks", "keras"), [(2, 3), (3, 2)])
def test_a_failure_ends_the_save_beside_training(run_scenario, ranks, keras):
    name = "snapshot_scenarios.after_a_failure"
    run_scenario(name, ranks=ranks, keras=keras)


@pytest.mark.parametrize(("begun", "ended"), [(1, 2)])
def test_goes_on_at_another_number_of_ranks(run_scenario, begun, ended):
    begin, end = "resume_scenarios.begin", "resume_scenarios.end"
    (weights,) = run_scenario(begin, ranks=begun, keras=3)
    run_scenario(end, weights, ranks=ended, keras=3)


@pytest.mark.parametrize(
    ("begun", "ended", "keras"), [(2, 1, 3), (2, 3, 2), (3, 2, 3)]
)
def test_batches_of_another_size_go_on(run_scenario, begun, ended, keras):
    """Their size is per rank, so the number of ranks changes it."""
    begin = "resume_scenarios.begin_with_batches_by_rank"
    end = "resume_scenarios.end_with_batches_by_rank"
    seen = run_scenario(begin, ranks=begun, keras=keras)
    run_scenario(end, seen, ranks=ended, keras=keras)


@pytest.mark.parametrize(("ranks", "keras"), [(2, 2)])
def test_falls_back_over_deltas(run_scenario, ranks, keras):
    scenario = "delta_checkpoint_scenarios.falls_back"
    run_scenario(scenario, ranks=ranks, keras=keras)


@pytest.mark.parametrize(
    ("begun", "ended", "how"),
    [(4, 1, ""), (1, 2, ""), (4, 2, "_in_pieces"), (2, 4, "_in_pieces")],
)
def test_deltas_at_another_number_of_ranks(run_scenario, begun, ended, how):
    scenarios = "delta_checkpoint_scenarios"
    begin, end = f"{scenarios}.begin{how}", f"{scenarios}.end{how}"
    states, *_ = run_scenario(begin, ranks=begun, keras=3)
    run_scenario(end, *states, ranks=ended, keras=3)
