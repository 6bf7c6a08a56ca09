# SPDX-License-Identifier: Apache-2.0
"""Orbax checkpoints of Keras 3, written and read at different ranks."""

import importlib.util

import pytest

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        importlib.util.find_spec("orbax") is None,
        reason="needs orbax-checkpoint: make test-orbax",
    ),
]

SCENARIOS = (
    "own_optimizer_of_a_table",
    "options",
    "failures",
    "other_models",
    "numbered_names",
)


@pytest.mark.parametrize(
    ("ranks", "keras", "reading", "optimizer"),
    [
        (2, 3, 1, "own"),
        (2, 3, 2, "own"),
        (2, 3, 3, "own"),
        (1, 3, 2, "own"),
        (3, 3, 2, "keras"),
        (2, 3, 3, "keras"),
        (2, 3, 1, "split"),
        (2, 3, 2, "same"),
    ],
)
def test_written_here_read_there(
    pools, tmp_path, ranks, keras, reading, optimizer
):
    """Tables under other placements, and slots of each kind of optimizer."""
    expected, *others = pools.run(
        "orbax_scenarios.write", tmp_path, optimizer, ranks=ranks, keras=keras
    )
    assert len(others) == ranks - 1
    pools.run(
        *("orbax_scenarios.read", tmp_path, expected, optimizer),
        ranks=reading,
        keras=keras,
    )


@pytest.mark.parametrize(("ranks", "keras"), [(2, 3), (3, 3)])
def test_stock_keras_reads_it(pools, tmp_path, ranks, keras):
    expected, *_ = pools.run(
        "orbax_scenarios.write", tmp_path, "keras", ranks=ranks, keras=keras
    )
    scenario = "orbax_scenarios.stock_reads"
    pools.run(scenario, tmp_path, expected, ranks=1, keras=3, strategy=False)


@pytest.mark.parametrize(("ranks", "keras"), [(1, 3), (2, 3)])
def test_one_of_stock_keras_is_read(pools, tmp_path, ranks, keras):
    (expected,) = pools.run(
        *("orbax_scenarios.stock_writes", tmp_path),
        ranks=1,
        keras=keras,
        strategy=False,
    )
    scenario = "orbax_scenarios.read_of_stock"
    pools.run(scenario, tmp_path, expected, ranks=ranks, keras=keras)


@pytest.mark.parametrize(
    ("ranks", "keras", "reading"), [(2, 3, 1), (2, 3, 2), (1, 3, 2)]
)
def test_dynamic_vocabularies(pools, tmp_path, ranks, keras, reading):
    expected, *_ = pools.run(
        *("orbax_scenarios.write_vocabularies", tmp_path),
        ranks=ranks,
        keras=keras,
    )
    scenario = "orbax_scenarios.read_vocabularies"
    pools.run(scenario, tmp_path, expected, ranks=reading, keras=keras)


@pytest.mark.parametrize(
    ("ranks", "keras", "scenario"), [(2, 3, name) for name in SCENARIOS]
)
def test_scenario(run_scenario, ranks, keras, scenario):
    run_scenario(f"orbax_scenarios.{scenario}", ranks=ranks, keras=keras)
