# SPDX-License-Identifier: Apache-2.0
"""Verdicts follow from what one process and several ranks find."""

import dataclasses

import numpy as np
import pytest

from tests.numbers import judging
from tests.numbers import registry
from tests.numbers.judging import judge


@dataclasses.dataclass
class Found:
    """As `scenario.Outcome`, which imports TensorFlow."""

    values: dict
    error: str = ""
    warnings: list = dataclasses.field(default_factory=list)


def program(verdict=registry.EQUAL, says=""):
    return registry.Program("a/b", lambda c: {}, verdict, says)


def found(*values, **how):
    return Found({"x": np.array(values)}, **how)


def test_equal_numbers():
    seen = judge(program(), found(1.0, 2.0), [found(1.0, 2.00001)] * 2)
    assert seen.verdict == registry.EQUAL
    assert seen.error == pytest.approx(5e-6, rel=0.1)


@pytest.mark.parametrize(
    "ranks",
    [
        [found(1.0, 2.1)] * 2,
        [found(1.0, 2.0), found(1.0, 2.0000001)],
        [found(1.0, np.nan)] * 2,
        [found(1.0)] * 2,
        [Found({})] * 2,
        [Found({"x": np.array([1.0, 2.0]), "y": np.ones(1)})] * 2,
    ],
)
def test_different_numbers(ranks):
    seen = judge(program(), found(1.0, 2.0), ranks)
    assert seen.verdict == judging.DIFFERENT


def test_numbers_that_are_nan_in_one_process_too():
    seen = judge(program(), found(np.nan, 2.0), [found(np.nan, 2.0)])
    assert seen.verdict == registry.EQUAL


@pytest.mark.parametrize(
    ("says", "text", "verdict"),
    [
        ("Einsum", "the op 'Einsum_1' (a.py:3)", registry.WARNED),
        ("Einsum", "something is wrong", judging.DIFFERENT),
    ],
)
def test_a_warning_must_name_the_culprit(says, text, verdict):
    ranks = [found(3.0, warnings=[text]), found(3.0)]
    each = program(registry.WARNED, says)
    assert judge(each, found(1.0), ranks).verdict == verdict


def test_a_warning_of_stock_is_none():
    ranks = [found(3.0, warnings=["Einsum"])]
    each = program(registry.WARNED, "Einsum")
    stock = found(1.0, warnings=["Einsum"])
    assert judge(each, stock, ranks).verdict == judging.DIFFERENT


@pytest.mark.parametrize(
    ("errors", "verdict"),
    [
        (("use this", "use this"), registry.REFUSED),
        (("use this", "another"), judging.FAILED),
        (("use this", ""), judging.FAILED),
        (("no", "no"), judging.FAILED),
    ],
)
def test_all_ranks_must_name_the_remedy(errors, verdict):
    ranks = [found(1.0, error=error) for error in errors]
    each = program(registry.REFUSED, "use this")
    assert judge(each, found(1.0), ranks).verdict == verdict


def test_a_program_that_fails_in_one_process():
    seen = judge(program(), found(error="no"), [found(error="no")])
    assert seen.verdict == judging.FAILED
    assert seen.where == "one process: no"
