# SPDX-License-Identifier: Apache-2.0
"""The slices in which ranks write a table."""

import re

import pytest
import tensorflow as tf

from tfdist_ext.embedding import checkpoint_slices
from tfdist_ext.tables.placement import ShardSpec


def _slices(rows, dim, world, row_parts, column_parts):
    """First row, rows, first column and columns of all pieces, and a shard."""
    found = []
    for rank in range(world):
        spec = ShardSpec(
            *("table", rows, dim, rank, world, row_parts, column_parts),
            ranks=tuple(range(row_parts * column_parts)),
        )
        shard = checkpoint_slices.SavedShard(tf.Variable([[0.0]]), spec, None)
        (slices,) = shard.serialize().values()
        assert len(slices) == shard.pieces
        for text in slices:
            numbers = list(map(int, re.split("[ ,:]", text)))
            assert numbers[:2] == [rows, dim]
            found.append(numbers[2:])
    return found, shard


@pytest.mark.parametrize(
    ("rows", "dim", "world", "row_parts", "column_parts"),
    [
        (2**20 + 5, 32, 3, 3, 1),
        (2**20 + 5, 33, 4, 1, 4),
        (2**20 + 5, 32, 5, 2, 2),
        (2**20, 32, 4, 1, 1),
        (101, 4, 3, 3, 1),
    ],
)
def test_pieces_cover_the_table_once(rows, dim, world, row_parts, column_parts):
    slices, shard = _slices(rows, dim, world, row_parts, column_parts)
    numbers = sum(height * width for _, height, _, width in slices)
    assert numbers == rows * dim
    for _, height, _, width in slices:
        assert 0 < 4 * height * width <= 1.1 * checkpoint_slices.PIECE
    by_column = column_parts == world
    places = sorted(
        (left if by_column else 0, top) for top, _, left, _ in slices
    )
    assert len(set(places)) == len(places)
    assert shard.piece_bytes == checkpoint_slices.PIECE


def test_a_huge_table_has_few_pieces():
    slices, shard = _slices(2**22, 4096, 16, 16, 1)
    assert len(slices) == 512
    largest = max(4 * height * width for _, height, _, width in slices)
    assert shard.piece_bytes == largest > checkpoint_slices.PIECE
