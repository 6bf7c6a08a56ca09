# SPDX-License-Identifier: Apache-2.0
"""Which tables a plan puts on the ranks' GPUs."""

import dataclasses

import numpy as np
import pytest

from tests.tables import planned
from tfdist_ext.tables import plan as plan_lib
from tfdist_ext.tables.table_config import TableConfig

SIZES = planned.random_sizes(5, 30)


def plan_with(storages, **arguments):
    """A plan for `SIZES` of which some are asked for by number."""
    tables, features = planned.configs(SIZES)
    tables = [
        dataclasses.replace(table, storage=storages.get(i))
        for i, table in enumerate(tables)
    ]
    features = [
        dataclasses.replace(each, table=table)
        for each, table in zip(features, tables, strict=True)
    ]
    return plan_lib.plan(tables, features, 4, **arguments)


def held(plan, where):
    """Bytes of every rank, `[W]`, of the tables that lie there."""
    loads = [
        load.memory
        for name, load in plan.loads.items()
        if plan.storage_of(name) == where
    ]
    return np.sum([np.zeros(plan.world_size), *loads], 0)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 2.0])
def test_gpus_are_filled_with_what_is_read_most(share):
    whole = plan_with({})
    limit = share * whole.memory
    plan = plan_with({}, device_memory=limit)
    assert plan.placements == whole.placements
    on_gpus = held(plan, "device")
    assert plan.device_memory == np.max(on_gpus) <= limit
    np.testing.assert_allclose(on_gpus + held(plan, "host"), whole.total.memory)

    def rate(name):
        load = plan.loads[name]
        return np.sum(load.lookups) / np.sum(load.memory)

    chosen = [n for n in plan.loads if plan.storage_of(n) == "device"]
    others = [n for n in plan.loads if plan.storage_of(n) == "host"]
    assert bool(chosen) == (share > 0) and bool(others) == (share < 2)
    for name in others:  # no room, beside those that are read more
        before = [plan.loads[c].memory for c in chosen if rate(c) >= rate(name)]
        assert np.max(np.sum([plan.loads[name].memory, *before], 0)) > limit


def test_what_is_asked_for_goes_first():
    free = plan_with({}, device_memory=1e5)
    last = max(
        range(len(SIZES)),
        key=lambda i: np.max(free.loads[f"t{i}"].memory),
    )
    first = next(i for i in range(30) if free.storage_of(f"t{i}") == "device")
    size = np.max(free.loads[f"t{last}"].memory)
    asked = {last: "device", first: "host"}
    plan = plan_with(asked, device_memory=size)
    assert plan.storage_of(f"t{last}") == "device"
    assert plan.storage_of(f"t{first}") == "host"
    with pytest.raises(ValueError, match=rf"do not fit.*'t{last}'.*Leave"):
        plan_with(asked, device_memory=size - 1)
    with pytest.raises(
        ValueError, match=rf"'t{last}' has storage='device'.*None"
    ):
        plan_with(asked)
    assert plan_with({first: "host"}).storage_of("t0") == "host"


def test_texts_and_files_tell_of_gpus_where_tables_are_there(tmp_path):
    plan = plan_with({0: "device"}, device_memory=1e8)
    assert ", on GPUs" in plan.explain("t0")
    assert "the fullest GPU holds" in plan.summary()
    plan.save(tmp_path / "plan.json")
    loaded = plan_lib.ShardingPlan.load(tmp_path / "plan.json")
    assert loaded == plan and loaded.summary() == plan.summary()
    assert loaded.at(2).storage_of("t0") == "device"
    table = TableConfig("t0", *SIZES[0][:2], storage="host")
    with pytest.raises(ValueError, match=r"'t0' on storage='device'.*'host'"):
        plan.check_fits(table)

    plain = plan_with({})
    assert "GPU" not in plain.summary() + plain.explain("t0")
    older = plain.to_dict()
    del older["problem"]["setting"]["device_memory"]
    for entry in older["problem"]["tables"]:
        del entry["storage"]
    assert plan_lib.ShardingPlan.from_dict(older) == plain
    older["problem"]["tables"][3]["storage"] = "nowhere"
    with pytest.raises(ValueError, match=r"`storage` must be one of.*nowhere"):
        plan_lib.ShardingPlan.from_dict(older)


def test_other_values_are_refused():
    with pytest.raises(ValueError, match=r"`storage` must.*gpu.*'users'"):
        TableConfig("users", 3, 4, storage="gpu")
    with pytest.raises(ValueError, match="`device_memory` must be"):
        plan_with({}, device_memory=-1)
