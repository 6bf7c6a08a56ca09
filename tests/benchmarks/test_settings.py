# SPDX-License-Identifier: Apache-2.0
"""Compared settings: how they are read, what the table says of them."""

import argparse

import pytest

from benchmarks import settings


def test_settings_are_names_and_values():
    text = "sharding=auto,prefetch_ids=true,batch=512"
    expected = {"sharding": "auto", "prefetch_ids": True, "batch": 512}
    assert settings.parse_setting(text) == expected


@pytest.mark.parametrize("text", ["", "auto", "sharding=auto,packed"])
def test_what_is_no_setting_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="NAME=VALUE"):
        settings.parse_setting(text)


def _rank(*measured):
    """A rank's result: of every setting the rounds' milliseconds and bytes."""
    rounds = zip(*(times for times, _ in measured), strict=True)
    return {
        "rounds": [
            {
                str(index): {
                    "p50": time,
                    "per_step": {
                        "egress_bytes": measured[index][1],
                        "cpu_ms": 2 * time,
                    },
                }
                for index, time in enumerate(times)
            }
            for times in rounds
        ]
    }


def test_the_slowest_rank_of_each_round_counts():
    results = (
        _rank(([10.0, 12.0, 30.0], 2e6), ([6.0, 4.0, 5.0], 1e6)),
        _rank(([11.0, 10.0, 10.0], 1e6), ([1.0, 9.0, 1.0], 1.5e6)),
    )
    given = [{"sharding": "row"}, {"sharding": "auto", "wire_packing": True}]
    _, first, second = settings.table(given, results).splitlines()
    assert first.split() == [
        *("12.00", "11.00", "-", "30.00", "0%", "24.00", "2.0000", "0%"),
        "sharding=row",
    ]
    assert second.split() == [
        *("6.00", "5.00", "-", "9.00", "50%", "10.00", "1.5000", "25%"),
        "sharding=auto,wire_packing=True",
    ]
