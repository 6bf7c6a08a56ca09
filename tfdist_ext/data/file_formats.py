# SPDX-License-Identifier: Apache-2.0
"""Where records begin in TFRecord and CSV files, and how they are read."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Sequence
from typing import Any
from typing import BinaryIO
from typing import Protocol

import numpy as np
import tensorflow as tf

from tfdist_ext import tensorflow_internals as internals

_CHUNK = 1 << 20  # bytes that are searched for records at a time
# Time in which a file system of several hosts shows a file to all of them.
_SEEN_SECONDS = 30.0
_STRINGS = tf.TensorSpec([None], tf.string)


class FileFormat(Protocol):
    """How the records of a file are found and read."""

    def spec_of(self, pattern: str, paths: Sequence[str]) -> Any:
        """Nest of specs of a batch.

        Args:
            pattern: the pattern of the files, for errors.
            paths: the files that there are.
        """

    def search(self, path: str, at: int, most: int) -> np.ndarray:
        """Finds whole records.

        Args:
            path: path of the file.
            at: offset to begin at.
            most: largest number of records.

        Returns:
            int64 `[n + 1]`, the offsets of n records, and that after them.
        """

    def read(self, path: str, start: int, stop: int, size: int) -> Any:
        """Reads records.

        Args:
            path: path of the file.
            start: offset of the first one.
            stop: offset after the last one.
            size: number of records.
        """

    def joined(self, batches: Sequence[Any]) -> Any:
        """One batch of the records of several, or of none."""


class _Strings:
    """A format whose records are strings."""

    def spec_of(self, pattern: str, paths: Sequence[str]) -> Any:
        """See `FileFormat`."""
        return _STRINGS

    def joined(self, batches: Sequence[Any]) -> Any:
        """See `FileFormat`."""
        return np.concatenate([np.array([], object), *batches])


def checked_size(path: str, at: int) -> int:
    """Size of a file.

    Args:
        path: path of the file.
        at: offset up to which it was read.

    Raises:
        ValueError: the file is shorter than that.
    """
    size = os.path.getsize(path)
    if size < at:
        raise ValueError(
            f"'{path}' has {size} bytes, but {at} bytes of it were read: it "
            "was cut or replaced. Positions count bytes, so files may only "
            "grow. Give new content a new name."
        )
    return size


def await_size(path: str, stop: int) -> None:
    """Waits until this host sees a file up to an offset.

    Args:
        path: path of the file.
        stop: the offset.

    Raises:
        OSError: it does not.
    """
    deadline = time.monotonic() + _SEEN_SECONDS
    while not os.path.exists(path) or os.path.getsize(path) < stop:
        if time.monotonic() > deadline:
            raise OSError(
                f"'{path}' does not have {stop} bytes on this host, which rank "
                "0 has seen. Put the files into a file system that all hosts "
                "share, and do not remove them before they are trained."
            )
        time.sleep(0.01)


class TFRecordFiles(_Strings):
    """Files in the format of TFRecord, not compressed.

    A record is its length (8 bytes) with a checksum (4), then the data with a
    checksum (4): https://www.tensorflow.org/tutorials/load_data/tfrecord.
    """

    _HEAD = struct.Struct("<QI")
    _REST = 4

    def search(self, path: str, at: int, most: int) -> np.ndarray:
        """See `FileFormat`."""
        size, ends = checked_size(path, at), [at]
        chunk, base = b"", at
        with open(path, "rb") as file:
            while len(ends) <= most and at + self._HEAD.size <= size:
                if at + self._HEAD.size > base + len(chunk):
                    file.seek(at)
                    chunk, base = file.read(_CHUNK), at
                head = chunk[at - base : at - base + self._HEAD.size]
                if not any(head):  # allocated, and not written yet
                    break
                length, checksum = self._HEAD.unpack(head)
                stop = at + self._HEAD.size + length + self._REST
                # Reading checks all checksums. A wrong length would be taken
                # for a record that is not complete.
                if (len(ends) == 1 or stop > size) and checksum != _masked(
                    crc32c(head[:8])
                ):
                    raise ValueError(
                        f"'{path}' has no record of TFRecord at byte {at}: it "
                        "is damaged, compressed, or of another format. "
                        "Compressed files cannot be read from the middle."
                    )
                if stop > size:
                    break
                at = stop
                ends.append(at)
        return np.array(ends, np.int64)

    def read(self, path: str, start: int, stop: int, size: int) -> Any:
        """See `FileFormat`."""
        await_size(path, stop)
        records = internals.tf_records_from(path, start).take(size)
        return records.batch(size).get_single_element().numpy()


_POLYNOMIAL = 0x82F63B78  # of CRC-32C, RFC 3720, its bits reversed


def _table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _table()


def crc32c(data: bytes) -> int:
    """CRC-32C of a few bytes."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def _masked(crc: int) -> int:
    """The form of a checksum that TFRecord stores."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


class CsvFiles(_Strings):
    """Lines of CSV files.

    Args:
        header: whether the first line has no record.
    """

    def __init__(self, header: bool) -> None:
        self._header = header

    def search(self, path: str, at: int, most: int) -> np.ndarray:
        """See `FileFormat`."""
        checked_size(path, at)
        skipped = int(self._header and at == 0)
        found, count = [], 0
        with open(path, "rb") as file:
            file.seek(at)
            end = at
            while count < most + skipped and (chunk := file.read(_CHUNK)):
                breaks = np.flatnonzero(np.frombuffer(chunk, np.uint8) == 10)
                found.append(breaks + (end + 1))
                count += len(breaks)
                end += len(chunk)
        starts = np.concatenate([np.array([at]), *found]).astype(np.int64)
        return starts[skipped : skipped + most + 1]

    def read(self, path: str, start: int, stop: int, size: int) -> Any:
        """See `FileFormat`."""
        await_size(path, stop)
        with open(path, "rb") as file:
            lines = _exactly(file, start, stop).split(b"\n")[:-1]
        lines = [line.removesuffix(b"\r") for line in lines]
        for line in lines:
            if line.count(b'"') % 2:
                raise ValueError(
                    f"'{path}' has a line with an open quote: {line[:80]!r}. A "
                    "record is one line. Write fields with line breaks as "
                    "TFRecord or Parquet."
                )
        # Lines without a field are no records, as in tf.data's CsvDataset.
        return np.array([line for line in lines if line], object)


def _exactly(file: BinaryIO, start: int, stop: int) -> bytes:
    file.seek(start)
    return file.read(stop - start)
