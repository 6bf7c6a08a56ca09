# SPDX-License-Identifier: Apache-2.0
"""Arguments of the strategy that are refused before ranks meet."""

import pytest

import tfdist_ext
from tfdist_ext.distribute import bootstrap


def test_a_wrong_gradient_dtype_is_refused_before_anything_is_started(
    monkeypatch,
):
    def prepare(*_):
        pytest.fail("started")

    monkeypatch.setattr(bootstrap, "prepare", prepare)
    with pytest.raises(ValueError, match=r"`gradient_dtype`.*'float8'"):
        tfdist_ext.HybridParallelStrategy(gradient_dtype="float8")
