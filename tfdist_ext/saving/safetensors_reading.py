# SPDX-License-Identifier: Apache-2.0
"""Tensors in safetensors files, mapped into memory."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

INDEX = "model.safetensors.index.json"
_ONE_FILE = "model.safetensors"
_ROWS = ".rows."
# A header may have this many bytes, as in the format's own implementation.
_MAX_HEADER = 100_000_000

_DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(tf.bfloat16.as_numpy_dtype),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
CODES = {dtype: code for code, dtype in _DTYPES.items()}


def file_name(rank: int, ranks: int) -> str:
    """Returns the name of the file that a rank writes.

    Args:
        rank: the rank.
        ranks: the number of ranks.
    """
    return f"model-{rank + 1:05}-of-{ranks:05}.safetensors"


def part_name(table: str, first: int) -> str:
    """Returns the name of a tensor with consecutive rows of a table.

    Args:
        table: the name of the table's weight.
        first: the number of the first row.
    """
    return f"{table}{_ROWS}{first}"


class Stored:
    """A tensor in one file, or the rows of a table in several.

    It can be sliced along its first two dimensions, as `read_part` does.

    Attributes:
        shape: the shape of the whole tensor.
        dtype: its NumPy dtype.

    Args:
        parts: arrays of consecutive rows, by the number of their first row; a
            tensor in one file has one part.
    """

    def __init__(self, parts: Mapping[int, np.ndarray]) -> None:
        self._parts = dict(sorted(parts.items()))
        last, rows = list(self._parts.items())[-1]
        self.dtype = rows.dtype
        self.shape = rows.shape
        if len(parts) > 1 or last:
            self.shape = (last + len(rows), *rows.shape[1:])

    def array(self) -> np.ndarray:
        """Returns the whole tensor."""
        if not self.shape:
            (value,) = self._parts.values()
            return np.array(value)
        found: np.ndarray = self[: self.shape[0]]
        return found

    def __getitem__(self, index: Any) -> Any:
        rows, *others = index if isinstance(index, tuple) else (index,)
        start, end, _ = rows.indices(self.shape[0])
        found = [
            part[(slice(max(start - first, 0), max(end - first, 0)), *others)]
            for first, part in self._parts.items()
            if first < end and first + len(part) > start
        ]
        if not found:
            part = next(iter(self._parts.values()))
            found = [part[(slice(0, 0), *others)]]
        return np.concatenate(found)

    @staticmethod
    def sizes_in(path: str) -> dict[str, int]:
        """Returns the bytes of each tensor of a file, by its name.

        Args:
            path: path of the file.
        """
        return {
            name: math.prod(shape) * dtype.itemsize
            for name, (dtype, shape, _) in _entries(path).items()
        }


def read_folder(folder: str) -> dict[str, Stored]:
    """Maps all tensors of a folder, with the rows of each table joined.

    Args:
        folder: path of a folder with an index, or with `model.safetensors`.

    Raises:
        FileNotFoundError: there is neither.
        ValueError: a file is damaged, or a tensor is missing.
    """
    places, tables = _index(folder)
    arrays: dict[str, np.ndarray] = {}
    for file in sorted(set(places.values())):
        path = os.path.join(folder, file)
        for name, (dtype, shape, start) in _entries(path).items():
            if places.get(name) == file:
                arrays[name] = _mapped(path, dtype, shape, start)
    absent = sorted(places.keys() - arrays.keys())
    if absent:
        raise ValueError(
            f"'{os.path.join(folder, INDEX)}' names tensors that their files "
            f"do not have: {absent[:5]}. Copy all files of one export."
        )
    found = {}
    for table, whole in tables.items():
        prefix = f"{table}{_ROWS}"
        parts = {
            int(name.removeprefix(prefix)): arrays.pop(name)
            for name in list(arrays)
            if name.startswith(prefix) and name.removeprefix(prefix).isdigit()
        }
        found[table] = _joined(table, parts, whole, folder)
    return found | {name: Stored({0: each}) for name, each in arrays.items()}


def _joined(
    table: str,
    parts: Mapping[int, np.ndarray],
    shape: Sequence[int],
    folder: str,
) -> Stored:
    end = 0
    for first, part in sorted(parts.items()):
        if first != end:
            break
        end += len(part)
    if not parts or end != shape[0]:
        raise ValueError(
            f"Table '{table}' has {shape[0]} rows, and the files in "
            f"'{folder}' have rows from {end} on missing or twice. Copy all "
            "files of one export."
        )
    return Stored(parts)


def _index(folder: str) -> tuple[dict[str, str], dict[str, list[int]]]:
    """Files of the tensors, and shapes of partitioned tables."""
    path = os.path.join(folder, INDEX)
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            index = json.load(file)
        tables = index.get("metadata", {}).get("tables", {})
        return index["weight_map"], tables
    path = os.path.join(folder, _ONE_FILE)
    if not os.path.exists(path):
        raise FileNotFoundError(
            f"'{folder}' has neither '{INDEX}' nor '{_ONE_FILE}'. Give the "
            "folder that export_safetensors has written; if it failed, export "
            "again."
        )
    return dict.fromkeys(_entries(path), _ONE_FILE), {}


_Entry = tuple[np.dtype[Any], tuple[int, ...], int]


def _entries(path: str) -> dict[str, _Entry]:
    """Dtype, shape and first byte of each tensor of a file."""
    size = os.path.getsize(path)
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(size - 8, _MAX_HEADER):
                raise ValueError(f"its header would have {length} bytes")
            header = json.loads(file.read(length))
        found = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            start, end = entry["data_offsets"]
            shape = tuple(map(int, entry["shape"]))
            dtype = _DTYPES[entry["dtype"]]
            if end - start != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"tensor '{name}' has another size")
            if start < 0 or 8 + length + end > size:
                raise ValueError(f"tensor '{name}' ends after the file")
            found[name] = (dtype, shape, 8 + length + start)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"'{path}' is not a complete safetensors file: {error}. It has "
            f"{size} bytes. Copy it again, or export again."
        ) from error
    return found


def _mapped(
    path: str, dtype: np.dtype[Any], shape: tuple[int, ...], start: int
) -> np.ndarray:
    if 0 in shape:
        return np.empty(shape, dtype)
    raw = np.memmap(
        path, np.uint8, "r", start, math.prod(shape) * dtype.itemsize
    )
    return raw.view(dtype).reshape(shape)
