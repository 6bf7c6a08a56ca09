# SPDX-License-Identifier: Apache-2.0
"""Options of compression are numbers and bools within bounds."""

import math

import pytest

from tfdist_ext.compression import RandomK
from tfdist_ext.compression import TopK

KINDS = (TopK, RandomK)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0, -0.5, 1.01, math.nan, True, "0.1", None])
def test_shares_out_of_bounds_are_refused(kind, share):
    with pytest.raises(ValueError, match=rf"`share`.*{kind.__name__}\)"):
        kind(share)


@pytest.mark.parametrize("kind", KINDS)
def test_error_feedback_is_a_bool(kind):
    with pytest.raises(ValueError, match=r"`error_feedback`.*'no'"):
        kind(0.1, error_feedback="no")


@pytest.mark.parametrize("kind", KINDS)
def test_options_are_values(kind):
    assert kind(0.1) == kind(0.1, error_feedback=True)
    assert kind(0.1) != kind(0.1, error_feedback=False)
    assert kind(1).share == 1
