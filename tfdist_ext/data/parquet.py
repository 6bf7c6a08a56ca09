# SPDX-License-Identifier: Apache-2.0
"""Rows of Parquet files."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext.data.file_formats import await_size

_MAGIC = b"PAR1"  # the last bytes of a complete file


class ParquetFiles:
    """Parquet files, whose offsets are rows.

    Raises:
        ModuleNotFoundError: pyarrow is missing.
    """

    def __init__(self) -> None:
        try:
            self._parquet: Any = importlib.import_module("pyarrow.parquet")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "Parquet files need pyarrow: pip install pyarrow"
            ) from error
        self._schema: Any = None
        self._group: tuple[str, int, Any] = ("", -1, None)  # the last one

    def spec_of(self, pattern: str, paths: Sequence[str]) -> Any:
        """See `FileFormat`."""
        complete = next(filter(_is_complete, paths), None)
        if self._schema is None and complete is None:
            raise ValueError(
                f"'{pattern}' has no complete Parquet file, which would tell "
                "the columns. Call `batches` when there is one."
            )
        if self._schema is None:
            self._schema = self._parquet.read_schema(complete)
        return {field.name: _spec(field) for field in self._schema}

    def search(self, path: str, at: int, most: int) -> np.ndarray:
        """See `FileFormat`."""
        if not _is_complete(path):
            return np.array([at])
        rows = self._parquet.read_metadata(path).num_rows
        if rows < at:
            raise ValueError(
                f"'{path}' has {rows} rows, but {at} rows of it were read: it "
                "was replaced. Give new content a new name."
            )
        return np.arange(at, min(at + most, rows) + 1)

    def read(self, path: str, start: int, stop: int, size: int) -> Any:
        """See `FileFormat`."""
        await_size(path, 1)
        with self._parquet.ParquetFile(path) as file:
            tables, first = [], 0
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                begin, end = max(start - first, 0), min(stop - first, rows)
                if begin < end:
                    table = self._read_group(path, file, group)
                    tables.append(table.slice(begin, end - begin))
                first += rows
        names = [field.name for field in self._schema]
        found = [
            {name: _values(path, name, t.column(name)) for name in names}
            for t in tables
        ]
        return found[0] if len(found) == 1 else self.joined(found)

    def _read_group(self, path: str, file: Any, group: int) -> Any:
        if self._group[:2] != (path, group):
            self._group = path, group, file.read_row_group(group)
        return self._group[2]

    def joined(self, batches: Sequence[Any]) -> Any:
        """See `FileFormat`."""
        found = {}
        for field in self._schema:
            spec, values = _spec(field), [b[field.name] for b in batches]
            if isinstance(spec, tf.RaggedTensorSpec):
                empty = tf.RaggedTensor.from_row_splits(
                    tf.zeros([0], spec.dtype)
                    if spec.dtype != tf.string
                    else tf.constant([], tf.string),
                    tf.zeros([1], tf.int64),
                )
                found[field.name] = tf.concat([empty, *values], 0)
            else:
                dtype = spec.dtype.as_numpy_dtype
                found[field.name] = np.concatenate(
                    [np.array([], dtype), *values]
                )
        return found


_INTEGERS = [f"{u}int{bits}" for u in ("", "u") for bits in (8, 16, 32, 64)]
# By the names that pyarrow gives to types.
_DTYPES = {
    **{name: tf.as_dtype(name) for name in _INTEGERS},
    "bool": tf.bool,
    "halffloat": tf.float16,
    "float": tf.float32,
    "double": tf.float64,
    "string": tf.string,
    "large_string": tf.string,
    "binary": tf.string,
    "large_binary": tf.string,
}


def _is_complete(path: str) -> bool:
    """Whether a file has been written to its end."""
    with open(path, "rb") as file:
        if os.path.getsize(path) < 2 * len(_MAGIC):
            return False
        file.seek(-len(_MAGIC), os.SEEK_END)
        return file.read() == _MAGIC


def _spec(field: Any) -> Any:
    kind, name = field.type, field.name
    inner = getattr(kind, "value_type", kind)
    dtype = _DTYPES.get(str(inner))
    if dtype is None:
        raise ValueError(
            f"Column '{name}' has the type {kind}, which no tensor has. "
            "Write numbers, strings, or lists of these."
        )
    if inner is kind:
        return tf.TensorSpec([None], dtype)
    return tf.RaggedTensorSpec([None, None], dtype, row_splits_dtype=tf.int64)


def _values(path: str, name: str, column: Any) -> Any:
    array = column.combine_chunks()
    if hasattr(array, "chunks"):  # of a chunked array without chunks
        array = array.chunk(0)
    if array.null_count:
        raise ValueError(
            f"Column '{name}' of '{path}' has {array.null_count} rows without "
            "a value. Write a value for each row."
        )
    if not hasattr(array.type, "value_type"):
        return _flat(array)
    lengths = array.value_lengths().to_numpy(zero_copy_only=False)
    return tf.RaggedTensor.from_row_lengths(
        _flat(array.flatten()), lengths.astype(np.int64)
    )


def _flat(array: Any) -> np.ndarray:
    values: np.ndarray = array.to_numpy(zero_copy_only=False)
    return values
