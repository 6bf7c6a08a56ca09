# SPDX-License-Identifier: Apache-2.0
"""Changed rows of tensors in a checkpoint, by the rank that wrote them.

For a tensor of the name KEY there are, of every rank R that has some of it,

    KEY/rows_of_R/ids      int64 [n], their numbers in the whole tensor
    KEY/rows_of_R/columns  int64 [2], from which to which; [0, -1] for all
    KEY/rows_of_R/values   [n, ...]

So they fit any number of ranks and any placement, as slices do.
"""

from __future__ import annotations

import re

import numpy as np
import tensorflow as tf

from tfdist_ext.checkpoints.opened import Opened

_IDS = re.compile(r"(.*)/rows_of_(\d+)/ids")


def entries(
    key: str,
    rank: int,
    ids: np.ndarray,
    columns: tuple[int, int] | None,
    values: tf.Tensor,
) -> list[tuple[str, str, tf.Tensor]]:
    """What a rank writes of a tensor: names, slices, values.

    Args:
        key: name of the tensor.
        rank: that writes.
        ids: of the rows, int64 `[n]`.
        columns: the first, and the one after the last; None for all.
        values: `[n, ...]`.
    """
    name = f"{key}/rows_of_{rank}"
    return [
        (f"{name}/ids", "", tf.constant(ids, tf.int64)),
        (f"{name}/columns", "", tf.constant(columns or (0, -1), tf.int64)),
        (f"{name}/values", "", values),
    ]


def first_row(spec: str) -> int:
    """The first row of a slice as TensorFlow writes it, "" for all."""
    return _offsets(spec)[0]


class DeltaRows:
    """The rows of a checkpoint that has only those that have changed.

    Args:
        path: of the checkpoint.

    Attributes:
        keys: tensors of which it has rows; all others it has whole.

    Raises:
        tf.errors.DataLossError: it cannot be read, here or later.
    """

    def __init__(self, path: str) -> None:
        self._opened = Opened(path)
        self._ranks: dict[str, list[int]] = {}
        for name in self._opened.names:
            if match := _IDS.fullmatch(name):
                self._ranks.setdefault(match[1], []).append(int(match[2]))
        self.keys = frozenset(self._ranks)

    def put_into(self, key: str, spec: str, value: tf.Tensor) -> tf.Tensor:
        """Replaces rows of what was read of the full checkpoint.

        Args:
            key: name of the tensor.
            spec: which slice of it the value is, "" for all.
            value: as it was.
        """
        rows, (first, first_column) = value.numpy().copy(), _offsets(spec)
        for rank in self._ranks[key]:
            name = f"{key}/rows_of_{rank}"
            ids = self._opened.tensor(f"{name}/ids") - first
            here = (ids >= 0) & (ids < len(rows))
            if not here.any():
                continue
            values = self._opened.tensor(f"{name}/values")[here]
            if rows.ndim != 2:
                rows[ids[here]] = values
                continue
            start, end = self._opened.tensor(f"{name}/columns")
            end = end if end >= 0 else values.shape[1]
            left = max(start, first_column)
            right = min(end, first_column + rows.shape[1])
            if left < right:
                target = slice(left - first_column, right - first_column)
                source = slice(left - start, right - start)
                rows[ids[here], target] = values[:, source]
        return tf.constant(rows)


def _offsets(spec: str) -> tuple[int, int]:
    """The first row and the first column of a slice."""
    starts = [0, 0]
    if spec:
        for place, part in enumerate(spec.split()[-1].split(":")[:2]):
            starts[place] = 0 if part == "-" else int(part.partition(",")[0])
    return starts[0], starts[1]
