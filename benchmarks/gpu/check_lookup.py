# SPDX-License-Identifier: Apache-2.0
"""The pooled lookup against float64 and the CPU's functor."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from benchmarks.gpu import device as gpu
from benchmarks.gpu import numbers

COMBINERS = ("sum", "mean", "sqrtn")


@dataclasses.dataclass(frozen=True)
class Case:
    """One lookup; `counts` are the entries of every segment."""

    width: int  # of the first table; a block more, a column more
    counts: tuple[int, ...]
    bfloat16: bool = False  # of every other table
    weighted: bool = False
    combiner: str = "sum"
    table_rows: int = 53
    special: str = ""  # "nan", "outside", "zero weights" or none
    shift: int = 0  # numbers before the table's first: no loads of 16 bytes
    blocks: int = 1  # tables that are looked up in one launch


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
        yield Case(5, (1,) * 40, combiner=combiner)
        yield Case(16, (1,) * 9, True, True, combiner, special="outside")
    yield Case(16, ())
    yield Case(16, (0, 0))
    yield Case(16, (4,) * 40, table_rows=1)  # one row for all
    yield Case(8, (1, 2), shift=1)
    yield Case(16, (1, 2), bfloat16=True, shift=3)
    yield Case(4, tuple(int(n) for n in rng.integers(0, 3, 700)))
    yield Case(15, (2, 0, 1, 4, 4, 3, 1), blocks=3, weighted=True)
    yield Case(6, (3, 1) * 20, True, blocks=7, special="outside")
    yield Case(3, (1,) * 50, blocks=2)


@dataclasses.dataclass
class Table:
    """One block's table on the host, and its segments."""

    stored: np.ndarray
    matrix: np.ndarray  # as floats
    bfloat16: bool
    shift: int
    segments: np.ndarray

    @property
    def width(self) -> int:
        return self.matrix.shape[1]

    def block(self, table: int | None, out: int | None) -> gpu.LookupBlock:
        return gpu.LookupBlock(
            (table or 0) + self.stored.itemsize * self.shift,
            self.bfloat16,
            *self.matrix.shape,
            int(self.segments[0]) if self.segments.size else 0,
            out,
        )


def draw(case: Case, rng: np.random.Generator) -> list[Table]:
    parts = np.array_split(np.arange(len(case.counts)), case.blocks)
    tables = []
    for k, segments in enumerate(parts):
        shape = (case.table_rows, case.width + k)
        values = numbers.floats(rng, shape[0] * shape[1] + case.shift)
        if case.special == "nan":
            values[case.shift :: 7] = np.nan
        bfloat16 = case.bfloat16 != bool(k % 2)
        stored = numbers.to_bfloat16(values) if bfloat16 else values
        if bfloat16:
            values = numbers.from_bfloat16(stored)
        matrix = values[case.shift :].reshape(shape)
        tables.append(Table(stored, matrix, bfloat16, case.shift, segments))
    return tables


def check(device: gpu.Device, case: Case, rng: np.random.Generator) -> None:
    """Runs one lookup.

    Raises:
        WrongResult: it is not the reference's.
    """
    splits = numbers.row_splits(np.asarray(case.counts, np.int64))
    entries = int(splits[-1])
    rows = rng.integers(0, case.table_rows, entries)
    tables = draw(case, rng)
    weights = numbers.floats(rng, entries) if case.weighted else None
    if case.special == "zero weights":
        assert weights is not None
        weights[:] = 0
    if case.special == "outside" and entries:
        rows[rng.integers(0, entries, 2)] = [case.table_rows, -1]
    got = run(device, case, tables, splits, rows, weights)
    outside = (rows < 0) | (rows >= case.table_rows)
    for table in tables:
        size = len(table.segments) * table.width
        mine, got = got[:size].reshape(-1, table.width), got[size:]
        own = splits[table.segments[0] :] if size else splits
        own = own[: len(table.segments) + 1]
        given = case, table.matrix, own, rows, weights
        expected, scale = reference(*given, outside)
        numbers.expect_close(f"{case}", mine, expected, scale)
        if case.combiner == "sum" and not outside.any():
            functor = on_cpu(device, table, own, rows, weights)
            numbers.expect_close(f"{case}, as the CPU", mine, functor, scale)


def reference(
    case: Case,
    matrix: np.ndarray,
    splits: np.ndarray,
    rows: np.ndarray,
    weights: np.ndarray | None,
    outside: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Sums in float64; returns them and how large the summands were."""
    shape = (len(splits) - 1, matrix.shape[1])
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


def arguments(
    device: gpu.Device,
    blocks: list[gpu.LookupBlock],
    segments: int,
    rows: np.ndarray,
    splits: np.ndarray,
    weights: np.ndarray | None = None,
    combiner: str = "sum",
) -> gpu.Lookup:
    """Puts what is looked up, and the blocks, into the device's memory."""
    put = [
        None if each is None else device.put(each)
        for each in (splits, rows, weights)
    ]
    return gpu.Lookup(
        device.put_structures(blocks).pointer,
        len(blocks),
        max(block.width for block in blocks),
        segments,
        *map(numbers.pointer, put),
        COMBINERS.index(combiner),
    )


def run(
    device: gpu.Device,
    case: Case,
    tables: list[Table],
    splits: np.ndarray,
    rows: np.ndarray,
    weights: np.ndarray | None,
) -> np.ndarray:
    """Returns the results of all tables behind each other."""
    sizes = [len(table.segments) * table.width for table in tables]
    out = device.poisoned((sum(sizes),), np.float32)
    blocks = [
        table.block(
            device.put(table.stored).pointer,
            (out.pointer or 0) + 4 * int(before),
        )
        for table, before in zip(
            tables, numbers.row_splits(np.array(sizes)), strict=False
        )
    ]
    args = arguments(
        device,
        blocks,
        len(case.counts),
        rows,
        splits,
        weights,
        case.combiner,
    )
    device.call("Lookup", args)
    device.synchronize()
    return out.get()


def on_cpu(
    device: gpu.Device,
    table: Table,
    splits: np.ndarray,
    rows: np.ndarray,
    weights: np.ndarray | None,
) -> np.ndarray:
    out = np.zeros((len(splits) - 1, table.width), np.float32)
    block = table.block(table.stored.ctypes.data, out.ctypes.data)
    pointers = (numbers.address(each).value for each in (splits, rows, weights))
    args = gpu.Lookup(
        gpu.ctypes.addressof(block), 1, table.width, len(out), *pointers
    )
    device.library.LookupOnCpu(gpu.ctypes.byref(args))
    return out
