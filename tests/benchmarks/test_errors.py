# SPDX-License-Identifier: Apache-2.0
"""The check sees a wrong update, and does not mistake rounding for one."""

import numpy as np

from benchmarks import errors

_INITIAL = np.full((4, 2), 0.1, np.float32)
_WANT = _INITIAL - np.float32(1e-5)


def test_equal_results_have_no_error():
    assert errors.change_error((_WANT,), (_WANT,), (_INITIAL,)) == 0.0


def test_a_missing_update_is_an_error_of_one():
    got = _WANT.copy()
    got[3, 1] = _INITIAL[3, 1]
    error = errors.change_error((got,), (_WANT,), (_INITIAL,))
    assert 0.9 < error <= 1.1


def test_the_last_bit_of_a_large_weight_is_rounding():
    got = np.nextafter(_WANT, np.float32(1))
    assert errors.change_error((got,), (_WANT,), (_INITIAL,)) == 0.0


def test_the_worst_array_counts():
    error = errors.change_error(
        (_WANT, _INITIAL), (_WANT, _WANT), (_INITIAL, _INITIAL)
    )
    assert error > 0.9


def test_nan_is_a_problem():
    got = _WANT.copy()
    got[0, 0] = np.nan
    error = errors.change_error((_WANT, got), (_WANT,) * 2, (_INITIAL,) * 2)
    assert "rows by nan" in errors.problem({"rows": error}, "float32")


def test_bystanders_may_not_move_at_all():
    fine = {"rows": 1e-6, "bystanders": 0.0}
    assert errors.problem(fine, "float32") == ""
    moved = {"rows": 1e-6, "bystanders": 1e-9}
    assert "bystanders" in errors.problem(moved, "float32")


def test_a_wire_of_16_bits_may_round_more():
    found = {"rows": 5e-3, "bystanders": 0.0}
    assert errors.problem(found, "float32")
    assert errors.problem(found, "bfloat16") == ""
