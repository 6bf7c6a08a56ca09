# SPDX-License-Identifier: Apache-2.0
"""The automatic choice of a placement."""

import pytest

from tfdist_ext.sharding import plan
from tfdist_ext.sharding.config import ShardSpec


@pytest.mark.parametrize(
    ("rows", "dim", "ids", "expected"),
    [
        (2**17, 58, 100, "column"),
        (2**21, 114, 150, "column"),
        (2**20, 16, 1, "row"),
        (2**20, 1, 14, "row"),
        (2**20, 4, 300, "row"),
        (100, 8, 1, "replicated"),
    ],
)
def test_the_cheaper_placement_is_chosen(rows, dim, ids, expected):
    assert plan.choose_sharding(rows, dim, 4, ids) == expected


def test_bytes_agree_with_the_worked_example():
    # timelines, 4 ranks: 8 * 58 * 3 results and gradients, 75 ids sent.
    row = plan.bytes_per_sample("row", 58, 4, 100)
    assert row == pytest.approx(8 * 58 * 3 + 1.4 * 75)
    column = plan.bytes_per_sample("column", 58, 4, 100)
    assert column == pytest.approx(8 * 58 * 0.75 + 1.4 * 300)


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
    assert plan.hotness(shape, 1000) == expected


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_shards_cover_the_table(world_size):
    specs = [
        ShardSpec("t", 100, 58, "column", rank, world_size)
        for rank in range(world_size)
    ]
    assert sum(spec.local_dim for spec in specs) == 58
    assert specs[0].columns[0] == 0 and specs[-1].columns[1] == 58
    row = ShardSpec("t", 100, 58, "row", 0, world_size)
    assert row.local_rows * world_size >= 100
    assert row.local_shape == (-(-100 // world_size), 58)


def test_more_ranks_than_columns_is_an_error():
    with pytest.raises(ValueError, match="sharding='row'"):
        ShardSpec("t", 100, 3, "column", 0, 4)


def test_unknown_placement_is_an_error():
    with pytest.raises(ValueError, match="placement"):
        ShardSpec("t", 100, 3, "diagonal", 0, 1)
