# SPDX-License-Identifier: Apache-2.0
"""Tables of a model are placed together, and moved, when it comes to `fit`."""

import pytest
import scenarios

pytestmark = pytest.mark.process

EVERY = scenarios.of("placing_scenarios")
OPTIONS = {"measured_at_start": {"measure": True}}
# What knows nothing of the Keras around it, or is not in tf_keras.
TF_KERAS = scenarios.without(
    EVERY, {"saved_models", "wire_dtypes", "measured", "measured_at_start"}
)
# Keras 3 takes no such arrays.
KERAS_3 = scenarios.without(EVERY, {"arrays_on_disk"})
# Models of every make, and batches that do not divide.
AT_THREE_RANKS = scenarios.only(
    EVERY, {"functional", "subclassed", "nested", "shared", "embeddings"}
)
AT_FOUR_RANKS = scenarios.only(EVERY, {"functional", "sequential", "weights"})


@pytest.mark.parametrize(
    ("ranks", "keras", "scenario"),
    [
        *((2, 3, s) for s in KERAS_3),
        *((2, 2, s) for s in TF_KERAS),
        *((3, 3, s) for s in AT_THREE_RANKS),
        *((4, 3, s) for s in AT_FOUR_RANKS),
    ],
)
def test_scenario(run_scenario, ranks, keras, scenario):
    options = OPTIONS.get(scenario.split(".")[1], {})
    run_scenario(scenario, ranks=ranks, keras=keras, **options)
