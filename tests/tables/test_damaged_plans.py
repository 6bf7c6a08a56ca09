# SPDX-License-Identifier: Apache-2.0
"""Whatever is done to a plan's file: a plan, or a ValueError, and soon."""

import contextlib
import copy
import json
import random
import time

import pytest

from tests import fuzzing
from tests.tables import planned
from tfdist_ext.tables import plan as plan_lib
from tfdist_ext.tables.placement import TablePlacement

LIMIT = 10.0  # seconds; on a machine that is not busy 0.01 are enough


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


VALUES = [
    *(None, True, 0, -1, 1, 3.5, 10**9, 2**63, -(10**30), 10**400, 1e308),
    *(5e-324, float("nan"), float("inf"), -float("inf"), "", "x", "nan", "4"),
    *([], [[]], [0, 0], [-1], [10**30], [float("nan")], ["x"], {}, {"a": 1}),
    *(list(range(70_000)), nested(50_000)),
    {"row_parts": 10**9, "column_parts": 1, "ranks": [0]},
]


@pytest.fixture(scope="module")
def content():
    """What a plan's file holds: all kinds of fields and placements."""
    sizes = [(2**17, 58, 100), (1000, 8, 1), (20, 4, 1)]
    forced = {
        "t1": TablePlacement(2, 1, (3, 1), True),
        "t2": "data_parallel",
    }
    tables, features = planned.configs(sizes)
    plan = plan_lib.plan(tables, features, 4, forced=forced, memory_limit=1e9)
    return json.loads(json.dumps(plan.to_dict()))


def places(value, path=()):
    """Paths of everything in it."""
    parts = []
    if isinstance(value, dict):
        parts = list(value.items())
    elif isinstance(value, list):
        parts = list(enumerate(value))
    for key, part in parts:
        yield (*path, key)
        yield from places(part, (*path, key))


def damaged(content):
    """The content with one field after the other left out or replaced."""
    for path in places(content):
        for value in (..., *VALUES):
            changed = copy.deepcopy(content)
            inner = changed
            for key in path[:-1]:
                inner = inner[key]
            if value is ...:
                del inner[path[-1]]
            else:
                inner[path[-1]] = value
            yield path, value, changed


def test_a_damaged_plan_is_a_plan_or_refused(content):
    refused = 0
    for path, value, changed in damaged(content):
        begin = time.monotonic()
        try:
            plan = plan_lib.ShardingPlan.from_dict(changed)
            assert plan.summary() and plan.to_dict()
            plan.at(2)
        except ValueError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"{path} = {str(value)[:50]}") from error
        assert time.monotonic() - begin < LIMIT, (path, value)
    assert refused > 1000


@pytest.mark.parametrize("seed", range(4))
def test_plans_damaged_in_several_places(content, seed):
    generator = random.Random(seed)
    text = json.dumps(content)
    values = [v for v in VALUES if not isinstance(v, list | dict)]
    values += [[], {}, [0, 0], {"a": 1}]
    refused = 0
    rounds = fuzzing.inputs(1000, parts=4)
    for _ in range(rounds):
        changed = json.loads(text)
        for path in generator.sample(list(places(changed)), 3):
            # An earlier change may have taken the place away.
            with contextlib.suppress(LookupError, TypeError, AttributeError):
                inner = changed
                for key in path[:-1]:
                    inner = inner[key]
                inner[path[-1]] = copy.deepcopy(generator.choice(values))
        try:
            plan = plan_lib.ShardingPlan.from_dict(changed)
            assert plan.summary() and plan.to_dict()
        except ValueError:
            refused += 1
        except Exception as error:
            raise AssertionError(str(changed)[:2000]) from error
    assert refused > rounds // 3


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("setting", "world_size"), 10**9, "`world_size`.*=1000000000"),
        (("setting", "batch_size"), 2.0, "`batch_size`.*batch_size=2.0"),
        (("setting", "memory_limit"), float("nan"), "`memory_limit`.*nan"),
        (("setting", "bytes_slack"), -1, "`bytes_slack`.*-1"),
        (("setting",), ..., "`problem` lacks .*setting"),
        (("features", 0, "hotness"), float("nan"), "`hotness`.*nan.*'f0'"),
        (("features", 1, "hotness"), -2, "`hotness`.*-2 .feature 'f1'"),
        (("features", 1, "exponent"), 9, "`exponent`.*9 .feature 'f1'"),
        (("features", 1, "table"), 3, "'f1' looks up in table 3 of 3"),
        (("features", 1, "name"), "f0", "more than once: 'f0'"),
        (("tables", 0, "rows"), 2**41, "`rows`.*'t0'"),
        (("tables", 0, "dim"), 0, "`dim`.*0 .table 't0'"),
        (("tables", 0, "slots_per_row"), "x", "`slots_per_row`.*'x'"),
        (("tables", 2, "placement"), ["row"], "A placement is.*'row'.*'t2'"),
        (
            ("tables", 1, "placement", "ranks"),
            3,
            r"tables\[1\].placement.ranks",
        ),
        (("tables", 1, "color"), 3, r"tables\[1\]` does not know .*color"),
        (("tables",), {}, "`problem.tables` must be an array"),
    ],
)
def test_the_field_is_named(content, path, value, message):
    changed = copy.deepcopy(content)
    inner = changed["problem"]
    for key in path[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    with pytest.raises(ValueError, match=f"no sharding plan.*{message}"):
        plan_lib.ShardingPlan.from_dict(changed)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"[" * 1_000_000,
        b'{"format":' * 100_000,
        b"9" * 10_000,
        b"NaN",
        b'{"format": "tfdist_ext.ShardingPlan", "version": 1}',
    ],
)
def test_a_file_that_is_none_is_named(tmp_path, data):
    path = tmp_path / "plan.json"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"plan\.json holds no sharding plan"):
        plan_lib.ShardingPlan.load(path)
