# SPDX-License-Identifier: Apache-2.0
"""Modes of `consistency`, at several ranks, against one process."""

import itertools

import numpy as np
import pytest
from scenarios import name_of_mode

pytestmark = pytest.mark.process

K = 3
ACCUMULATE = ["Accumulate", {"k": K}]
LOCAL = ["LocalSteps", {"k": K}]
OUTER = {"learning_rate": 0.7, "momentum": 0.9}
DILOCO = ["LocalSteps", {"k": K, "outer": ["Nesterov", OUTER]}]
TABLES = ["LocalSteps", {"k": K, "tables": True}]
ASP = ["ASP", {"significance": 0.05}]
BOTH = ((2, 3), (2, 2))
PLACES = (*BOTH, (3, 3), (1, 3), (1, 2))


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(
            found[name], value, rtol=1e-4, atol=2e-6, err_msg=name
        )


@pytest.mark.parametrize(
    ("ranks", "keras", "optimizer", "of_keras", "options"),
    [
        *(
            (*place, optimizer, of_keras, {})
            for place in PLACES
            for optimizer, of_keras in (
                ("SGD", False),
                ("Adagrad", False),
                ("Adam", False),
                ("Adagrad", True),
            )
        ),
        *(
            (*place, "SGD", False, options)
            for place in BOTH
            for options in ({"steps_per_execution": 2}, {"run_eagerly": True})
        ),
    ],
)
def test_accumulated_steps_are_those_of_larger_batches(
    run_scenario, ranks, keras, optimizer, of_keras, options
):
    """In `fit`, with an uneven last batch and an unfinished round."""
    scenario = "consistency_scenarios.fitted"
    (expected,) = run_scenario(
        scenario,
        *(4 * K, optimizer, of_keras, {}),
        ranks=1,
        keras=keras,
        strategy=False,
    )
    found = run_scenario(
        scenario,
        *(4, optimizer, of_keras, options),
        ranks=ranks,
        keras=keras,
        consistency=ACCUMULATE,
    )
    for each in found:
        assert_close(each, expected)


@pytest.mark.parametrize(
    ("ranks", "keras", "optimizer"),
    [
        (2, 3, "Adam"),
        (2, 2, "Adam"),
        (3, 3, "Adagrad"),
        (1, 3, "SGD"),
        (1, 2, "SGD"),
    ],
)
def test_steps_of_a_custom_loop_accumulate(
    run_scenario, ranks, keras, optimizer
):
    scenario = "consistency_scenarios.looped"
    (expected,) = run_scenario(
        scenario, 4 * K, optimizer, ranks=1, keras=keras, strategy=False
    )
    found = run_scenario(
        scenario,
        4,
        optimizer,
        ranks=ranks,
        keras=keras,
        consistency=ACCUMULATE,
    )
    for each in found:
        assert_close(each, expected)


@pytest.mark.parametrize(("ranks", "keras"), BOTH)
@pytest.mark.parametrize("accumulates", [True, False])
def test_ranks_with_unequal_shares(run_scenario, ranks, keras, accumulates):
    """Steps of a round are weighted by samples, and so are parts of sums."""
    if accumulates:
        name, arguments = "fitted", ("Adagrad", False, {})
        options = {"consistency": ACCUMULATE}
    else:
        name, arguments, options = "fitted_compressed", (), {}
    scenario, k = f"consistency_scenarios.{name}", K if accumulates else 1
    (expected,) = run_scenario(
        *(scenario, 4 * k, *arguments), ranks=1, keras=keras, strategy=False
    )
    for found in run_scenario(
        *(scenario, 4, *arguments),
        **{"ranks": ranks, "keras": keras, "balance": [2, 1], **options},
    ):
        assert_close(found, expected)


@pytest.mark.parametrize(("ranks", "keras"), BOTH)
@pytest.mark.parametrize(
    ("mode", "label", "calls"),
    [
        (["BSP", {}], "gradients", 12),
        (ACCUMULATE, "gradients", 4),
        (LOCAL, "gradients", 0),
        (LOCAL, "consistency/weights", 4),
    ],
    ids=name_of_mode,
)
def test_dense_bytes_fall(run_scenario, ranks, keras, mode, label, calls):
    """All modes send the same bytes at a time, and BSP k times as often."""
    scenario = "consistency_scenarios.gradients_sent"
    for found in run_scenario(
        scenario, label, ranks=ranks, keras=keras, consistency=mode
    ):
        assert found[0] == calls
        dense = 4 * (8 * 0 + (4 + 12 + 6) * 5 + 4 + 5 + 5 + 1)
        assert calls == 0 or found[1] >= calls * dense


