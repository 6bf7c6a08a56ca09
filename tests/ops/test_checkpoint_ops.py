# SPDX-License-Identifier: Apache-2.0
"""Pieces of tables that are read from a checkpoint and grouped by rank."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import tensorflow as tf

from tests.thread_ranks import run_on_ranks
from tfdist_ext.ops import collective_ops
from tfdist_ext.ops.checkpoint_ops import Cells
from tfdist_ext.ops.checkpoint_ops import Grouped
from tfdist_ext.ops.checkpoint_ops import StoredSlice
from tfdist_ext.ops.checkpoint_ops import read_piece
from tfdist_ext.saving.checkpoint_index import Index
from tfdist_ext.tables import placement

# More bytes than are read at a time, in lines of a size that is no power of 2.
ROWS, WIDTH = 40_001, 7


def write(folder, slices):
    """Writes slices of a tensor to a checkpoint, and reads its index."""
    path = str(folder / "checkpoint")
    tf.raw_ops.SaveV2(
        prefix=path,
        tensor_names=["first", *["table"] * len(slices)],
        shape_and_slices=["", *slices],
        tensors=[tf.ones([3]), *slices.values()],
    )
    return Index(path)


def write_table(folder, values):
    """Writes values from row 300 on of a table."""
    rows, *columns = values.shape
    text = " ".join(map(str, (rows + 300, *columns)))
    extents = ":".join([f"300,{rows}", *(f"0,{n}" for n in columns)])
    index = write(folder, {f"{text} {extents}": values})
    stored = index.stored("table", f"{text} {extents}", values.dtype)
    assert stored.shape == tuple(values.shape)
    return stored


def numbers(*shape):
    return np.random.default_rng(3).normal(size=shape).astype(np.float32)


def expected(values, first_block, row_parts, cells):
    """The values of each rank, in the order of its rows."""
    values = values.reshape(len(values), -1)
    blocks = first_block + np.arange(-(-len(values) // row_parts))
    found = []
    for part, column, width in cells:
        rows = np.zeros([0], int)
        if part >= 0:
            rows = placement.ids_at(blocks, part, row_parts)
            rows -= first_block * row_parts
        columns = slice(column, column + width)
        found.append(values[rows[rows < len(values)]][:, columns])
    return found


ALL = (0, WIDTH)
CELLS = {
    "one": (1, [(0, *ALL)]),
    "rows": (3, [(0, *ALL), (1, *ALL), (2, *ALL)]),
    "columns": (1, [(0, 0, 2), (0, 2, 5)]),
    "grid": (2, [(0, 0, 3), (0, 3, 4), (1, 0, 3), (1, 3, 4)]),
    "one rank without": (2, [(1, *ALL), (-1, 0, 0), (0, *ALL)]),
    "nothing of its own": (1, [(-1, 0, 0), (0, *ALL)]),
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("case", CELLS)
def test_values_are_grouped_by_rank(tmp_path, case, rank):
    row_parts, cells = CELLS[case]
    rank = min(rank, len(cells) - 1)
    values, first_block = numbers(ROWS, WIDTH), 11
    stored = write_table(tmp_path, tf.constant(values))
    found = read_piece(
        stored,
        tf.float32,
        Cells(rank, row_parts, first_block, np.array(cells)),
    )
    of_ranks = expected(values, first_block, row_parts, cells)
    np.testing.assert_array_equal(found.own, of_ranks[rank])
    of_ranks[rank] = of_ranks[rank][:0]
    flat = [each.reshape(-1) for each in of_ranks]
    np.testing.assert_array_equal(found.others, np.concatenate(flat))
    assert found.splits.numpy().tolist() == list(map(len, flat))


@pytest.mark.parametrize(
    "dtype", [tf.uint8, tf.bfloat16, tf.float16, tf.float64, tf.int64]
)
def test_values_of_each_dtype(tmp_path, dtype):
    values = tf.cast(100 * numbers(50, 3), dtype)
    cells = Cells(0, 1, 0, np.array([(0, 1, 2)]))
    found = read_piece(write_table(tmp_path, values), dtype, cells)
    assert found.own.dtype == dtype
    np.testing.assert_array_equal(found.own, values.numpy()[:, 1:])


def test_slots_with_a_value_per_row(tmp_path):
    values = numbers(1001)
    stored = write_table(tmp_path, tf.constant(values))
    cells = [(0, 0, 1), (1, 0, 1)]
    found = read_piece(stored, tf.float32, Cells(1, 2, 5, np.array(cells)))
    first, own = expected(values, 5, 2, cells)
    np.testing.assert_array_equal(found.own, own)
    np.testing.assert_array_equal(found.others, first.reshape(-1))


ONE = Cells(0, 1, 0, np.array([(0, *ALL)]))


@pytest.mark.parametrize("place", [0, 1, 5_000, 524_287, 1_120_027])
def test_one_changed_bit_is_found(tmp_path, place):
    stored = write_table(tmp_path, tf.constant(numbers(ROWS, WIDTH)))
    with open(stored.file, "r+b") as file:
        file.seek(stored.offset + place)
        (byte,) = file.read(1)
        file.seek(stored.offset + place)
        file.write(bytes([byte ^ 16]))
    with pytest.raises(tf.errors.DataLossError, match="Checksum"):
        read_piece(stored, tf.float32, ONE)


@pytest.mark.parametrize("left", [0, 600_000, 1_120_000])
def test_a_file_that_ends_too_early(tmp_path, left):
    stored = write_table(tmp_path, tf.constant(numbers(ROWS, WIDTH)))
    with open(stored.file, "r+b") as file:
        file.truncate(stored.offset + left)
    with pytest.raises(tf.errors.DataLossError, match=r"data-00000.*bytes at"):
        read_piece(stored, tf.float32, ONE)


def test_a_missing_file(tmp_path):
    stored = StoredSlice(str(tmp_path / "none"), 0, 0, (2, WIDTH))
    with pytest.raises(tf.errors.NotFoundError, match="none"):
        read_piece(stored, tf.float32, ONE)


@pytest.mark.parametrize(
    ("shape", "cell"),
    [
        ((0, 7), (0, 0, 7)),
        ((-1, 7), (0, 0, 7)),
        ((2**40, 2**40), (0, 0, 7)),
        ((2, 7), (1, 0, 7)),
        ((2, 7), (0, 1, 7)),
        ((2, 7), (0, -1, 7)),
        ((2, 7), (0, 2**62, 2**62)),
    ],
)
def test_impossible_pieces_are_refused(tmp_path, shape, cell):
    stored = StoredSlice(str(tmp_path / "none"), 0, 0, shape)
    cells = Cells(0, 1, 0, np.array([cell]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="must be"):
        read_piece(stored, tf.float32, cells)


def assign(group, variable, own, others, splits, rows, error=""):
    collective_ops.assign_piece(
        group,
        variable,
        Grouped(own, others, np.array(splits)),
        np.array(rows),
        error,
        tag=2,
        label="table",
    )


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
def test_rows_are_received_into_the_variable(dtype):
    """Rank r sends 3 * r + peer to peers; rank 2 has fewer rows than fit."""

    def work(group):
        rank, width = group.rank, 2 + group.rank
        variable = tf.Variable(tf.cast(tf.fill([7, width], -1), dtype))
        rows = [(0, 2), (2, 2), (4, 2)]  # row 6 remains as it is
        count = 1 if rank == 2 else 2
        numbers = [
            np.full([count * (2 + peer)], 3 * rank + peer) for peer in range(3)
        ]
        own = tf.cast(numbers[rank].reshape(-1, width), dtype)
        numbers[rank] = numbers[rank][:0]
        others = tf.cast(np.concatenate(numbers), dtype)
        before = variable.read_value()  # a reader of the same buffer
        assign(group, variable, own, others, list(map(len, numbers)), rows)
        np.testing.assert_array_equal(before, np.full([7, width], -1))
        return variable.numpy()

    for rank, found in enumerate(run_on_ranks(3, work)):
        expected = [rank, rank, 3 + rank, 3 + rank, 6 + rank, -1, -1]
        assert found.astype(int)[:, 0].tolist() == expected
        assert (found == found[:, :1]).all()


NOTHING = np.zeros([0], np.float32)
ROWS_OF_TWO = [(0, 2), (2, 2)]
WRONG = {
    "an error": ({"error": "DataLossError: bad"}, "rank 1: DataLossError: bad"),
    "splits": ({"splits": [3, 0]}, "rank 1: send_splits sum"),
    "dtype": ({"own": tf.ones([1, 2], tf.bfloat16)}, "ranks disagree"),
    "places": ({"rows": [(0, 2)]}, r"rank 1: rows must be \[2, 2\]"),
    "outside": ({"rows": [(0, 2), (4, 2)]}, "rank 1: .* 5, received 2 from"),
    "too many rows": ({"own": np.ones([3, 2], np.float32)}, "for at most 2"),
    "half a row": ({"own": np.ones([1, 1], np.float32)}, "rows of 8 bytes"),
    "an integer table": ({"variable": tf.zeros([5, 2], tf.int32)}, "must be f"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_inputs_of_one_rank_fail_on_all(wrong):
    changed, text = WRONG[wrong]

    def work(group):
        variable = tf.Variable(tf.fill([5, 2], -1.0))
        arguments = {
            "variable": variable,
            "own": np.ones([2, 2], np.float32),
            "others": np.ones([4], np.float32),
            "splits": [0, 4] if group.rank == 0 else [4, 0],
            "rows": ROWS_OF_TWO,
        }
        right = dict(arguments)
        if group.rank == 1:
            arguments.update(changed)
            arguments["variable"] = tf.Variable(arguments["variable"])
            if arguments["own"].dtype == tf.bfloat16:
                arguments["others"] = tf.cast(arguments["others"], tf.bfloat16)
        with pytest.raises(tf.errors.InvalidArgumentError, match=text):
            assign(group, **arguments)
        assert (variable.numpy() == -1).all()
        if wrong != "dtype":  # with it, the ranks' messages differ
            assign(group, **right)
            assert (variable.numpy()[:4] == 1).all()

    run_on_ranks(2, work)


TEXT = "rank 1 has read 24 bytes for at most 2 rows of 8 bytes"


def test_more_rows_than_the_receiver_expects():
    def work(group):
        variable = tf.Variable(tf.fill([5, 2], -1.0))
        count = 2 if group.rank == 0 else 6
        splits = [0, count] if group.rank == 0 else [count, 0]
        others, own = np.ones([count], np.float32), np.ones([0, 2], np.float32)
        # Rank 1 may have sent its rows before rank 0 has failed.
        error = pytest.raises(tf.errors.InvalidArgumentError, match=TEXT)
        if group.rank == 1:
            error = contextlib.suppress(tf.errors.InvalidArgumentError)
        with error:
            assign(group, variable, own, others, splits, ROWS_OF_TWO)
        return variable.numpy()

    assert (run_on_ranks(2, work)[0] == -1).all()
