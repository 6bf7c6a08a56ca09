# SPDX-License-Identifier: Apache-2.0
"""What a rank holds of a table, for every placement."""

import itertools
import json

import numpy as np
import pytest

from tfdist_ext.marks import shard_spec
from tfdist_ext.tables import placement as rows_of
from tfdist_ext.tables.placement import ShardSpec
from tfdist_ext.tables.placement import TablePlacement
from tfdist_ext.tables.placement import spec_from_json
from tfdist_ext.tables.placement import spec_to_json

ROWS, DIM = 23, 10
PLACEMENTS = [
    TablePlacement.data_parallel(),
    TablePlacement.table_wise(2),
    TablePlacement.row_wise(4),
    TablePlacement.column_wise(4),
    TablePlacement.grid(2, 2),
    TablePlacement(2, 2, (3, 0, 1, 2)),
    TablePlacement(1, 3, (3, 1, 0)),
    TablePlacement(2, 1, (2, 1)),
]


def specs(placement, rows=ROWS, dim=DIM, world_size=4):
    """What every rank holds."""
    return [
        ShardSpec.of("t", rows, dim, placement, rank, world_size)
        for rank in range(world_size)
    ]


KINDS = (
    "data_parallel",
    "table_wise",
    "row_wise",
    "column_wise",
    "grid",
    "grid",
    "column_wise",
    "row_wise",
)


@pytest.mark.parametrize(
    ("placement", "kind"), list(zip(PLACEMENTS, KINDS, strict=True))
)
def test_kinds(placement, kind):
    assert placement.kind == kind


@pytest.mark.parametrize("rows", [1, 3, 4, 23])
@pytest.mark.parametrize("placement", PLACEMENTS[1:])
def test_every_weight_lies_on_one_rank(placement, rows):
    held = np.zeros([rows, DIM], int)
    for spec in specs(placement, rows):
        if spec.cell is None:
            assert spec.local_rows == 0
            continue
        ids = rows_of.ids_of_part(spec.cell[0], spec.row_parts, rows)
        assert len(ids) <= spec.local_rows == -(-rows // spec.row_parts)
        first, end = spec.columns
        assert spec.local_shape == (spec.local_rows, end - first)
        held[ids, first:end] += 1
    assert (held == 1).all()


def test_cells_follow_the_order_of_the_ranks():
    cells = [spec.cell for spec in specs(TablePlacement(2, 2, (3, 0, 1, 2)))]
    assert cells == [(0, 1), (1, 0), (1, 1), (0, 0)]
    cells = [spec.cell for spec in specs(TablePlacement.table_wise(2))]
    assert cells == [None, None, (0, 0), None]


def test_columns_are_even_and_in_order():
    by_rank = specs(TablePlacement(1, 3, (3, 1, 0)))
    assert [by_rank[rank].columns for rank in (3, 1, 0)] == [
        (0, 3),
        (3, 6),
        (6, 10),
    ]
    assert [spec.local_dim for spec in by_rank] == [4, 3, 3, 3]
    assert [spec.local_rows for spec in by_rank] == [23, 23, 0, 23]


def test_row_peers_hold_all_columns_of_a_rank():
    by_rank = specs(TablePlacement(2, 2, (3, 0, 1, 2)))
    peers = [spec.row_peers for spec in by_rank]
    assert peers == [(3, 0), (1, 2), (1, 2), (3, 0)]
    for spec in by_rank:
        parts = [spec.at(rank) for rank in spec.row_peers]
        assert {part.cell[0] for part in parts} == {spec.cell[0]}
        assert sum(part.local_dim for part in parts) == DIM
    lonely = specs(TablePlacement(2, 1, (2, 1)))
    assert [spec.row_peers for spec in lonely] == [(), (1,), (2,), ()]


def test_a_data_parallel_table_is_whole_everywhere():
    for spec in specs(TablePlacement.data_parallel()):
        assert not spec.partitioned
        assert spec.cell == (0, 0) and spec.row_peers == (0,)
        assert spec.local_shape == (ROWS, DIM)


def test_a_table_on_one_rank_is_partitioned():
    assert all(s.partitioned for s in specs(TablePlacement.table_wise(2)))


@pytest.mark.parametrize("ranks", [(), (0,), (0, 1, 2), (0, 1, 1, 2)])
def test_a_placement_needs_distinct_ranks_for_its_cells(ranks):
    with pytest.raises(ValueError, match="needs 4 distinct ranks"):
        TablePlacement(2, 2, ranks)


@pytest.mark.parametrize("parts", [(0, 1), (1, 0), (-1, -1), (2, 0)])
def test_a_placement_has_parts(parts):
    with pytest.raises(ValueError, match="parts"):
        TablePlacement(*parts, (0,))


def test_fewer_columns_than_parts_are_refused():
    with pytest.raises(ValueError, match="'t' has 3 columns, fewer than the 4"):
        specs(TablePlacement.column_wise(4), dim=3)
    assert [s.local_dim for s in specs(PLACEMENTS[3], dim=4)] == [1] * 4


def test_ranks_that_are_not_there_are_refused():
    with pytest.raises(ValueError, match="there are 4 ranks"):
        specs(TablePlacement.table_wise(4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ranks": (-1,)}, "`ranks`.*ranks=-1"),
        ({"ranks": (1.5,)}, "`ranks`.*ranks=1.5"),
        ({"ranks": (1 << 14,)}, "`ranks`.*at most 16383"),
        ({"row_parts": 10**9}, "`row_parts`.*at most 16384"),
        ({"column_parts": True}, "`column_parts`.*True"),
        ({"deduplicate": 1}, "`deduplicate` must be True or False"),
        ({"deduplicate": None}, "`deduplicate` must be True or False"),
        ({"hot_ids": (3,)}, r"`hot_ids` was removed.*hot_ids=\(3,\)"),
    ],
)
def test_placements_are_made_of_integers(arguments, message):
    with pytest.raises(ValueError, match=message):
        TablePlacement(**arguments)
    ranks = np.arange(2)
    assert TablePlacement(np.int64(2), 1, ranks).ranks == (0, 1)


def test_hot_ids_are_refused_with_what_to_do():
    message = "`hot_ids` was removed.*since November 2026.*Leave `hot_ids` out"
    for make in (TablePlacement.row_wise, TablePlacement.table_wise):
        assert make(2, hot_ids=()) == make(2)
        with pytest.raises(ValueError, match=message):
            make(2, hot_ids=[4, 1])


def test_specs_of_older_exports_are_read():
    spec = specs(TablePlacement.row_wise(4))[1]
    fields = json.loads(spec_to_json(spec))
    assert spec_from_json(json.dumps({**fields, "hot_ids": []})) == spec
    with pytest.raises(ValueError, match=r"`hot_ids` was removed.*table 't'"):
        spec_from_json(json.dumps({**fields, "hot_ids": [3]}))


def test_specs_survive_as_text():
    for placement, rank in itertools.product(PLACEMENTS, range(4)):
        spec = specs(placement)[rank]
        assert spec_from_json(spec_to_json(spec)) == spec
        assert spec_from_json(spec_to_json(spec).encode()) == spec
    assert spec_to_json(None) == ""
    assert spec_from_json("") is None and spec_from_json(b"") is None
    assert shard_spec(object()) is None