@pytest.mark.parametrize(("ranks", "keras"), BOTH)
@pytest.mark.parametrize(
    ("scenario", "mode", "arguments"),
    [
        ("evaluated_and_saved", ACCUMULATE, ()),
        ("evaluated_and_saved", LOCAL, ()),
        # Slots of local steps become equal when they are saved.
        ("resumed", ACCUMULATE, ("Adam",)),
        ("resumed", LOCAL, ("SGD",)),
        ("resumed", DILOCO, ("SGD",)),
        ("resumed", TABLES, ("SGD",)),
        ("evaluated_and_saved", TABLES, ()),
        ("guarded", ACCUMULATE, ()),
        ("guarded", TABLES, ()),
        ("rolled_back", ACCUMULATE, ()),
        ("exported", ACCUMULATE, ()),
        ("exported", TABLES, ()),
        ("local_replicas", LOCAL, ()),
        ("local_replicas", DILOCO, ()),
        ("local_replicas", TABLES, ()),
        ("local_replicas", ASP, (True,)),
        ("evaluated_and_saved", ASP, ()),
        ("guarded", ASP, ()),
    ],
    ids=name_of_mode,
)
def test_scenario(run_scenario, ranks, keras, scenario, mode, arguments):
    run_scenario(
        f"consistency_scenarios.{scenario}",
        *arguments,
        ranks=ranks,
        keras=keras,
        consistency=mode,
    )


@pytest.mark.parametrize(
    ("ranks", "keras", "scenario", "arguments"),
    [
        (ranks, 3, scenario, arguments)
        for ranks in (2, 3, 1)
        for scenario, arguments in (
            ("fitted", ("SGD", False, {"accumulation": K})),
            ("fitted", ("Adagrad", False, {"accumulation": K})),
            ("fitted", ("Adam", True, {"accumulation": K})),
            ("looped", ("Adagrad", K)),
        )
    ],
)
def test_accumulation_of_keras_is_that_of_one_process(
    run_scenario, ranks, keras, scenario, arguments
):
    """Keras 3's `gradient_accumulation_steps`, over the ends of epochs."""
    scenario = f"consistency_scenarios.{scenario}"
    (expected,) = run_scenario(
        scenario, 4, *arguments, ranks=1, keras=keras, strategy=False
    )
    for found in run_scenario(
        scenario, 4, *arguments, ranks=ranks, keras=keras
    ):
        assert_close(found, expected)


@pytest.mark.parametrize(("ranks", "keras"), [(2, 3)])
def test_accumulation_of_keras_is_resumed(run_scenario, ranks, keras):
    """Accumulators of dense weights and of tables are saved."""
    scenario = "consistency_scenarios.resumed"
    run_scenario(scenario, "Adagrad", K, ranks=ranks, keras=keras)


@pytest.mark.parametrize(
    ("ranks", "keras", "mode"),
    [
        *((2, 3, mode) for mode in (ACCUMULATE, LOCAL, TABLES, ASP)),
        (2, 3, ["SSP", {"staleness": 2}]),
        (3, 2, LOCAL),
        (3, 2, ["BAP", {}]),
    ],
    ids=name_of_mode,
)
def test_ranks_need_not_delete_models_at_the_same_time(
    run_scenario, ranks, keras, mode
):
    arguments = (4, "SGD")
    found = run_scenario(
        "consistency_scenarios.fitted_after_others",
        *arguments,
        ranks=ranks,
        keras=keras,
        consistency=mode,
    )
    alive = [each.pop("alive") for each in found]
    if mode[0] in ("SSP", "BAP"):  # Two runs differ.
        for each in found[1:]:
            assert_close(
                {name: each[name] for name in each if name != "loss"},
                {name: found[0][name] for name in each if name != "loss"},
            )
    else:
        expected = run_scenario(
            "consistency_scenarios.fitted",
            *(*arguments, False, {}),
            ranks=ranks,
            keras=keras,
            consistency=mode,
        )
        for each, other in zip(found, expected, strict=True):
            assert_close(each, other)
    assert len(set(alive)) > 1, alive


