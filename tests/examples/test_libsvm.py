# SPDX-License-Identifier: Apache-2.0
"""Reader and generator of LIBSVM files."""

import pathlib
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
from data import files
from data import libsvm


def test_lines_become_sparse_rows() -> None:
    lines = ["+1 1:0.5 4:2", "-1", "0 2:1 # 3:1", "1  3:-1e-1 "]
    samples, labels = libsvm.parse_lines(tf.constant(lines), 4)
    expected = [[0.5, 0, 0, 2], [0, 0, 0, 0], [0, 1, 0, 0], [0, 0, -0.1, 0]]
    np.testing.assert_allclose(tf.sparse.to_dense(samples), expected)
    np.testing.assert_array_equal(labels, [[1.0], [0.0], [0.0], [1.0]])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1 0:1", "must be in"),
        ("1 5:1", "must be in"),
        ("1 3", "not of the form id:value"),
        ("1 3:1:2", "not of the form id:value"),
        ("1 a:1", "could not correctly convert"),
        ("yes 1:1", "could not correctly convert"),
    ],
)
def test_bad_lines_are_errors(line: str, message: str) -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        libsvm.parse_lines(tf.constant([line]), 4)


def test_count_features(tmp_path: pathlib.Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_text("1 1:1 7:1\n0\n")
    second.write_text("1 3:1 # 99:1\n")
    assert libsvm.count_features([str(first), str(second)]) == 7
    assert libsvm.count_features([str(second)]) == 3


def test_dataset_yields_global_batches(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a"
    path.write_text("".join(f"1 {i + 1}:1\n" for i in range(10)))
    batches = libsvm.dataset([str(path)], 4, 10, shuffle=10, seed=1)
    assert batches.cardinality().numpy() == 3
    samples, _ = zip(*batches, strict=True)
    assert [len(s.values) for s in samples] == [4, 4, 2]
    ids = tf.concat([s.indices[:, 1] for s in samples], 0).numpy()
    assert sorted(ids) == list(range(10))
    assert ids.tolist() != list(range(10))


def test_generated_files_share_a_truth(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files.tempfile, "gettempdir", lambda: str(tmp_path))
    train = libsvm.synthetic_file(100, seed=0)
    test = libsvm.synthetic_file(100, seed=1)
    assert train.read_text() != test.read_text()
    (samples, labels), *_ = libsvm.dataset([str(train)], 100, 1000)
    assert samples.shape == (100, 1000)
    assert 0.2 < float(tf.reduce_mean(labels)) < 0.8


def test_real_file(real_data: Callable[[str], pathlib.Path]) -> None:
    path = str(real_data("a9a") / "a9a")
    features = libsvm.count_features([path])
    assert features <= 123
    (samples, labels), *_ = libsvm.dataset([path], 1000, features)
    assert set(np.unique(labels)) == {0.0, 1.0}
    assert set(np.unique(samples.values)) == {1.0}
