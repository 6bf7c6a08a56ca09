# SPDX-License-Identifier: Apache-2.0
"""The index of a TensorFlow checkpoint: which slices its files have, and where.

TensorFlow's own reader does not tell them. The index is a sorted string table,
as LevelDB writes it, without compression.

Source: https://github.com/google/leveldb/blob/main/doc/table_format.md, and of
TensorFlow tensorflow/core/util/tensor_bundle, saved_tensor_slice_util.cc and
tensorflow/core/lib/strings/ordered_code.cc.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import tensor_bundle_pb2

from tfdist_ext.ops.checkpoint_ops import StoredSlice

gfile = tf.io.gfile
_FOOTER, _MAGIC = 48, 0xDB4775248B80FB57


class Index:
    """The index of a checkpoint.

    Args:
        path: path of the checkpoint.

    Raises:
        tf.errors.DataLossError: the index or a data file is missing, shorter
            than it was written, or damaged.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            with gfile.GFile(f"{path}.index", "rb") as file:
                entries = dict(_table(file.read()))
            header = tensor_bundle_pb2.BundleHeaderProto.FromString(
                entries.pop(b"")
            )
        except Exception as error:
            raise tf.errors.DataLossError(
                None, None, f"{path}.index: {error}"
            ) from error
        self._entries = {
            key: tensor_bundle_pb2.BundleEntryProto.FromString(value)
            for key, value in entries.items()
        }
        self._files = header.num_shards
        self._check_files()

    def shape(self, key: str) -> tuple[int, ...] | None:
        """The shape of a tensor; None if there is no such tensor."""
        entry = self._entries.get(key.encode())
        if entry is None:
            return None
        return tuple(dim.size for dim in entry.shape.dim)

    def most_bytes(self, key: str) -> int:
        """Bytes of the largest slice of a tensor, or of all if it has none.

        TensorFlow reads a slice whole, whatever part of it is wanted.
        """
        entry = self._entries[key.encode()]
        shape = [dim.size for dim in entry.shape.dim]
        size = tf.as_dtype(entry.dtype).size
        return size * max(
            (
                math.prod(
                    extent.length if extent.HasField("length") else rows
                    for extent, rows in zip(each.extent, shape, strict=True)
                )
                for each in entry.slices
            ),
            default=math.prod(shape),
        )

    def slices_of_rows(self, key: str) -> list[str] | None:
        """The slices of a tensor in the order of their rows.

        Returns:
            The slices in TensorFlow's notation; None if the tensor is not
            stored in slices that have all columns and follow each other.
        """
        entry = self._entries.get(key.encode())
        if entry is None or not entry.slices:
            return None
        shape = [dim.size for dim in entry.shape.dim]
        sizes = " ".join(map(str, shape))
        end, found = 0, []
        for each in sorted(entry.slices, key=lambda each: each.extent[0].start):
            rows, *columns = each.extent
            if rows.start != end or not rows.HasField("length"):
                return None
            for extent, size in zip(columns, shape[1:], strict=True):
                if extent.HasField("length") and extent.length != size:
                    return None
            end += rows.length
            found.append(f"{sizes} {':'.join(map(_text_of, each.extent))}")
        return found if end == shape[0] else None

    def stored(
        self, key: str, slice_spec: str, dtype: tf.DType
    ) -> StoredSlice | None:
        """Finds a slice that the files have as it is.

        Args:
            key: name of the tensor.
            slice_spec: the slice, in TensorFlow's notation.
            dtype: a dtype of numbers.

        Returns:
            None if the files have no such slice of this dtype, but maybe
            others of the same values.
        """
        extents = _extents(slice_spec)
        entry = self._entries.get(_name_of_slice(key, extents))
        if entry is None or entry.dtype != dtype.as_datatype_enum:
            return None
        return StoredSlice(
            self._file(entry.shard_id),
            entry.offset,
            entry.crc32c,
            tuple(dim.size for dim in entry.shape.dim),
        )

    def _file(self, number: int) -> str:
        return f"{self._path}.data-{number:05d}-of-{self._files:05d}"

    def _check_files(self) -> None:
        """Checks that the data files are there and as long as they must be."""
        ends = [0] * self._files
        for entry in self._entries.values():
            end = entry.offset + entry.size
            ends[entry.shard_id] = max(ends[entry.shard_id], end)
        for number, end in enumerate(ends):
            file = self._file(number)
            try:
                size = gfile.stat(file).length
            except tf.errors.OpError as error:
                raise tf.errors.DataLossError(
                    None, None, f"{file}: {error.message}"
                ) from error
            if size < end:
                raise tf.errors.DataLossError(
                    None,
                    None,
                    f"{file} has {size} bytes; the index names {end}.",
                )