def simulated(
    ranks, size, samples, outer, in_loop, epochs=2, significance=None
):
    """Local momentum steps of ranks, each on its part of every batch."""
    rng = np.random.default_rng(7)
    x = rng.normal(size=[samples, 3]).astype(np.float32)
    y = rng.normal(size=[samples, 1]).astype(np.float32)
    weights = np.full([ranks, 3], 0.5)
    slots = np.zeros([ranks, 3])
    start, velocity = weights[0].copy(), np.zeros(3)

    def end_round():
        nonlocal weights, start, velocity
        mean = np.average(weights, axis=0, weights=trained)
        if outer:
            gradient = start - mean
            velocity = outer["momentum"] * velocity + gradient
            gradient = gradient + outer["momentum"] * velocity
            mean = start - outer["learning_rate"] * gradient
        weights, start = np.tile(mean, [ranks, 1]), mean
        trained[:] = 0

    trained, since = np.zeros(ranks), np.zeros(ranks)
    for _ in range(epochs):
        for step, first in enumerate(range(0, samples, size), 1):
            count = min(size, samples - first)
            cuts = [first + r * count // ranks for r in range(ranks + 1)]
            own = [np.arange(*cut) for cut in itertools.pairwise(cuts)]
            for rank, places in enumerate(own):
                error = x[places] @ weights[rank] - y[places, 0]
                # A loop divides by a constant, for a sum over the ranks.
                divisor = size / ranks if in_loop else len(places)
                gradient = 2 * x[places].T @ error / divisor
                slots[rank] = 0.5 * slots[rank] - 0.05 * gradient
                weights[rank] = weights[rank] + slots[rank]
                trained[rank] += len(places)
                since[rank] += len(places)
            if significance is None:
                ends = step % K == 0
            else:
                moved = np.linalg.norm(weights - start, axis=1)
                ends = np.any(moved > significance * np.linalg.norm(start))
            if ends:
                end_round()
        if trained.any():
            end_round()
        slots = np.tile(np.average(slots, axis=0, weights=since), [ranks, 1])
        since[:] = 0
    return weights[0], slots[0], velocity


@pytest.mark.parametrize(
    ("ranks", "keras", "outer", "in_loop"),
    [
        *(
            (*place, outer, False)
            for place in (*BOTH, (3, 3))
            for outer in (None, OUTER)
        ),
        *((*place, None, True) for place in BOTH),
    ],
)
def test_local_steps_are_those_of_the_papers(
    run_scenario, ranks, keras, outer, in_loop
):
    """As NumPy computes them: unequal parts, an unfinished round, slots."""
    mode = ["LocalSteps", {"k": K, "outer": outer and ["Nesterov", outer]}]
    size, samples = 7, 49 + 3
    weights, slots, velocity = simulated(ranks, size, samples, outer, in_loop)
    for found in run_scenario(
        "consistency_scenarios.linear",
        *(size, samples, in_loop),
        ranks=ranks,
        keras=keras,
        consistency=mode,
    ):
        np.testing.assert_allclose(found[0], weights, rtol=1e-4, atol=1e-6)
        for one in [slots, velocity] if outer else [slots]:
            assert any(
                np.allclose(one, other, rtol=1e-4, atol=1e-6)
                for other in found[1:]
            ), (one, found[1:])


@pytest.mark.parametrize(("ranks", "keras"), (*BOTH, (3, 3)))
def test_significant_updates_of_dense_weights_are_sent(
    run_scenario, ranks, keras
):
    """As NumPy computes them: some steps send, and others do not."""
    size, samples, significance = 7, 49 + 3, 0.5
    weights, slots, _ = simulated(
        *(ranks, size, samples, None, False), significance=significance
    )
    for found in run_scenario(
        "consistency_scenarios.linear",
        *(size, samples, False),
        ranks=ranks,
        keras=keras,
        consistency=["ASP", {"significance": significance}],
    ):
        np.testing.assert_allclose(found[0], weights, rtol=1e-4, atol=1e-6)
        assert any(
            np.allclose(slots, other, rtol=1e-4, atol=1e-6)
            for other in found[1:]
        )


@pytest.mark.parametrize(("ranks", "keras"), BOTH)
def test_without_a_limit_every_step_is_one_of_one_process(
    run_scenario, ranks, keras
):
    arguments = ("consistency_scenarios.fitted", 4, "SGD", False, {})
    (expected,) = run_scenario(*arguments, ranks=1, keras=keras, strategy=False)
    for found in run_scenario(
        *arguments,
        ranks=ranks,
        keras=keras,
        consistency=["ASP", {"significance": 0.0}],
    ):
        assert_close(found, expected)
