# SPDX-License-Identifier: Apache-2.0
"""Generated and streamed files."""

import gzip
import pathlib

import pytest
from data import files


@pytest.mark.parametrize(
    ("text", "lines"),
    [("", 0), ("a", 1), ("a\n", 1), ("a\nb", 2), ("\n\n", 2)],
)
def test_count_lines(tmp_path: pathlib.Path, text: str, lines: int) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    assert files.count_lines(str(path)) == lines


def test_read_lines_knows_its_length(tmp_path: pathlib.Path) -> None:
    path, packed = tmp_path / "file", tmp_path / "file.gz"
    path.write_text("a\nb\nc")
    packed.write_bytes(gzip.compress(b"d\ne\n"))
    lines = files.read_lines([str(path), str(packed)])
    assert lines.cardinality().numpy() == 5
    assert [line.numpy() for line in lines] == [b"a", b"b", b"c", b"d", b"e"]


def test_write_once_keeps_the_first_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "file"
    files.write_once(path, ["a", "b"])
    files.write_once(path, ["c"])
    assert path.read_text() == "a\nb\n"


def test_write_once_leaves_nothing_behind_on_failure(
    tmp_path: pathlib.Path,
) -> None:
    def failing():
        yield "a"
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        files.write_once(tmp_path / "file", failing())
    assert list(tmp_path.iterdir()) == []


def test_demo_directory_is_private(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files.tempfile, "gettempdir", lambda: str(tmp_path))
    directory = files.demo_directory()
    assert directory.parent == tmp_path
    assert directory.stat().st_mode & 0o077 == 0
    assert files.demo_directory() == directory
