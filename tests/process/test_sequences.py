# SPDX-License-Identifier: Apache-2.0
"""Models of sequences: any number of ranks trains what Keras's layer does."""

import pytest
import scenarios

pytestmark = pytest.mark.process

CASES = [
    (2, 3, "gru4rec/row/sgd"),
    (4, 3, "gru4rec/row/sgd"),
    (2, 3, "sasrec/auto/sgd"),
    (2, 3, "own_loss/row/sgd"),
    (4, 3, "bst/auto/sgd"),
    (2, 3, "hstu/row/sgd"),
    (2, 2, "hstu/auto/sgd/regularized"),
    (4, 2, "sasrec/row/adam"),
    (2, 2, "bert4rec/column/adam"),
]


# Scenarios that are not a pair of a writer and a reader.
SCENARIOS = scenarios.without(
    scenarios.of("sequence_scenarios"), {"save", "restore"}
)


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize(("ranks", "keras"), [(3, 3), (2, 2)])
def test_scenario(run_scenario, ranks, keras, scenario):
    run_scenario(scenario, ranks=ranks, keras=keras)


@pytest.mark.parametrize("keras", [3, 2])
def test_files_are_read_by_other_numbers_of_ranks(pools, tmp_path, keras):
    pools.run("sequence_scenarios.save", tmp_path, ranks=3, keras=keras)
    pools.run("sequence_scenarios.restore", tmp_path, ranks=2, keras=keras)


@pytest.mark.parametrize(("ranks", "keras", "case"), CASES)
def test_training_equals_keras_in_one_process(one_process, ranks, keras, case):
    own_rule = case.endswith("/regularized")
    one_process.check("sequence_cases", case, ranks, keras, own_rule)
