# SPDX-License-Identifier: Apache-2.0
"""A short soak: each fault once, in an order of its own."""

import random

import pytest

from tests.fault import soak
from tests.ranks.servers import ENTER

pytestmark = pytest.mark.fault
RANKS, SEED, STEPS = 2, 3, 500


def test_nothing_is_lost(servers, tmp_path):
    faults = list(soak.FAULTS)
    dice = random.Random(SEED)
    dice.shuffle(faults)
    launcher = [
        *soak.launcher(RANKS, 2 * len(faults)),
        str(ENTER),
    ]
    environment = servers.environment(3, RANKS)

    def make(name, steps, every):
        folder = tmp_path / name
        return soak.Job(launcher, environment, folder, RANKS, steps, every)

    soak.soak(make, faults, dice, STEPS)
