# SPDX-License-Identifier: Apache-2.0
"""Ranks that divide batches unequally train what one process trains."""

import functools

import numpy as np
import pytest

pytestmark = pytest.mark.process

SCENARIOS = "balance_scenarios"
AT_2 = [[3, 1], [0, 1]]
AT_3 = [[0.7, 0.2, 0.1], [1, 0, 2]]


@pytest.fixture(scope="module")
def alone(pools, tmp_path_factory):
    """What one process trains, by scenario, Keras and arguments."""
    folder = tmp_path_factory.mktemp("alone")

    @functools.cache
    def run(scenario, keras, *arguments):
        return pools.run(
            *(f"{SCENARIOS}.{scenario}", folder, *arguments),
            ranks=1,
            keras=keras,
        )[0]

    return run


def check_equal(of_ranks, expected):
    assert expected
    for found in of_ranks:
        assert set(found) == set(expected)
        for name, value in expected.items():
            np.testing.assert_allclose(
                found[name], value, rtol=2e-5, atol=1e-6, err_msg=name
            )


@pytest.mark.parametrize(
    ("ranks", "keras", "balance"),
    [(2, keras, shares) for keras in (3, 2) for shares in AT_2]
    + [(3, 3, shares) for shares in AT_3]
    + [(3, 2, AT_3[0])],
)
@pytest.mark.parametrize("scenario", ["loops", "whole_batch", "own_loop"])
def test_shares_change_no_number(
    run_scenario, alone, scenario, ranks, keras, balance
):
    found = run_scenario(
        f"{SCENARIOS}.{scenario}", ranks=ranks, keras=keras, balance=balance
    )
    check_equal(found, alone(scenario, keras))


def test_one_process_takes_a_single_share(run_scenario, alone):
    (found,) = run_scenario(f"{SCENARIOS}.loops", ranks=1, balance=[2.5])
    check_equal([found], alone("loops", 3))


@pytest.mark.parametrize(
    ("ranks", "keras", "balance"),
    [(2, 3, "ids"), (2, 2, "ids"), (3, 3, "ids"), (2, 3, "measured")],
)
def test_slices_by_ids_change_no_number(
    run_scenario, alone, ranks, keras, balance
):
    answers = run_scenario(
        f"{SCENARIOS}.ids", ranks=ranks, keras=keras, balance=balance
    )
    expected, whole = alone("ids", keras)
    check_equal([found for found, _ in answers], expected)
    parts = np.array([parts for _, parts in answers])  # [W, batches, 2]
    np.testing.assert_array_equal(parts.sum(axis=0), whole)
    if balance == "ids":
        work, samples = parts.sum(axis=2), parts[:, :, 1]
        # A cut is at most half of a sample away, of 41 and up to 3 ids.
        assert (np.abs(work - work.mean(axis=0)) <= 2 * 44 / 2).all()
        assert (samples != samples[0]).any()


@pytest.mark.parametrize(("ranks", "keras"), [(2, 3), (2, 2), (3, 3)])
def test_measured_shares_follow_the_speeds(run_scenario, alone, ranks, keras):
    of_ranks = [0.3, 0.9, 0.3][:ranks]
    answers = run_scenario(
        *(f"{SCENARIOS}.measured", of_ranks, 3),
        ranks=ranks,
        keras=keras,
        fresh=True,
        balance="measured",
    )
    expected, _ = alone("measured", keras, (0.0,), 3)
    check_equal([found for found, _ in answers], expected)
    for _, shares in answers:
        assert shares == answers[0][1]
    before, after = answers[0][1]["before"], answers[0][1]["after"]
    assert before == pytest.approx([1 / ranks] * ranks)
    assert after[1] < 0.75 * after[0]
    if ranks == 3:
        assert after[1] < 0.75 * after[2]


@pytest.mark.parametrize(
    "scenario", ["several_iterators", "policies_of_own_data_are_refused"]
)
def test_measured_shares_are_of_the_iterator(run_scenario, scenario):
    run_scenario(f"{SCENARIOS}.{scenario}", ranks=2, balance="measured")


@pytest.mark.parametrize("balance", ["measured", [3, 1]])
def test_lengths_that_differ_are_an_error(run_scenario, balance):
    run_scenario(f"{SCENARIOS}.lengths_that_differ", ranks=2, balance=balance)


@pytest.mark.parametrize(
    "scenario",
    [
        "input_scenarios.generators",
        "input_scenarios.fewer_samples_than_ranks",
        "prefetch_scenarios.prefetch",
        "resume_scenarios.goes_on",
    ],
)
@pytest.mark.parametrize("balance", ["measured", [3, 1]])
def test_scenarios_of_equal_ranks(run_scenario, scenario, balance):
    # Shares that others have measured would change the order of sums.
    fresh = scenario == "prefetch_scenarios.prefetch" and balance == "measured"
    run_scenario(scenario, ranks=2, balance=balance, fresh=fresh)


@pytest.mark.parametrize("balance", ["measured", [3, 1]])
def test_logs_of_batches_are_those_of_one_process(run_scenario, balance):
    scenario = "loop_scenarios.logs_of_batches"
    (expected,) = run_scenario(scenario, ranks=1, strategy=False)
    for logs in run_scenario(scenario, ranks=2, balance=balance):
        assert len(logs) == len(expected)
        for found, of_one_process in zip(logs, expected, strict=True):
            check_equal([found], of_one_process)


@pytest.mark.parametrize("balance", ["measured", [3, 1]])
def test_every_sample_is_trained_once_in_an_epoch(run_scenario, balance):
    of_ranks = run_scenario(
        "resume_scenarios.trained_samples", ranks=2, balance=balance
    )
    steps = 60 // (3 * 2)
    for epoch in range(2):
        trained = [
            sample
            for batches in of_ranks
            for batch in batches[steps * epoch : steps * (epoch + 1)]
            for sample in batch
        ]
        assert sorted(trained) == list(range(60))


def test_slices_are_contiguous(run_scenario):
    first, second = run_scenario(
        f"{SCENARIOS}.static_sizes", ranks=2, balance=[3, 1]
    )
    assert first[0] == [0, 1, 2, 3, 4, 5]
    assert second[0] == [6, 7]
    assert [len(part) for part in second] == [2, 2, 2]
