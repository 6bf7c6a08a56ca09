# SPDX-License-Identifier: Apache-2.0
"""One exchange for all tables: shared, packed, bad ids."""

import pytest
from launching import run_ranks

pytestmark = pytest.mark.process
SCENARIOS = (
    "shared",
    "built_by_fit",
    "packed",
    "prefetch",
    "prefetch_distinct",
    "gathered",
    "bad_ids",
    "bfloat16",
)


@pytest.mark.parametrize(
    ("ranks", "scenarios"), [(2, SCENARIOS), (4, ("packed",))], ids=["2", "4"]
)
def test_scenarios(ranks, scenarios):
    run_ranks("exchange_program.py", ranks, *scenarios)
