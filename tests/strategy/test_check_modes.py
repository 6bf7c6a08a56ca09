# SPDX-License-Identifier: Apache-2.0
"""The program's `check=` counts more than the launcher's, except "auto"."""

import pytest

import tfdist_ext
from tfdist_ext.numbers import check_report


@pytest.mark.parametrize(
    ("argument", "variable", "expected"),
    [
        ("auto", "", "auto"),
        ("auto", "error", "error"),
        ("off", "error", "off"),
        ("always", "off", "always"),
    ],
)
def test_what_counts(argument: str, variable: str, expected: str) -> None:
    assert (
        check_report.mode_of(argument, {"TFDIST_CHECK": variable}) == expected
    )


def test_other_words_are_refused() -> None:
    with pytest.raises(ValueError, match="`TFDIST_CHECK` must be one of"):
        check_report.mode_of("auto", {"TFDIST_CHECK": "often"})
    with pytest.raises(ValueError, match="`check` must be one of"):
        tfdist_ext.HybridParallelStrategy(check="often")


def test_one_process_has_nothing_to_compare() -> None:
    strategy = tfdist_ext.HybridParallelStrategy(check="error")
    report = strategy.check_step(lambda batch: batch, 1)
    assert report.ok and not report.lines
