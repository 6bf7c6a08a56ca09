# SPDX-License-Identifier: Apache-2.0
"""Records of files that grow, or are added: TFRecord, CSV and Parquet."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdist_ext.data.feeds import PlannedSource
from tfdist_ext.data.file_formats import CsvFiles
from tfdist_ext.data.file_formats import FileFormat
from tfdist_ext.data.file_formats import TFRecordFiles
from tfdist_ext.data.parquet import ParquetFiles
from tfdist_ext.data.plans import Offsets
from tfdist_ext.data.plans import Range

_ENDS = {
    "tfrecord": (".tfrecord", ".tfrecords"),
    "csv": (".csv", ".tsv"),
    "parquet": (".parquet",),
}


class FileSource(PlannedSource):
    """The records of the files of a folder or pattern.

    Args:
        pattern: a folder, or a glob pattern.
        file_format: "tfrecord", "csv" or "parquet"; None to tell by the names.
        header: whether CSV files have a first line without a record.

    Attributes:
        kind: kind of the stream, in its state.

    Raises:
        ValueError: the format is unknown, or the files are not in a file
            system.
    """

    kind = "files"

    def __init__(
        self, pattern: str, file_format: str | None, header: bool
    ) -> None:
        if "://" in pattern:
            raise ValueError(
                "from_files reads files of a mounted file system, where files "
                f"can grow. Received: pattern={pattern!r}"
            )
        self._pattern = pattern
        self._glob = pattern
        if os.path.isdir(pattern) or not (
            glob.has_magic(pattern) or os.path.isfile(pattern)
        ):
            self._glob = os.path.join(glob.escape(pattern), "*")
        fixed = self._glob
        while glob.has_magic(fixed):
            fixed = os.path.dirname(fixed)
        if fixed == self._glob:  # one file
            fixed = os.path.dirname(fixed)
        self._root = fixed or "."
        self._format = self._format_of(file_format, header)

    @property
    def spec(self) -> Any:
        """Nest of specs of a batch.

        Raises:
            ValueError: the columns are not known, as there is no file.
        """
        paths = [os.path.join(self._root, part) for part in self._parts()]
        return self._format.spec_of(self._pattern, paths)

    def initial(self) -> Offsets:
        """The position before the first record."""
        return {}

    def to_json(self, offsets: Offsets) -> Any:
        """Offsets as JSON values."""
        return {"offsets": offsets}

    def from_json(self, value: Any) -> Offsets:
        """The offsets that `to_json` was called with."""
        return dict(value["offsets"])

    def _format_of(self, name: str | None, header: bool) -> FileFormat:
        names = [self._glob, *self._parts()] if name is None else []
        for each, ends in _ENDS.items():
            if name is None and any(one.endswith(ends) for one in names):
                name = each
        if name == "tfrecord":
            return TFRecordFiles()
        if name == "csv":
            return CsvFiles(header)
        if name == "parquet":
            return ParquetFiles()
        raise ValueError(
            f"The format of the files '{self._pattern}' is unknown. Pass "
            "file_format='tfrecord', 'csv' or 'parquet'. Received: "
            f"file_format={name!r}"
        )

    def _parts(self) -> list[str]:
        """Names of the files, relative to the folder, in order."""
        found = [
            os.path.relpath(path, self._root)
            for path in glob.iglob(self._glob, recursive=True)
            if not os.path.basename(path).startswith(("_", "."))
        ]
        return sorted(
            part
            for part in found
            if os.path.isfile(os.path.join(self._root, part))
        )

    def available(
        self, offsets: Offsets, most: int, after: str
    ) -> list[tuple[str, np.ndarray]]:
        """See `Source.available`."""
        found: list[tuple[str, np.ndarray]] = []
        # The file that was found last may have more. The others follow it.
        if after:
            most -= self._search(after, offsets, most, found)
        parts = self._parts() if most else []
        later = [part for part in parts if part > after]
        for part in later + parts[: len(parts) - len(later)]:
            if most and part != after:
                most -= self._search(part, offsets, most, found)
        return found

    def _search(
        self,
        part: str,
        offsets: Offsets,
        most: int,
        found: list[tuple[str, np.ndarray]],
    ) -> int:
        """Adds the records that follow in a file; returns their number."""
        path, at = os.path.join(self._root, part), offsets.get(part, 0)
        try:
            ends = self._format.search(path, at, most)
        except FileNotFoundError:  # removed since
            return 0
        if len(ends) > 1:
            found.append((part, ends))
        return len(ends) - 1

    def read(self, ranges: Sequence[Range]) -> Any:
        """See `Source.read`."""
        batches = [
            self._format.read(os.path.join(self._root, part), start, stop, size)
            for part, start, stop, size in ranges
        ]
        if len(batches) == 1:
            return batches[0]
        return self._format.joined(batches)
