# SPDX-License-Identifier: Apache-2.0
"""The shared library is loaded into the TensorFlow it was built for."""

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
