# SPDX-License-Identifier: Apache-2.0
"""Plans for ranks of different speeds."""

import collections

import pytest

from tests.tables import planned
from tfdist_ext.tables import plan as plan_lib

# Equal tables, and a link that costs nothing: only computing counts.
TABLES = [(100_000, 16, 10)] * 28
FAST_LINK = {"link_bytes_per_second": 1e15}


def tables_of_ranks(plan):
    counts = collections.Counter(
        rank for p in plan.placements.values() for rank in p.ranks
    )
    return [counts[rank] for rank in range(plan.world_size)]


def make_plan(speeds, world_size=4, **arguments):
    forced = {f"t{i}": "table_wise" for i in range(len(TABLES))}
    return planned.make_plan(
        *(TABLES, world_size),
        forced=forced,
        rank_speeds=speeds,
        **FAST_LINK,
        **arguments,
    )


def test_slow_rank_gets_fewer_tables():
    equal, slow = make_plan(None), make_plan([3, 3, 1, 3])
    assert tables_of_ranks(equal) == [7, 7, 7, 7]
    counts = tables_of_ranks(slow)
    assert sum(counts) == 28
    assert counts[2] < 4 and min(counts[:2] + counts[3:]) >= 8
    # What the equal plan would take on these ranks.
    blind = plan_lib.ShardingPlan(slow.problem, equal.placements)
    assert slow.seconds_per_step < blind.seconds_per_step


def test_equal_speeds_change_nothing():
    sizes = planned.random_sizes(0, 30)
    plain = planned.make_plan(sizes, 4)
    assert planned.make_plan(sizes, 4, rank_speeds=None).placements == (
        plain.placements
    )
    seconds = planned.make_plan(
        sizes, 4, rank_speeds=[1.0] * 4
    ).seconds_per_step
    assert seconds == pytest.approx(plain.seconds_per_step, rel=0.02)


def test_speeds_are_in_files_and_belong_to_their_ranks(tmp_path):
    plan = make_plan((3, 3, 1, 3))
    plan.save(tmp_path / "plan.json")
    loaded = plan_lib.ShardingPlan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert loaded.problem.setting.rank_speeds == (3.0, 3.0, 1.0, 3.0)
    assert plan.at(4).problem.setting.rank_speeds == (3.0, 3.0, 1.0, 3.0)
    assert plan.at(2).problem.setting.rank_speeds is None


@pytest.mark.parametrize(
    ("speeds", "message"),
    [
        ([1, 2], "one number for each of the 4 ranks"),
        ([1, 2, 3, 0], "`rank_speeds`.*0"),
        ([1, 2, 3, float("nan")], "`rank_speeds`.*nan"),
        ([1, 2, 3, "fast"], "`rank_speeds`.*fast"),
    ],
)
def test_wrong_speeds_are_refused(speeds, message):
    with pytest.raises(ValueError, match=message):
        make_plan(speeds)
