# SPDX-License-Identifier: Apache-2.0
"""Names that have moved are found where they were as well."""

import importlib

import pytest

MOVED = [
    ("sharding.config", "tables.placement", ["TablePlacement"]),
    (
        "sharding.placement",
        "tables.rotated_mod",
        ["ids_of_part", "local_row", "part_of"],
    ),
    ("sharding.plan", "planner.plan", ["ShardingPlan", "plan"]),
    (
        "sharding.tables",
        "tables.table_config",
        ["FeatureConfig", "TableConfig"],
    ),
]


@pytest.mark.parametrize(("old", "new", "names"), MOVED)
def test_old_places_have_the_same_objects(old, new, names):
    old, new = (importlib.import_module(f"tfdist_ext.{x}") for x in (old, new))
    assert old.__all__ == names
    for name in names:
        assert getattr(old, name) is getattr(new, name)
