# SPDX-License-Identifier: Apache-2.0
"""Plans are valid, keep their limits, and are close to the best."""

import dataclasses
import itertools
import math
import subprocess
import sys

import numpy as np
import pytest

from tests.tables import planned
from tests.tables.planned import MEDIUM
from tests.tables.planned import plan_workload
from tfdist_ext.tables import load as load_lib
from tfdist_ext.tables import plan as plan_lib
from tfdist_ext.tables import problem
from tfdist_ext.tables.balance import Options
from tfdist_ext.tables.load import Load
from tfdist_ext.tables.placement import TablePlacement
from tfdist_ext.tables.table_config import FeatureConfig
from tfdist_ext.tables.table_config import TableConfig

WORKLOADS = ["timelines", "ads", "criteo", "movielens", "a9a", "criteo_sample"]
KINDS = ["data_parallel", "table_wise", "row_wise", "column_wise", "grid"]


def check_valid(plan):
    """Every cell has rows and columns and a rank of its own."""
    for table in plan.problem.tables:
        placement = plan.placement_of(table.name)
        assert placement.row_parts <= table.rows
        assert placement.column_parts <= table.dim
        cells = placement.row_parts * placement.column_parts
        assert len(placement.ranks) in (0, cells)
        assert set(placement.ranks) <= set(range(plan.world_size))
        if placement.kind == "data_parallel":
            assert not placement.deduplicate


def check_parts(kind, table, placement, world_size):
    """Over as many ranks as the table allows, each way that the kind says."""
    parts = placement.row_parts, placement.column_parts
    if kind == "row_wise":
        assert parts == (min(table.rows, world_size), 1)
    elif kind == "column_wise":
        assert parts == (1, min(table.dim, world_size))
    elif kind == "grid" and world_size > 2 and min(table.rows, table.dim) > 1:
        assert min(parts) > 1  # 4 and 6 ranks: not prime


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 7, 8, 24])
@pytest.mark.parametrize("seed", range(3))
def test_plans_are_valid_and_deterministic(seed, world_size):
    sizes = planned.random_sizes(seed, 30)
    plan = planned.make_plan(sizes, world_size)
    check_valid(plan)
    again = planned.make_plan(sizes, world_size)
    assert again == plan and again.summary() == plan.summary()


@pytest.mark.parametrize("world_size", [2, 4, 6])
@pytest.mark.parametrize("kind", [*KINDS, "default_device", "sparsecore"])
def test_a_kind_can_be_forced(kind, world_size):
    sizes = planned.random_sizes(1, 12)
    forced = {f"t{i}": kind for i in range(12)}
    plan = planned.make_plan(sizes, world_size, forced=forced)
    check_valid(plan)
    for table in plan.problem.tables:
        check_parts(kind, table, plan.placement_of(table.name), world_size)
    kinds = {placement.kind for placement in plan.placements.values()}
    if kind == "default_device":
        assert kinds == {"data_parallel"}
    elif kind == "sparsecore":
        assert "data_parallel" not in kinds
    elif kind in ("data_parallel", "table_wise"):
        assert kinds == {kind}


@pytest.mark.parametrize(
    ("short", "kind"),
    [
        ("row", "row_wise"),
        ("column", "column_wise"),
        ("table", "table_wise"),
        ("replicated", "data_parallel"),
    ],
)
def test_short_names_mean_the_same(short, kind):
    plan = planned.make_plan([MEDIUM], 4, forced={"t0": kind})
    assert planned.make_plan([MEDIUM], 4, forced={"t0": short}) == plan
    assert plan.replace("t0", short) == plan
    saved = plan.to_dict()
    saved["problem"]["tables"][0]["placement"] = short
    assert plan_lib.ShardingPlan.from_dict(saved) == plan


@pytest.mark.parametrize(
    ("kind", "world_size", "parts"),
    [
        ("row_wise", 4, (4, 1)),
        ("column_wise", 4, (1, 4)),
        ("column_wise", 24, (1, 16)),
        ("grid", 4, (2, 2)),
        ("grid", 1, (1, 1)),
        ("row_wise", 1, (1, 1)),
        ("table_wise", 4, (1, 1)),
    ],
)
def test_a_kind_spans_as_many_ranks_as_it_can(kind, world_size, parts):
    plan = planned.make_plan([MEDIUM], world_size, forced={"t0": kind})
    placement = plan.placement_of("t0")
    assert (placement.row_parts, placement.column_parts) == parts


def test_a_grid_of_a_prime_number_of_ranks_is_rows_or_columns():
    plan = planned.make_plan([MEDIUM], 5, forced={"t0": "grid"})
    assert plan.placement_of("t0").kind in ("row_wise", "column_wise")


