# SPDX-License-Identifier: Apache-2.0
"""The shared library is loaded into the TensorFlow it was built for."""

import pytest

from tfdist_ext.ops.library import check_version


def test_library_of_another_tensorflow():
    check_version(None, "2.21.0")
    check_version("2.21", "2.21.3")
    with pytest.raises(ImportError, match=r"2\.18.*2\.21\.0.*pip install"):
        check_version("2.18", "2.21.0")
