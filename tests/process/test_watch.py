# SPDX-License-Identifier: Apache-2.0
"""Training that watches itself, at several ranks, under both Kerases."""

import pathlib
import re
import subprocess

import pytest
import scenarios

from tests.ranks import servers as servers_lib

pytestmark = pytest.mark.process


EVERY = scenarios.of("watch_scenarios")


@pytest.mark.parametrize(
    ("ranks", "keras", "scenario"),
    [
        (ranks, keras, scenario)
        for ranks, keras, some in (
            (2, 3, EVERY),
            (4, 2, scenarios.without(EVERY, {"nan_leaves_the_state"})),
        )
        for scenario in some
    ],
)
def test_scenario(run_scenario, ranks, keras, scenario):
    run_scenario(scenario, ranks=ranks, keras=keras)


def test_the_launcher_says_how_it_goes(servers: servers_lib.Servers):
    """Steps of `fit` and of other loops, bytes, and the rank that is slow."""
    program = pathlib.Path(__file__).with_name("slow_rank_program.py")
    command = servers_lib.command(2, program)
    command[command.index("-n")] = "--stats-every=1.5"
    command.insert(command.index("2"), "-n")
    done = subprocess.run(
        command,
        env=servers.environment(3, 2),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^tfdist-run: (step .*)$", done.stderr, re.M)
    steps = [int(re.match(r"step (\d+): ", line)[1]) for line in lines]
    assert steps == sorted(steps) and steps[-1] == 100, lines
    slow = [line for line in lines if "slowest rank 1 (others wait" in line]
    assert len(slow) >= 2, lines
    rates = [float(x) for x in re.findall(r": ([0-9.]+) steps/s", slow[0])]
    assert 0 < rates[0] < 50, slow
    assert " 0 MB/s" not in slow[0], lines
    assert re.search(r"memory [0-9.]+ GB \([0-9.]+ on rank [01]\)", slow[0])
    waited = re.search(r"waited \(0.0, ([0-9.]+)\)", done.stdout)
    assert float(waited[1]) > 50 * 0.04, done.stdout
