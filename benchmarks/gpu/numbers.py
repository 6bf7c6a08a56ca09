# SPDX-License-Identifier: Apache-2.0
"""Random input of kernels, and comparison of what they make of it."""

from __future__ import annotations

import numpy as np

from benchmarks.gpu.device import POINTER
from benchmarks.gpu.device import Array


class WrongResult(Exception):
    """A kernel's result is not that of its reference."""


def floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Cuts floats to bfloat16, as uint16."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def from_bfloat16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.uint32) << 16).view(np.float32)


def row_splits(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def pointer(array: Array | None) -> int | None:
    return None if array is None else array.pointer


def address(values: np.ndarray | None) -> POINTER:
    """Where an array of the host lies, for a function in C."""
    return POINTER(None if values is None else values.ctypes.data)


def expect_close(
    what: str,
    got: np.ndarray,
    expected: np.ndarray,
    scale: np.ndarray | float = 0.0,
    relative: float = 1e-5,
) -> None:
    """Compares with a tolerance; NaN must meet NaN.

    Args:
        what: the case, for the error.
        got: the kernel's result.
        expected: the reference's.
        scale: how large the numbers were that were added; rounding errors are
            as large as these, not as their sum.
        relative: the tolerance, of the scale or of the expected number.

    Raises:
        WrongResult: they differ.
    """
    got, expected = got.astype(np.float64), expected.astype(np.float64)
    nan = np.isnan(expected)
    same = (got == expected) | (np.isnan(got) & nan)
    with np.errstate(invalid="ignore"):
        room = relative * (np.abs(expected) + scale) + 1e-30
        close = same | (np.abs(got - expected) <= room)
    if close.all():
        return
    at = tuple(int(i) for i in np.argwhere(~close)[0])
    raise WrongResult(
        f"{what}: {int((~close).sum())} of {close.size} numbers differ, the "
        f"first at {at}: {got[at]!r} instead of {expected[at]!r}"
    )


def expect_equal(what: str, got: np.ndarray, expected: np.ndarray) -> None:
    """Compares bits.

    Raises:
        WrongResult: they differ.
    """
    if got.shape != expected.shape:
        raise WrongResult(f"{what}: {got.shape} instead of {expected.shape}")
    wrong = np.argwhere(got != expected)
    if wrong.size:
        at = tuple(int(i) for i in wrong[0])
        raise WrongResult(
            f"{what}: {len(wrong)} of {got.size} differ, the first at {at}: "
            f"{got[at]!r} instead of {expected[at]!r}"
        )