def test_tables_say_what_they_want():
    given = TablePlacement(1, 2, (3, 1), deduplicate=True)
    tables = [
        TableConfig("given", 1000, 16, placement=given),
        TableConfig("rows", 1000, 16, placement="row_wise", deduplicate=True),
        TableConfig("copy", 10**6, 16, placement="default_device"),
        TableConfig("pooled", 10**6, 16, deduplicate=False),
    ]
    features = [FeatureConfig(t.name, t, (None, 1), (None, 16)) for t in tables]
    plan = plan_lib.plan(tables, features, 4)
    assert plan.placement_of("given") == given
    assert plan.placement_of("rows").kind == "row_wise"
    assert plan.placement_of("rows").deduplicate
    assert plan.placement_of("copy").kind == "data_parallel"
    assert not plan.placement_of("pooled").deduplicate
    # What a caller forces goes before.
    forced = {"given": "table_wise"}
    plan = plan_lib.plan(tables, features, 4, forced=forced)
    assert plan.placement_of("given").kind == "table_wise"


def test_one_process_holds_whole_tables():
    plan = planned.make_plan(planned.random_sizes(2, 10), 1)
    assert set(plan.placements.values()) == {TablePlacement.table_wise()}
    assert plan.bytes_per_step == 0


@pytest.mark.parametrize("share", [2.0, 1.2, 1.02])
@pytest.mark.parametrize("seed", range(3))
def test_the_memory_limit_is_kept(seed, share):
    sizes = planned.random_sizes(seed, 40)
    even = sum(rows * dim * 8 for rows, dim, _ in sizes) / 8
    plan = planned.make_plan(sizes, 8, memory_limit=share * even)
    check_valid(plan)
    assert plan.memory <= share * even


@pytest.mark.parametrize("seed", range(3))
def test_the_least_memory_is_named_and_enough(seed):
    sizes = planned.random_sizes(seed, 25)
    with pytest.raises(ValueError, match="The least that") as caught:
        planned.make_plan(sizes, 4, memory_limit=1000.0)
    words = str(caught.value).split()
    least = int(words[words.index("bytes", 12) - 1].replace(",", ""))
    assert planned.make_plan(sizes, 4, memory_limit=least).memory <= least


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_bytes_of_workloads_are_close_to_the_best_tried(name, world_size):
    plan = plan_workload(name, world_size)
    check_valid(plan)
    names = list(plan.placements)
    tried = [
        plan_workload(name, world_size, forced=dict.fromkeys(names, kind))
        for kind in KINDS
    ]
    for deduplicate in (False, True):
        everywhere = [
            TablePlacement.table_wise(0, deduplicate),
            TablePlacement.row_wise(world_size, deduplicate),
        ]
        tried += [
            plan_workload(name, world_size, forced=dict.fromkeys(names, p))
            for p in everywhere
        ]
    best = min(other.bytes_per_step for other in tried)
    assert plan.bytes_per_step <= 1.1 * best


def test_timelines_and_ads_are_spread():
    assert plan_workload("timelines", 4).bytes_per_step < 0.48e6
    plan = plan_workload("ads", 4)
    even = sum(table.rows * table.dim * 8 for table in plan.problem.tables) / 4
    assert plan.memory == pytest.approx(even, rel=0.01)


def test_one_wide_table_with_many_ids_is_cut_by_column():
    plan = planned.make_plan([(2**17, 58, 100)], 4)
    assert plan.placement_of("t0").kind == "column_wise"


def test_criteo_copies_tiny_tables_and_deduplicates_large_ones():
    plan = plan_workload("criteo", 4)
    for table in plan.problem.tables:
        placement = plan.placement_of(table.name)
        if table.rows < 300:
            assert placement.kind == "data_parallel", table
        if table.rows > 10_000:
            assert placement.deduplicate, table


def test_a_tiny_model_needs_no_exchange():
    plan = plan_workload("a9a", 4)
    assert plan.placement_of("t0").kind == "data_parallel"


@pytest.mark.parametrize("seed", range(4))
def test_plans_are_close_to_the_best_of_all(seed):
    sizes = planned.random_sizes(seed, 3)
    plan = planned.make_plan(sizes, 2, bytes_slack=math.inf)
    exchanges = load_lib.load_of_exchanges(plan.problem.setting)
    options = Options(plan.problem)
    ways = [list(all_loads(options, index)) for index in range(3)]

    def seconds(loads):
        partitioned = any(load.ids.max() > 0 for load in loads)
        start = exchanges if partitioned else Load()
        return np.max(sum(loads, start).time(plan.problem.setting))

    best = min(map(seconds, itertools.product(*ways)))
    assert plan.seconds_per_step <= 1.05 * best


def all_loads(options, index):
    """Loads of a table in every shape, on all ranks that could hold it."""
    table = options.problem.tables[index]
    for shape in np.flatnonzero(options.allowed[index]).tolist():
        row_parts, column_parts, deduplicate = options.triples[shape]
        for ranks in itertools.permutations(range(2), row_parts * column_parts):
            placement = TablePlacement()
            if ranks:
                placement = TablePlacement(
                    row_parts, column_parts, ranks, deduplicate
                )
            yield load_lib.load_of_placement(
                options.costs.pick(index, shape),
                table.dim,
                placement,
                options.problem.setting,
            )


