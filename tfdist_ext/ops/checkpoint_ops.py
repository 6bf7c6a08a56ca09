# SPDX-License-Identifier: Apache-2.0
"""Tables in the data files of TensorFlow checkpoints."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfdist_ext.ops.library import library


@dataclasses.dataclass(frozen=True)
class StoredSlice:
    """Where the values of a slice are.

    Attributes:
        file: path of the data file.
        offset: of the first value, in bytes.
        checksum: the CRC-32C of the values, as TensorFlow masks it.
        shape: the shape of the slice.
    """

    file: str
    offset: int
    checksum: int
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Cells:
    """Which values of a piece of a table the ranks hold.

    Attributes:
        rank: this rank.
        row_parts: rows of a block, of which each row part has one.
        first_block: number of the block with which the piece begins.
        of_ranks: int64 `[ranks, 3]`, the row part of each rank, or -1 if it has
            none, its first column and the number of its columns.
    """

    rank: int
    row_parts: int
    first_block: int
    of_ranks: np.ndarray


class Grouped(NamedTuple):
    """The values of a piece by the ranks that hold them.

    Attributes:
        own: `[n, columns]`, the values of this rank.
        others: `[m]`, those of the other ranks, in the order of the ranks.
        splits: int64 `[ranks]`, the elements of each rank in `others`.
    """

    own: tf.Tensor
    others: tf.Tensor
    splits: tf.Tensor


def read_piece(stored: StoredSlice, dtype: tf.DType, cells: Cells) -> Grouped:
    """Reads a piece of a table, and groups its values by rank.

    Args:
        stored: a slice in a file, of one dimension or two.
        dtype: its dtype.
        cells: what the ranks hold of it.

    Returns:
        The values, in host memory.

    Raises:
        tf.errors.DataLossError: the file is too short, or the values do not
            match their checksum.
    """
    with tf.device("CPU:0"):
        return Grouped(
            *library().tfdist_read_piece(
                path=stored.file,
                offset=stored.offset,
                checksum=stored.checksum,
                shape=(*stored.shape, 1)[:2],
                first_block=cells.first_block,
                cells=cells.of_ranks,
                dtype=dtype,
                rank=cells.rank,
                row_parts=cells.row_parts,
            )
        )
