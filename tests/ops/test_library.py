# SPDX-License-Identifier: Apache-2.0
"""The shared library is loaded into the TensorFlow it was built for."""

import pathlib
import runpy
import types

import pytest
import tensorflow as tf

from tfdist_ext.ops import library
from tfdist_ext.ops.library import check_version
from tfdist_ext.optimizers import keras_versions


def test_library_of_another_tensorflow():
    check_version(None, "2.21.0")
    check_version("2.21", "2.21.3")
    with pytest.raises(ImportError, match=r"2\.18.*2\.21\.0.*pip install"):
        check_version("2.18", "2.21.0")


@pytest.fixture
def several(tmp_path):
    """A folder with libraries for three minor versions of TensorFlow."""
    for minor in ("2_9", "2_19", "2_21"):
        (tmp_path / f"_tfdist_ops_tf{minor}.so").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("installed", "name"),
    [
        ("2.19.1", "_tfdist_ops_tf2_19.so"),
        ("2.21.0", "_tfdist_ops_tf2_21.so"),
        ("2.21.0-rc1", "_tfdist_ops_tf2_21.so"),
        ("2.9.3", "_tfdist_ops_tf2_9.so"),
    ],
)
def test_library_of_the_installed_minor_is_chosen(several, installed, name):
    assert library.choose(several, None, installed) == several / name


@pytest.mark.parametrize("installed", ["2.2.0", "2.20.0", "2.22.0-dev2026"])
def test_minor_without_a_library_is_explained(several, installed):
    with pytest.raises(ImportError) as caught:
        library.choose(several, None, installed)
    for text in (
        f"TensorFlow {installed} is installed",
        "2.9, 2.19, 2.21",
        str(several),
        "pip install 'tensorflow~=2.21.0'",
        "pip install -U tfdist_ext",
    ):
        assert text in str(caught.value)


def test_import_fails_without_a_library_for_the_minor(several, monkeypatch):
    """As with a wheel that has none for this TensorFlow."""
    source = pathlib.Path(library.__file__).read_text()
    (several / "library.py").write_text(source)
    monkeypatch.delenv("TFDIST_LIBRARY", raising=False)
    monkeypatch.setattr(tf, "__version__", "2.20.0")
    with pytest.raises(ImportError, match=r"only for TensorFlow 2\.9, 2\.19"):
        runpy.run_path(str(several / "library.py"))
    monkeypatch.setenv("TFDIST_LIBRARY", "of another build")
    runpy.run_path(str(several / "library.py"))


def test_library_of_one_version_is_checked(tmp_path):
    (tmp_path / "_tfdist_ops.so").touch()
    expected = tmp_path / "_tfdist_ops.so"
    assert library.choose(tmp_path, "2.21", "2.21.1") == expected
    with pytest.raises(ImportError, match=r"built for TensorFlow 2\.18"):
        library.choose(tmp_path, "2.18", "2.21.0")


@pytest.mark.parametrize("cuda", [False, True])
def test_tables_are_updated_where_the_library_has_kernels(monkeypatch, cuda):
    built = types.SimpleNamespace(TENSORFLOW_VERSION="2.21", CUDA=cuda)
    monkeypatch.setattr(library, "build_info", lambda: built)
    monkeypatch.delenv("TFDIST_LIBRARY", raising=False)
    for device, expected in (("/device:CPU:0", True), ("/device:GPU:0", cuda)):
        table = types.SimpleNamespace(
            shape=(3, 4), dtype=tf.float32, device=device
        )
        assert keras_versions.has_kernel(table) == expected
