# SPDX-License-Identifier: Apache-2.0
"""The slices in which ranks write a table."""

import functools
import re

import numpy as np
import pytest
import tensorflow as tf

from tests.embedding.placements import TABLE
from tests.embedding.placements import kinds
from tests.embedding.placements import spec_of
from tests.thread_ranks import run_on_ranks
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.embedding import checkpoint_slices
from tfdist_ext.embedding.checkpoint_slices import SavedShard
from tfdist_ext.tables.placement import ShardSpec
from tfdist_ext.tables.placement import ids_of_part


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


class OnGpu:
    """A variable that says to be on a GPU; TensorFlow puts ops on the CPU."""

    device = "/job:localhost/replica:0/task:0/device:GPU:0"

    def __init__(self, variable):
        self._variable = variable

    def __getattr__(self, name):
        return getattr(self._variable, name)


def slice_of(whole, text):
    """A slice of a table, in TensorFlow's notation."""
    extents = text.split(" ")[-1].split(":")
    bounds = [map(int, each.split(",")) for each in extents]
    slices = [slice(first, first + size) for first, size in bounds]
    return tf.constant(whole[tuple(slices)])


def part_of(whole, spec):
    """A rank's part; padding is -1."""
    shape = spec.local_shape[: whole.ndim]
    part = np.full(shape, -1.0, np.float32)
    if spec.cell is not None:
        ids = ids_of_part(spec.cell[0], spec.row_parts, spec.rows)
        columns = slice(*spec.columns)
        part[: len(ids)] = (
            whole[ids] if whole.ndim == 1 else whole[ids, columns]
        )
    return part


as_table_or_slot = pytest.mark.parametrize(
    "whole", [TABLE, TABLE[:, 0]], ids=["table", "slot"]
)
every_size = pytest.mark.parametrize("ranks", [2, 3, 4])


@pytest.mark.parametrize("snapshot", [False, True])
@as_table_or_slot
@every_size
def test_pieces_are_written(monkeypatch, ranks, whole, snapshot):
    """Every kind of placement, also if a rank has no part of the table."""
    monkeypatch.setattr(checkpoint_slices, "PIECE", 3 * whole[0].nbytes)

    def work(group):
        for name, placement in kinds(ranks).items():
            spec = spec_of(placement, group.rank, ranks)
            variable = tf.Variable(part_of(whole, spec))
            shard = SavedShard(variable, spec, Collectives(group))
            pieces = shard.pieces_of_slice(snapshot)
            for text, piece in pieces.items():
                expected = slice_of(whole, text)
                np.testing.assert_array_equal(piece.read(), expected, name)
                assert piece.shape == expected.shape
            assert len(pieces) == shard.pieces

    run_on_ranks(ranks, work)


@pytest.mark.parametrize("on_gpu", [False, True])
@as_table_or_slot
@every_size
def test_pieces_are_read_and_assigned(monkeypatch, ranks, whole, on_gpu):
    """Every kind of placement; the last row of some parts is padding."""
    monkeypatch.setattr(checkpoint_slices, "PIECE", 3 * whole[0].nbytes)
    read = functools.partial(slice_of, whole)

    def work(group):
        pieces = {}
        for name, placement in kinds(ranks).items():
            spec = spec_of(placement, group.rank, ranks)
            expected = part_of(whole, spec)
            variable = tf.Variable(np.full_like(expected, -1))
            held = OnGpu(variable) if on_gpu else variable
            shard = SavedShard(held, spec, Collectives(group))
            pieces[name] = shard.pieces
            for piece in range(shard.pieces):
                found = shard.read_piece(piece, lambda *_: None, read)
                shard.assign_piece(piece, found)
            np.testing.assert_array_equal(variable, expected, name)
        return pieces

    for pieces in run_on_ranks(ranks, work):
        assert min(pieces["first"], pieces["columns"]) > 1