def data_files_in_use(path: str) -> int:
    """Number of data files of the checkpoint at a path, 0 if none."""
    if not gfile.exists(f"{path}.index"):
        return 0
    with gfile.GFile(f"{path}.index", "rb") as file:
        start = file.read(16)
    # The index begins with the entry of the empty name: two lengths of 0, the
    # length of the header, and the header. Its first field is the number of
    # files. What is written over may be damaged.
    if len(start) < 16 or start[:2] != b"\0\0" or start[3:4] != b"\x08":
        return 0
    return _varint(start, 4)[0]


def _extents(slice_spec: str) -> list[tuple[int, int]]:
    """The start and length of each dimension of a slice.

    A dimension that is whole starts at 0 with length -1.
    """
    *_, extents = slice_spec.split(" ")
    return [
        (0, -1) if each == "-" else (int(start), int(length))
        for each in extents.split(":")
        for start, _, length in [each.partition(",")]
    ]


def _text_of(extent: Any) -> str:
    """An extent of a `TensorSliceProto` in TensorFlow's notation."""
    if not extent.HasField("length"):
        return "-"
    return f"{extent.start},{extent.length}"


def _name_of_slice(key: str, extents: list[tuple[int, int]]) -> bytes:
    """The key of a slice in the index, whose order is that of the slices."""
    text = key.encode().replace(b"\0", b"\0\xff")
    numbers = b"".join(_ordered(x) for each in extents for x in each)
    return b"\0" + text + b"\0\1\1" + bytes([len(extents)]) + numbers


def _ordered(number: int) -> bytes:
    """-1 or a larger number, as bytes that have the order of numbers."""
    if number < 0:
        return b"\x7f"
    size = number.bit_length() // 7 + 1
    return (((1 << size) - 1) << 7 * size | number).to_bytes(size, "big")


def _table(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of a sorted string table."""
    footer = data[-_FOOTER:]
    (magic,) = struct.unpack("<Q", footer[-8:])
    if magic != _MAGIC:
        raise ValueError("it does not end as an index does")
    _, place = _handle(footer, 0)
    (offset, size), _ = _handle(footer, place)
    for _, value in _block(data, offset, size):
        (offset, size), _ = _handle(value, 0)
        yield from _block(data, offset, size)


def _block(
    data: bytes, offset: int, size: int
) -> Iterator[tuple[bytes, bytes]]:
    if data[offset + size] != 0:
        raise ValueError("it is compressed")
    block = data[offset : offset + size]
    (restarts,) = struct.unpack("<I", block[-4:])
    end, place, key = size - 4 * (restarts + 1), 0, b""
    while place < end:
        shared, place = _varint(block, place)
        unshared, place = _varint(block, place)
        length, place = _varint(block, place)
        key = key[:shared] + block[place : place + unshared]
        place += unshared
        yield key, block[place : place + length]
        place += length


def _handle(data: bytes, place: int) -> tuple[tuple[int, int], int]:
    offset, place = _varint(data, place)
    size, place = _varint(data, place)
    return (offset, size), place


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, place
