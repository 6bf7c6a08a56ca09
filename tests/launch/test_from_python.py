# SPDX-License-Identifier: Apache-2.0
"""What `launch.notebook` refuses before it starts ranks."""

import importlib.util
import sys
import threading

import pytest

from tfdist_ext import launch


@pytest.mark.parametrize("ranks", [0, -1, True, "2", 2.0])
def test_numbers_of_ranks_that_are_none(ranks):
    with pytest.raises(ValueError, match="`ranks` must be at least 1"):
        launch.notebook(len, ([],), ranks=ranks)


def test_a_rank_starts_no_ranks(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "{}")
    with pytest.raises(ValueError, match=r"TF_CONFIG.*is a rank"):
        launch.notebook(len, ([],))


def test_the_package_for_functions_of_a_notebook_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ImportError, match="pip install cloudpickle"):
        launch.notebook(lambda: 1)


def test_what_cannot_be_pickled_is_said():
    with pytest.raises(TypeError, match="cannot pickle the function or its"):
        launch.notebook(len, (threading.Lock(),))


def test_without_the_package_it_is_found_missing():
    if importlib.util.find_spec("cloudpickle") is not None:
        pytest.skip("cloudpickle is installed")
    with pytest.raises(ImportError, match="cloudpickle"):
        launch.notebook(lambda: 1)
