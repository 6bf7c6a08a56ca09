# SPDX-License-Identifier: Apache-2.0
"""What becomes of plans: saved, edited, carried to other ranks, shown."""

import concurrent.futures
import dataclasses
import json

import pytest

from tests.tables import planned
from tests.tables.planned import MEDIUM
from tests.tables.planned import plan_workload
from tfdist_ext.tables import plan as plan_lib
from tfdist_ext.tables.placement import TablePlacement


def test_plans_are_saved_and_loaded(tmp_path):
    given = TablePlacement(2, 2, (3, 1, 0, 2), deduplicate=True)
    plan = planned.make_plan(
        planned.random_sizes(3, 10), 4, forced={"t3": given}
    )
    plan.save(tmp_path / "plan.json")
    loaded = plan_lib.ShardingPlan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert loaded.summary() == plan.summary()
    forced = planned.make_plan(
        planned.random_sizes(3, 10), 4, forced=loaded.placements
    )
    assert forced.placements == plan.placements


def test_a_plan_says_that_it_was_made_before_the_batch_was_known(tmp_path):
    sizes = planned.random_sizes(3, 4)
    assumed, known = (
        planned.make_plan(sizes, 4, batch_size=size) for size in (None, 256)
    )
    words = "Made before the batch was known: 256 samples per rank"
    for plan, says in ((assumed, True), (known, False)):
        assert (words in plan.summary()) == says
        assert (words in plan.explain("t0")) == says
        assert plan.problem.setting.batch_known != says
    assert assumed == known
    assumed.save(tmp_path / "plan.json")
    assert plan_lib.ShardingPlan.load(tmp_path / "plan.json").summary() == (
        assumed.summary()
    )
    content = assumed.to_dict()
    del content["problem"]["setting"]["batch_known"]  # an older file
    assert plan_lib.ShardingPlan.from_dict(content) == known


def test_an_edited_file_is_another_plan(tmp_path):
    path = tmp_path / "plan.json"
    plan = planned.make_plan([MEDIUM, MEDIUM], 4)
    plan.save(path)
    content = json.loads(path.read_text())
    content["placements"]["t0"]["ranks"] = [9]
    content["placements"]["t0"]["row_parts"] = 1
    content["placements"]["t0"]["column_parts"] = 1
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"plan\.json .*ranks \(9,\)"):
        plan_lib.ShardingPlan.load(path)
    content["placements"]["t0"]["ranks"] = [2]
    path.write_text(json.dumps(content))
    edited = plan_lib.ShardingPlan.load(path)
    assert edited.placement_of("t0").ranks == (2,)
    assert edited.total.sent.shape == (4,)


def test_a_reader_never_finds_half_a_plan(tmp_path):
    """All ranks may save to one path, and read it at once."""
    plan = planned.make_plan([MEDIUM, MEDIUM], 4)
    path = tmp_path / "plan.json"
    plan.save(path)

    def save_often():
        for _ in range(200):
            plan.save(path)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        savers = [pool.submit(save_often) for _ in range(2)]
        while not all(saver.done() for saver in savers):
            json.loads(path.read_text())
    for saver in savers:
        saver.result()
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_save_leaves_nothing_behind(tmp_path):
    plan = planned.make_plan([MEDIUM, MEDIUM], 4)
    (tmp_path / "plan.json").mkdir()
    with pytest.raises(OSError):
        plan.save(tmp_path / "plan.json")
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "x"}'])
def test_other_files_are_refused(tmp_path, text):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ValueError, match="no sharding plan"):
        plan_lib.ShardingPlan.load(tmp_path / "plan.json")


@pytest.mark.parametrize(
    "placement", ["row_wise", TablePlacement.table_wise(2)]
)
def test_a_replaced_table_leaves_the_others(placement):
    plan = planned.make_plan(planned.random_sizes(6, 8), 4)
    edited = plan.replace("t5", placement)
    changed = edited.placement_of("t5")
    assert placement in (changed, changed.kind)
    for name in set(plan.placements) - {"t5"}:
        assert edited.placement_of(name) == plan.placement_of(name)
    assert (edited.total.sent != plan.total.sent).any()
    assert edited.replace("t5", plan.placement_of("t5")).placements == (
        plan.placements
    )


def test_a_plan_is_carried_to_other_ranks():
    sizes = planned.random_sizes(4, 8)
    plan = planned.make_plan(sizes, 4)
    assert plan.at(8) == planned.make_plan(sizes, 8)


def test_placements_on_ranks_that_are_not_there_keep_their_kind():
    sizes = [(2**17, 58, 100), (2**17, 58, 1), (20, 4, 1)]
    given = TablePlacement.row_wise(4, deduplicate=True)
    here = TablePlacement.table_wise(1)
    plan = planned.make_plan(sizes, 4, forced={"t0": given, "t1": here})
    fewer = plan.at(2)
    assert fewer.placement_of("t0") == TablePlacement.row_wise(
        2, deduplicate=True
    )
    assert fewer.placement_of("t1") == here
    assert fewer.at(4).placement_of("t0") == given


def test_files_from_before_hot_rows_were_removed_are_read(tmp_path):
    plan = planned.make_plan([MEDIUM, (20, 4, 1)], 4, forced={"t1": "row_wise"})
    content = plan.to_dict()
    for table in content["problem"]["tables"]:
        table["hot_rows"] = 0
    for placement in content["placements"].values():
        placement["hot_ids"] = []
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(content))
    assert plan_lib.ShardingPlan.load(path) == plan
    for place, value in (
        (content["problem"]["tables"][0], {"hot_rows": 3}),
        (content["placements"]["t1"], {"hot_ids": [5]}),
    ):
        off = {name: place[name] for name in value}
        place.update(value)
        path.write_text(json.dumps(content))
        message = "plan.json holds .*was removed.*docs/decisions.md"
        with pytest.raises(ValueError, match=message):
            plan_lib.ShardingPlan.load(path)
        place.update(off)


def test_the_summary_has_a_line_per_table():
    plan = plan_workload("criteo", 4)
    text = plan.summary()
    for table in plan.problem.tables:
        assert f"{table.rows} x {table.dim}" in text
    assert "row_wise, deduplicated" in text and "the busiest rank" in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_explain_has_all_placements_and_the_reason():
    plan = plan_workload("timelines", 4, forced={"t1": "row_wise"})
    text = plan.explain("t0")
    for word in ("data_parallel", "table_wise", "row_wise", "column_wise"):
        assert word in text
    assert "grid 2 x 2, deduplicated" in text and "\n* " in text
    assert "asked for" in plan.explain("t1")
    assert "given" in plan.replace("t0", TablePlacement()).explain("t0")


def test_a_plan_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    plan = plan_workload("criteo", 4)
    sheet = plan.plot(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 10_000
    titles = [panel.get_title() for panel in sheet.axes]
    assert titles[0].startswith("memory") and len(titles) == 3


def test_plans_cannot_be_changed():
    plan = planned.make_plan([MEDIUM], 4)
    with pytest.raises(TypeError):
        plan.placements["t0"] = TablePlacement()
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.problem = None


def test_a_plan_is_for_its_own_tables():
    tables, features = planned.configs([(1000, 8, 5)])
    plan = plan_lib.plan(tables, features, 4, forced={"t0": "row_wise"})
    pooled = not plan.placement_of("t0").deduplicate
    plan.check_fits(tables[0])
    for other, message in (
        ({"vocabulary_size": 999}, "1000 rows and 8 columns"),
        (
            {"deduplicate": pooled},
            "deduplicate",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            plan.check_fits(dataclasses.replace(tables[0], **other))
