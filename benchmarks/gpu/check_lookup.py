# SPDX-License-Identifier: Apache-2.0
"""The pooled lookup against float64 and the CPU's functor."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from benchmarks.gpu import device as gpu
from benchmarks.gpu import numbers

COMBINERS = ("sum", "mean", "sqrtn")
NO_ENTRY = np.uint64(2**64 - 1)


@dataclasses.dataclass(frozen=True)
class Case:
    """One lookup; `counts` are the entries of every segment."""

    width: int
    counts: tuple[int, ...]
    bfloat16: bool = False
    weighted: bool = False
    combiner: str = "sum"
    single: bool = False  # no row_splits
    table_rows: int = 53
    special: str = ""  # "nan", "outside", "zero weights" or none
    shift: int = 0  # numbers before the table's first: no loads of 16 bytes


def cases(rng: np.random.Generator) -> Iterator[Case]:
    """Widths narrow to wide, hotness 0, 1, odd and high; then all else."""
    for width in (1, 2, 3, 4, 8, 12, 16, 33, 64, 128, 136, 260):
        counts = tuple(int(n) for n in rng.integers(0, 6, 11))
        for bfloat16 in (False, True):
            yield Case(
                width,
                counts,
                bfloat16,
                weighted=bool(rng.integers(2)),
                combiner=str(rng.choice(COMBINERS)),
                special=str(rng.choice(["", "nan", "outside"])),
            )
    for combiner in COMBINERS:
        yield Case(8, (3, 0, 500, 1), weighted=True, combiner=combiner)
        yield Case(8, (2, 1), False, True, combiner, special="zero weights")
        yield Case(5, (1,) * 40, combiner=combiner, single=True)
        yield Case(16, (1,) * 9, True, True, combiner, True, special="outside")
    yield Case(16, (), single=True)
    yield Case(16, (0, 0))
    yield Case(16, (4,) * 40, table_rows=1)  # one row for all
    yield Case(8, (1, 2), shift=1)
    yield Case(16, (1, 2), bfloat16=True, shift=3)
    yield Case(4, tuple(int(n) for n in rng.integers(0, 3, 700)))


def check(device: gpu.Device, case: Case, rng: np.random.Generator) -> None:
    """Runs one lookup.

    Raises:
        WrongResult: it is not the reference's.
    """
    splits = numbers.row_splits(np.asarray(case.counts, np.int64))
    entries = int(splits[-1])
    rows = rng.integers(0, case.table_rows, entries)
    table = numbers.floats(rng, case.table_rows * case.width + case.shift)
    weights = numbers.floats(rng, entries) if case.weighted else None
    if case.special == "nan":
        table[case.shift :: 7] = np.nan
    if case.special == "zero weights":
        assert weights is not None
        weights[:] = 0
    if case.special == "outside" and entries:
        rows[rng.integers(0, entries, 2)] = [case.table_rows, -1]
    stored = numbers.to_bfloat16(table) if case.bfloat16 else table
    if case.bfloat16:
        table = numbers.from_bfloat16(stored)
    matrix = table[case.shift :].reshape(case.table_rows, case.width)
    got, bad = run(device, case, stored, splits, rows, weights)
    outside = (rows < 0) | (rows >= case.table_rows)
    first = np.uint64(np.argmax(outside)) if outside.any() else NO_ENTRY
    numbers.expect_equal(f"{case}: bad_entry", bad, np.array([first]))
    expected, scale = reference(case, matrix, splits, rows, weights, outside)
    numbers.expect_close(f"{case}", got, expected, scale)
    if case.combiner == "sum" and not outside.any():
        functor = on_cpu(device, case, stored, splits, rows, weights)
        numbers.expect_close(f"{case}, as the CPU", got, functor, scale)


def reference(
    case: Case,
    matrix: np.ndarray,
    splits: np.ndarray,
    rows: np.ndarray,
    weights: np.ndarray | None,
    outside: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Sums in float64; returns them and how large the summands were."""
    shape = (len(splits) - 1, case.width)
    expected, scale = np.zeros(shape), np.zeros(shape)
    for s in range(len(expected)):
        total = 0.0
        for i in range(splits[s], splits[s + 1]):
            if outside[i]:
                continue
            weight = 1.0 if weights is None else float(weights[i])
            row = matrix[rows[i]].astype(np.float64)
            expected[s] += weight * row
            scale[s] += np.nan_to_num(np.abs(weight * row))
            total += weight**2 if case.combiner == "sqrtn" else weight
        if case.combiner != "sum":
            total = np.sqrt(total) if case.combiner == "sqrtn" else total
            expected[s] = expected[s] / total if total else 0
            # A sum of weights near 0 has lost digits of its own.
            many = 1 + abs(splits[s + 1] - splits[s]) / max(abs(total), 1e-6)
            scale[s] = (scale[s] / total if total else 0) * many
    return expected, np.abs(scale)


def arguments(case: Case, pointers: list[int | None]) -> gpu.Lookup:
    table, splits, rows, weights, out, bad = pointers
    size = 2 if case.bfloat16 else 4
    return gpu.Lookup(
        (table or 0) + size * case.shift,
        case.bfloat16,
        case.table_rows,
        case.width,
        None if case.single else splits,
        rows,
        weights,
        COMBINERS.index(case.combiner),
        out,
        bad,
    )


def run(
    device: gpu.Device,
    case: Case,
    table: np.ndarray,
    splits: np.ndarray,
    rows: np.ndarray,
    weights: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    out = device.poisoned((len(case.counts), case.width), np.float32)
    bad = device.put(np.array([NO_ENTRY]))
    inputs = [table, splits, rows, weights]
    put = [None if each is None else device.put(each) for each in inputs]
    pointers = [numbers.pointer(each) for each in (*put, out, bad)]
    args = arguments(case, pointers)
    device.call("Lookup", args, gpu.INT64(len(case.counts)))
    device.synchronize()
    return out.get(), bad.get()


def on_cpu(
    device: gpu.Device,
    case: Case,
    table: np.ndarray,
    splits: np.ndarray,
    rows: np.ndarray,
    weights: np.ndarray | None,
) -> np.ndarray:
    out = np.zeros((len(case.counts), case.width), np.float32)
    arrays = [table, splits, rows, weights, out]
    pointers = [numbers.address(each).value for each in arrays]
    case = dataclasses.replace(case, single=False)
    args = arguments(case, [*pointers, None])
    device.library.LookupOnCpu(
        gpu.ctypes.byref(args), gpu.INT64(len(case.counts))
    )
    return out