@pytest.mark.parametrize("seed", range(2))
def test_totals_are_the_sum_over_tables(seed):
    plan = planned.make_plan(planned.random_sizes(seed, 20), 6)
    exchanges = load_lib.load_of_exchanges(plan.problem.setting)
    sent = sum(load.sent for load in plan.loads.values()) + exchanges.sent
    np.testing.assert_allclose(plan.total.sent, sent)
    assert plan.bytes_per_step == plan.total.sent.max()


def test_a_faster_link_never_makes_a_step_slower():
    sizes = planned.random_sizes(5, 20)
    seconds = [
        planned.make_plan(
            sizes, 4, link_bytes_per_second=speed, bytes_slack=math.inf
        ).seconds_per_step
        for speed in (1e7, 1e8, 1e9, 1e10)
    ]
    assert seconds == sorted(seconds, reverse=True)


def test_known_unique_ids_change_the_plan():
    table = TableConfig("t", 10**6, 16)
    feature = FeatureConfig("f", table, (None, 1), (None, 16))
    few = dataclasses.replace(feature, unique=50)
    many = dataclasses.replace(feature, unique=2040)
    sent = [
        plan_lib.plan(
            [table], [f], 4, batch_size=2048, popularity={"t": 0.5}
        ).bytes_per_step
        for f in (few, feature, many)
    ]
    assert sent[0] < 0.1 * sent[1]
    assert sent[2] == pytest.approx(sent[1], rel=0.05)


def test_a_plan_of_nothing():
    plan = plan_lib.plan([], [], 4)
    assert dict(plan.placements) == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world_size": 0}, "world_size=0"),
        ({"batch_size": 2.5}, "batch_size=2.5"),
        ({"wire_bytes": 0}, "wire_bytes=0"),
        ({"link_bytes_per_second": -1.0}, "link_bytes_per_second=-1.0"),
        ({"memory_limit": 0}, "memory_limit=0"),
        ({"bytes_slack": -1}, "bytes_slack=-1"),
        ({"slots_per_weight": -1}, "slots_per_weight"),
        ({"popularity": -1.0}, "-1.0"),
        ({"popularity": {"t0": 99.0}}, r"99.0 \(table 't0'\)"),
        ({"forced": {"x": "row_wise"}}, "'x'"),
        ({"forced": {"t0": "diagonal"}}, r"'diagonal' \(table 't0'\)"),
        ({"forced": {"t0": TablePlacement.table_wise(4)}}, "ranks 0 to 3"),
        ({"forced": {"t0": TablePlacement.column_wise(4)}}, "has 2 columns"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    arguments = {"world_size": 4, **arguments}
    with pytest.raises(ValueError, match=message):
        planned.make_plan([(1000, 2, 1)], **arguments)


def test_tables_and_features_must_fit_together():
    tables, features = planned.configs([MEDIUM, MEDIUM])
    with pytest.raises(ValueError, match="'f1' looks up in a table"):
        plan_lib.plan(tables[:1], features, 4)
    with pytest.raises(ValueError, match="tables must be distinct"):
        plan_lib.plan([tables[0]] * 2, features[:1], 4)
    with pytest.raises(ValueError, match="features must be distinct"):
        plan_lib.plan(tables, [features[0]] * 2, 4)
    plan = plan_lib.plan(tables, features, 4)
    with pytest.raises(ValueError, match="no table 'x'"):
        plan.explain("x")


def test_only_what_fits_a_table_is_explained():
    plan = planned.make_plan([(2, 1, 1), MEDIUM], 4)
    for parts in ("4 x 1", "1 x 4"):
        assert parts in plan.explain("t1")
        assert parts not in plan.explain("t0")


@pytest.mark.parametrize("placement", ["row_wise", "column_wise", "grid"])
def test_a_table_of_one_number_is_one_part(placement):
    tables, features = planned.configs([(1, 1, 1)], placement=placement)
    plan = plan_lib.plan(tables, features, 4)
    placed = plan.placement_of("t0")
    assert (placed.row_parts, placed.column_parts) == (1, 1)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((None,), 1),
        ((None, 7), 7),
        ((None, 1000), None),
        ((None, None), None),
        ([(None,), (None, 3)], 4),
        ([(None,), (None, None)], None),
    ],
)
def test_hotness_is_read_off_the_input_shape(shape, expected):
    assert problem.hotness(shape, 1000) == expected


def test_planning_does_not_load_tensorflow():
    program = (
        "import sys, tfdist_ext.tables.plan\n"
        "loaded = {'tensorflow', 'keras', 'matplotlib'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
