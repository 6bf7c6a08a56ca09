# SPDX-License-Identifier: Apache-2.0
"""The gradient of the lookup against float64: unique rows and their sums."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator

import numpy as np

from benchmarks.gpu import device as gpu
from benchmarks.gpu import numbers


@dataclasses.dataclass(frozen=True)
class Case:
    """One gradient; `counts` are the entries of every sample."""

    width: int
    counts: tuple[int, ...]
    table_rows: int = 53
    weighted: bool = False
    single: bool = False  # no row_splits
    special: str = ""  # "nan", "outside" or none


def cases(rng: np.random.Generator) -> Iterator[Case]:
    """Rows that all differ, that repeat, and one that has all entries."""
    for width in (1, 3, 4, 32, 36, 130, 132):
        counts = tuple(int(n) for n in rng.integers(0, 6, 60))
        yield Case(
            width,
            counts,
            table_rows=int(rng.choice([2, 53, 2**40])),
            weighted=bool(rng.integers(2)),
            special=str(rng.choice(["", "nan", "outside"])),
        )
    yield Case(8, (700, 0, 1), table_rows=1)  # one row, many chunks
    yield Case(8, (2,) * 500, table_rows=3, weighted=True)
    yield Case(70, (100, 100), table_rows=1)  # more columns than a group
    yield Case(4, (1,) * 300, single=True)
    yield Case(4, (1,) * 128, table_rows=2, single=True)  # whole chunks
    yield Case(4, (64, 64, 64), table_rows=1, special="outside")
    yield Case(4, (1,), table_rows=1, special="outside")  # none is left
    yield Case(8, ())
    yield Case(8, (0, 0))


def check(device: gpu.Device, case: Case, rng: np.random.Generator) -> None:
    """Runs one gradient twice: its bits are the same.

    Raises:
        WrongResult: it is not the reference's.
    """
    splits = numbers.row_splits(np.asarray(case.counts, np.int64))
    entries = int(splits[-1])
    rows = rng.integers(0, case.table_rows, entries)
    grad = numbers.floats(rng, len(case.counts), case.width)
    weights = numbers.floats(rng, entries) if case.weighted else None
    if case.special == "nan":
        grad[::7] = np.nan
    if case.special == "outside":
        rows[-1:] = case.table_rows
        rows[rng.integers(0, entries)] = -1
    unique, sums = run(device, case, grad, splits, rows, weights)
    inside = (rows >= 0) & (rows < case.table_rows)
    expected_rows, which = np.unique(rows[inside], return_inverse=True)
    numbers.expect_equal(f"{case}: rows", unique, expected_rows)
    samples = np.repeat(np.arange(len(case.counts)), case.counts)[inside]
    added = grad[samples].astype(np.float64)
    if weights is not None:
        added *= weights[inside, np.newaxis]
    expected = np.zeros((len(expected_rows), case.width))
    scale = np.zeros_like(expected)
    np.add.at(expected, which, added)
    np.add.at(scale, which, np.nan_to_num(np.abs(added)))
    numbers.expect_close(f"{case}: sums", sums, expected, scale)
    again, same = run(device, case, grad, splits, rows, weights)
    numbers.expect_equal(
        f"{case}: bits", same.view(np.uint32), sums.view(np.uint32)
    )
    numbers.expect_equal(f"{case}: rows again", again, unique)


def run(
    device: gpu.Device,
    case: Case,
    grad: np.ndarray,
    splits: np.ndarray,
    rows: np.ndarray,
    weights: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the unique rows and their gradients."""
    entries = len(rows)
    unique_rows = device.poisoned((entries,), np.int64)
    row_grads = device.poisoned((entries, case.width), np.float32)
    unique = device.poisoned((1,), np.int64)
    inputs = [grad, splits, rows, weights]
    put = [None if each is None else device.put(each) for each in inputs]
    args = arguments(case, entries, [*put, unique_rows, row_grads, unique])
    device.call("RowGrads", args, scratch(device, args))
    device.synchronize()
    count = int(unique.get()[0])
    return unique_rows.get()[:count], row_grads.get()[:count]


def arguments(
    case: Case, entries: int, arrays: list[gpu.Array | None]
) -> gpu.RowGrads:
    """Fills the struct; the arrays are its pointers, in order."""
    grad, splits, rows, weights, *outputs = map(numbers.pointer, arrays)
    return gpu.RowGrads(
        grad,
        case.width,
        len(case.counts),
        None if case.single else splits,
        rows,
        weights,
        entries,
        case.table_rows,
        *outputs,
    )


def scratch(device: gpu.Device, args: gpu.RowGrads) -> gpu.POINTER:
    needed = device.library.RowGradsScratch(ctypes.byref(args))
    return gpu.POINTER(device.poisoned((needed,), np.uint8).pointer)
