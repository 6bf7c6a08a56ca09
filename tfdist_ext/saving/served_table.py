# SPDX-License-Identifier: Apache-2.0
"""A table as it is served, and how its rows are encoded."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext.tables.placement import ShardSpec

TABLE_DTYPES = ("float32", "bfloat16", "int8")


def parts_of_table(
    dtype: str, rows: Any, dim: int
) -> dict[str, tuple[tf.DType, list[Any]]]:
    """What a table consists of, by name: dtype and shape.

    Args:
        dtype: one of `TABLE_DTYPES`.
        rows: of the table, None if not known.
        dim: its columns.
    """
    found = {"values": (tf.as_dtype(dtype), [rows, dim])}
    if dtype == "int8":
        # What the numbers of a row are multiplied by.
        found["scales"] = (tf.float32, [rows])
    return found


def encoded_rows(block: np.ndarray, dtype: str) -> dict[str, np.ndarray]:
    """Numbers of rows `[n, dim]` as they are served, by name."""
    if dtype != "int8":
        return {"values": block.astype(tf.as_dtype(dtype).as_numpy_dtype)}
    block = block.astype(np.float32)
    scales = np.abs(block).max(1) / np.float32(127)
    divisors = np.where(scales > 0, scales, 1)[:, np.newaxis]
    values = np.rint(block / divisors).astype(np.int8)
    return {"values": values, "scales": scales}


def decoded_rows(parts: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Rows float32 `[n, dim]` of what is served of them."""
    rows = tf.cast(parts["values"], tf.float32)
    if "scales" in parts:
        rows *= parts["scales"][:, tf.newaxis]
    return rows


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
        self._kinds = lambda: parts_of_table(dtype, spec.rows, spec.dim)

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
        return decoded_rows(parts)

    def parts(self) -> dict[str, tf.Variable]:
        """No variables."""
        return {}

    def encoded(self, block: np.ndarray) -> dict[str, np.ndarray]:
        """Numbers of rows `[n, dim]` as the files hold them, by name."""
        return encoded_rows(block, self._dtype)

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


class ServedTable(tf.Module):
    """A table `[rows, dim]`, empty until its file is written.

    Attributes:
        values: variable `[None, dim]` of float32, bfloat16 or int8.
        scales: of int8, float32 `[None]`, what the numbers of a row are
            multiplied by; None otherwise.
        rows: of the whole table.
        source: the variable of the training that it is made of.
    """

    def __init__(
        self, name: str, spec: ShardSpec, dtype: str, source: Any
    ) -> None:
        super().__init__()
        self.table_name, self.rows, self.dim = name, spec.rows, spec.dim
        # In a function, so that TensorFlow does not save it as well.
        self.source = lambda: source
        self._dtype = dtype
        made = {
            name: tf.Variable(
                tf.zeros([0, *shape[1:]], kind),
                trainable=False,
                shape=shape,
                name=name,
            )
            for name, (kind, shape) in parts_of_table(
                dtype, None, spec.dim
            ).items()
        }
        self.values, self.scales = made["values"], made.get("scales")

    def parts(self) -> dict[str, tf.Variable]:
        """The variables that hold rows, by name."""
        parts = {"values": self.values}
        if self.scales is not None:
            parts["scales"] = self.scales
        return parts

    def rows_of(self, ids: tf.Tensor) -> tf.Tensor:
        """Rows float32 `[n, dim]` of ids int64 `[n]`, all in the table."""
        # By rows: a read of all would make every update copy the table.
        found = {
            name: tf.gather(variable, ids)
            for name, variable in self.parts().items()
        }
        return decoded_rows(found)

    def encoded(self, block: np.ndarray) -> dict[str, np.ndarray]:
        """Numbers of rows `[n, dim]` as the variables hold them, by name."""
        return encoded_rows(block, self._dtype)
