# SPDX-License-Identifier: Apache-2.0
"""Columns in CSV, TFRecord and Parquet files."""

import pathlib

import numpy as np
import pytest
from data import tables


@pytest.mark.parametrize("kind", tables.READERS)
def test_what_is_written_is_read(tmp_path: pathlib.Path, kind: str) -> None:
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    rows = tables.samples(70)
    files = tables.write(kind, tmp_path, rows, files=3)
    batches = list(tables.dataset(kind, files, 16))
    assert [len(label) for _, label in batches] == [16, 16, 16, 16, 6]
    for name, dtype in tables.COLUMNS.items():
        parts = [
            label if name == tables.LABEL else columns[name]
            for columns, label in batches
        ]
        assert {part.dtype for part in parts} == {dtype}
        read = np.concatenate([part.numpy()[:, 0] for part in parts])
        if dtype.name == "string":
            read = np.char.decode(read.astype(bytes))
        if dtype.name == "float32" and kind == "csv":
            np.testing.assert_allclose(read, rows[name], rtol=1e-6)
        else:
            np.testing.assert_array_equal(read, rows[name])
