# SPDX-License-Identifier: Apache-2.0
"""A table in a served model, and the encoding of its rows."""

from __future__ import annotations

import math
import os
import urllib.parse
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext.tables.placement import ShardSpec
from tfdist_ext.type_names import Variable

TABLE_DTYPES = ("float32", "bfloat16", "int8")


def parts_of_table(
    dtype: str, rows: int | None, dim: int
) -> dict[str, tuple[tf.DType, list[Any]]]:
    """The arrays that a table consists of, by name: dtype and shape.

    Args:
        dtype: one of `TABLE_DTYPES`.
        rows: number of rows, None if not known.
        dim: number of columns.
    """
    found = {"values": (tf.as_dtype(dtype), [rows, dim])}
    if dtype == "int8":
        # Factor of each row.
        found["scales"] = (tf.float32, [rows])
    return found


def encoded_rows(block: np.ndarray, dtype: str) -> dict[str, np.ndarray]:
    """Encodes rows `[n, dim]` for serving; returns arrays by name."""
    if dtype != "int8":
        return {"values": block.astype(tf.as_dtype(dtype).as_numpy_dtype)}
    block = block.astype(np.float32)
    scales = np.abs(block).max(1) / np.float32(127)
    divisors = np.where(scales > 0, scales, 1)[:, np.newaxis]
    values = np.rint(block / divisors).astype(np.int8)
    return {"values": values, "scales": scales}


def decoded_rows(parts: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Decodes arrays of rows, by name, into rows float32 `[..., dim]`."""
    rows = tf.cast(parts["values"], tf.float32)
    if "scales" in parts:
        rows *= tf.expand_dims(parts["scales"], -1)
    return rows


# Folder of the mapped tables, in a SavedModel's folder.
FOLDER = "tables"


class MappedTable(tf.Module):
    """A table `[rows, dim]` in files; see `ServedTable`.

    Args:
        name: name of the table.
        spec: placement of the table, with its size.
        dtype: one of `TABLE_DTYPES`.
        source: variable of the trained model that the table is copied from.
        folder: path of the SavedModel's folder on servers.
    """

    def __init__(
        self,
        name: str,
        spec: ShardSpec,
        dtype: str,
        source: Variable,
        folder: str,
    ) -> None:
        super().__init__()
        self.table_name, self.rows, self.dim = name, spec.rows, spec.dim
        # It is a function, so that TensorFlow does not save the variable too.
        self.source = lambda: source
        self._dtype, self._folder = dtype, folder

    def rows_of(self, ids: tf.Tensor) -> tf.Tensor:
        """Rows float32 `[..., dim]` of ids int64 `[...]`, all in the table."""
        parts = {
            name: tf.gather(
                tf.raw_ops.ImmutableConst(
                    dtype=dtype,
                    shape=shape,
                    memory_region_name=self.file(name),
                ),
                ids,
            )
            for name, (dtype, shape) in self.kinds().items()
        }
        return decoded_rows(parts)

    def parts(self) -> dict[str, tf.Variable]:
        """No variables, as the rows are in files."""
        return {}

    def kinds(self) -> dict[str, tuple[tf.DType, list[Any]]]:
        """The arrays in the files, by name: dtype and shape."""
        return parts_of_table(self._dtype, self.rows, self.dim)

    def file(self, part: str) -> str:
        """The path of an array's file on servers.

        Args:
            part: name of the array, a key of `kinds`.
        """
        return os.path.join(self._folder, FOLDER, self._file(part))

    def encoded(self, block: np.ndarray) -> dict[str, np.ndarray]:
        """Encodes rows `[n, dim]` for the files; returns arrays by name."""
        return encoded_rows(block, self._dtype)

    def make_files(self, folder: str) -> None:
        """Creates files of the table's size in a SavedModel's folder."""
        os.makedirs(os.path.join(folder, FOLDER), exist_ok=True)
        for name, (dtype, shape) in self.kinds().items():
            path = os.path.join(folder, FOLDER, self._file(name))
            with open(path, "wb") as file:
                file.truncate(math.prod(map(int, shape)) * dtype.size)

    def write_rows(
        self, folder: str, first: int, encoded: dict[str, np.ndarray]
    ) -> None:
        """Writes consecutive rows into the files.

        Args:
            folder: folder of the SavedModel.
            first: number of the first row.
            encoded: encoded rows, by name.
        """
        for name, value in encoded.items():
            path = os.path.join(folder, FOLDER, self._file(name))
            with open(path, "r+b") as file:
                file.seek(first * value[:1].nbytes)
                file.write(value.tobytes())

    def _file(self, part: str) -> str:
        return f"{urllib.parse.quote(self.table_name, safe='')}.{part}"


class ServedTable(tf.Module):
    """A table `[rows, dim]` in variables, empty until they are loaded.

    Attributes:
        values: variable `[None, dim]` of float32, bfloat16 or int8.
        scales: for int8, float32 `[None]`, the factor of each row; None
            otherwise.
        rows: number of rows of the entire table.
        source: variable of the trained model that the table is copied from.
    """

    def __init__(
        self, name: str, spec: ShardSpec, dtype: str, source: Variable
    ) -> None:
        super().__init__()
        self.table_name, self.rows, self.dim = name, spec.rows, spec.dim
        # It is a function, so that TensorFlow does not save the variable too.
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
        """The variables with the rows, by name."""
        parts = {"values": self.values}
        if self.scales is not None:
            parts["scales"] = self.scales
        return parts

    def rows_of(self, ids: tf.Tensor) -> tf.Tensor:
        """Rows float32 `[..., dim]` of ids int64 `[...]`, all in the table."""
        # It reads single rows: after a read of the entire variable, every
        # update would copy the table.
        found = {
            name: tf.gather(variable, ids)
            for name, variable in self.parts().items()
        }
        return decoded_rows(found)

    def encoded(self, block: np.ndarray) -> dict[str, np.ndarray]:
        """Encodes rows `[n, dim]` for the variables; returns arrays by name."""
        return encoded_rows(block, self._dtype)
