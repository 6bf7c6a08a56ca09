# SPDX-License-Identifier: Apache-2.0
"""A table that is served from a file, mapped into memory.

The file has the numbers of the rows, one after the other, and nothing else.
TensorFlow maps it when it looks up rows: a server starts at once, reads the
rows that are asked for, and shares them with other servers of its host.
"""

from __future__ import annotations

import math
import os
import re
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext.serving import row_codes
from tfdist_ext.tables.shard_spec import ShardSpec

# Of a SavedModel's folder, where its mapped tables are.
FOLDER = "tables"


class MappedTable(tf.Module):
    """A table `[rows, dim]` in files; see `ServedTable`.

    Args:
        name: of the table.
        spec: its size.
        dtype: of its numbers.
        source: the variable of the training that it is made of.
        folder: where the SavedModel will be, as servers see it.
    """

    def __init__(
        self, name: str, spec: ShardSpec, dtype: str, source: Any, folder: str
    ) -> None:
        super().__init__()
        self.table_name, self.rows, self.dim = name, spec.rows, spec.dim
        # In a function, so that TensorFlow does not save it as well.
        self.source = lambda: source
        self._dtype, self._folder = dtype, folder
        self._kinds = lambda: row_codes.kinds(dtype, spec.rows, spec.dim)

    def rows_of(self, ids: tf.Tensor) -> tf.Tensor:
        """Rows float32 `[n, dim]` of ids int64 `[n]`, all in the table."""
        parts = {
            name: tf.gather(
                tf.raw_ops.ImmutableConst(
                    dtype=dtype,
                    shape=shape,
                    memory_region_name=os.path.join(
                        self._folder, FOLDER, self._file(name)
                    ),
                ),
                ids,
            )
            for name, (dtype, shape) in self._kinds().items()
        }
        return row_codes.decoded(parts)

    def parts(self) -> dict[str, tf.Variable]:
        """No variables."""
        return {}

    def encoded(self, block: np.ndarray) -> dict[str, np.ndarray]:
        """Numbers of rows `[n, dim]` as the files hold them, by name."""
        return row_codes.encoded(block, self._dtype)

    def make_files(self, folder: str) -> None:
        """Makes files of the size of the table in a SavedModel's folder."""
        os.makedirs(os.path.join(folder, FOLDER), exist_ok=True)
        for name, (dtype, shape) in self._kinds().items():
            path = os.path.join(folder, FOLDER, self._file(name))
            with open(path, "wb") as file:
                file.truncate(math.prod(map(int, shape)) * dtype.size)

    def write_rows(
        self, folder: str, first: int, encoded: dict[str, np.ndarray]
    ) -> None:
        """Writes consecutive rows into those files.

        Args:
            folder: of the SavedModel.
            first: the first of the rows.
            encoded: their numbers, by name.
        """
        for name, value in encoded.items():
            path = os.path.join(folder, FOLDER, self._file(name))
            with open(path, "r+b") as file:
                file.seek(first * value[:1].nbytes)
                file.write(value.tobytes())

    def _file(self, part: str) -> str:
        return re.sub(r"[^\w.-]", "_", self.table_name) + f".{part}"
