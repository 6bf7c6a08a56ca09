# SPDX-License-Identifier: Apache-2.0
"""The report on computed costs of many ranks."""

import pytest

from benchmarks import scaling_model


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ([1, 2, 4, 8], 8),
        ([1, 2, 2.1, 2.2], 2),
        ([5, 1, 2, 3], 1),
        ([1, 2, 1.5, 4], 8),
        ([1, 1.1, 1.1, 1.1], 1),
    ],
)
def test_a_placement_pays_while_ranks_bring_speed(speeds, expected):
    assert scaling_model.pays_up_to(speeds, (1, 2, 4, 8), 1.2) == expected


def test_the_report_has_all_placements(capsys):
    scaling_model.main(["--workloads", "smoke"])
    text = capsys.readouterr().out
    for placement in scaling_model.PLACEMENTS:
        assert f"  {placement} " in text
    assert "smoke, 256 samples per rank" in text
    assert "pays up to" in text
