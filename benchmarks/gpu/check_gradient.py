# SPDX-License-Identifier: Apache-2.0
"""The gradient of the lookup against float64 and the CPU's functor."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator
from collections.abc import Sequence

import numpy as np

from benchmarks.gpu import device as gpu
from benchmarks.gpu import numbers


@dataclasses.dataclass(frozen=True)
class Case:
    """One gradient; `counts` are the entries of every sample."""

    widths: tuple[int, ...]  # of the tables, which share the samples
    counts: tuple[int, ...]
    table_rows: int = 53
    weighted: bool = False
    special: str = ""  # "nan", "outside" or none


def cases(rng: np.random.Generator) -> Iterator[Case]:
    """Rows that all differ, that repeat, and one that has all entries."""
    widths = [(1,), (3,), (4,), (32,), (36,), (130,), (132,)]
    for several in [*widths, (4, 8, 36), (3, 8, 1, 16, 2)]:
        counts = tuple(int(n) for n in rng.integers(0, 6, 60))
        yield Case(
            several,
            counts,
            table_rows=int(rng.choice([2, 53, 2**40])),
            weighted=bool(rng.integers(2)),
            special=str(rng.choice(["", "nan", "outside"])),
        )
    yield Case((8,), (700, 0, 1), table_rows=1)  # one row, many chunks
    yield Case((8, 4, 5), (300,) * 6, table_rows=1)  # of every table
    yield Case((8,), (2,) * 500, table_rows=3, weighted=True)
    yield Case((70,), (100, 100), table_rows=1)  # more columns than a group
    yield Case((4,), (1,) * 300)
    yield Case((4,), (1,) * 128, table_rows=2)  # whole chunks
    yield Case((4,), (64, 64, 64), table_rows=1, special="outside")
    yield Case((4,), (1,), table_rows=1, special="outside")  # none is left
    yield Case((8,), ())
    yield Case((8, 4), (0, 0))


@dataclasses.dataclass(frozen=True)
class Table:
    """How many rows and columns, and samples that look it up, behind those
    of the table before."""

    rows: int
    width: int
    samples: int


@dataclasses.dataclass(frozen=True)
class Batch:
    """What a gradient is computed of, on the host."""

    grad: np.ndarray  # of all samples, behind each other
    splits: np.ndarray
    rows: np.ndarray
    weights: np.ndarray | None
    tables: Sequence[Table]

    def sizes(self) -> np.ndarray:
        """Numbers of every table's samples."""
        return np.array([t.samples * t.width for t in self.tables])


def draw(case: Case, rng: np.random.Generator) -> Batch:
    parts = np.array_split(np.arange(len(case.counts)), len(case.widths))
    tables = [
        Table(case.table_rows, width, len(part))
        for width, part in zip(case.widths, parts, strict=True)
    ]
    splits = numbers.row_splits(np.asarray(case.counts, np.int64))
    rows = rng.integers(0, case.table_rows, splits[-1])
    grad = numbers.floats(rng, sum(t.samples * t.width for t in tables))
    weights = numbers.floats(rng, len(rows)) if case.weighted else None
    if case.special == "nan":
        grad[::7] = np.nan
    if case.special == "outside":
        rows[-1:] = case.table_rows
        rows[rng.integers(0, len(rows))] = -1
    return Batch(grad, splits, rows, weights, tables)


def check(device: gpu.Device, case: Case, rng: np.random.Generator) -> None:
    """Runs one gradient twice: its bits are the same.

    Raises:
        WrongResult: it is not the reference's.
    """
    batch = draw(case, rng)
    got, again = run(device, batch), run(device, batch)
    firsts = numbers.row_splits(np.array([t.samples for t in batch.tables]))
    begins = numbers.row_splits(batch.sizes())
    for t, table in enumerate(batch.tables):
        entries = slice(batch.splits[firsts[t]], batch.splits[firsts[t + 1]])
        samples = np.repeat(
            np.arange(table.samples),
            np.diff(batch.splits[firsts[t] : firsts[t + 1] + 1]),
        )
        compare(
            f"{case}, table {t}",
            device,
            got[t],
            table,
            batch.grad[begins[t] : begins[t + 1]],
            samples,
            batch.rows[entries],
            None if batch.weights is None else batch.weights[entries],
        )
        for ours, same in zip(got[t], again[t], strict=True):
            numbers.expect_equal(
                f"{case}: bits", same.view(np.uint8), ours.view(np.uint8)
            )


def compare(
    what: str,
    device: gpu.Device,
    got: tuple[np.ndarray, np.ndarray],
    table: Table,
    grad: np.ndarray,
    samples: np.ndarray,
    rows: np.ndarray,
    weights: np.ndarray | None,
) -> None:
    """Compares one table's unique rows and sums with both references."""
    inside = (rows >= 0) & (rows < table.rows)
    unique, which = np.unique(rows[inside], return_inverse=True)
    numbers.expect_equal(f"{what}: rows", got[0], unique)
    samples = samples[inside]
    weights = None if weights is None else weights[inside]
    added = grad.reshape(-1, table.width)[samples].astype(np.float64)
    if weights is not None:
        added *= weights[:, np.newaxis]
    expected = np.zeros((len(unique), table.width))
    scale = np.zeros_like(expected)
    np.add.at(expected, which, added)
    np.add.at(scale, which, np.nan_to_num(np.abs(added)))
    numbers.expect_close(f"{what}: sums", got[1], expected, scale)
    functor = on_cpu(device, table, grad, samples, which, len(unique), weights)
    numbers.expect_close(f"{what}, as the CPU", got[1], functor, scale)


def on_cpu(
    device: gpu.Device,
    table: Table,
    grad: np.ndarray,
    samples: np.ndarray,
    which: np.ndarray,
    unique: int,
    weights: np.ndarray | None,
) -> np.ndarray:
    order = np.argsort(which, kind="stable")
    begins = np.diff(which[order], prepend=-1) != 0
    entries = samples[order].astype(np.uint64) * np.uint64(table.width)
    entries = entries * np.uint64(2) + begins.astype(np.uint64)
    splits = numbers.row_splits(np.bincount(which, minlength=unique))
    weights = None if weights is None else weights[order]
    out = np.zeros((unique, table.width), np.float32)
    device.library.RowGradsOnCpu(
        numbers.address(grad),
        gpu.INT64(table.width),
        gpu.INT64(unique),
        numbers.address(splits),
        numbers.address(entries),
        numbers.address(weights),
        numbers.address(out),
    )
    return out


def run(
    device: gpu.Device, batch: Batch
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the unique rows of every table and their gradients."""
    on_device = OnDevice(device, batch)
    on_device.sort()
    device.synchronize()
    first = on_device.first_unique.get()
    rows = on_device.unique_rows.get()
    on_device.give_room(np.diff(first))
    on_device.sum()
    device.synchronize()
    return [
        (rows[first[t] : first[t + 1]], sums.get())
        for t, sums in enumerate(on_device.row_grads)
    ]


class OnDevice:
    """A batch in the device's memory, and the two calls."""

    def __init__(self, device: gpu.Device, batch: Batch) -> None:
        self._device, self._tables = device, batch.tables
        entries, count = len(batch.rows), len(batch.tables)
        inputs = [batch.grad, batch.splits, batch.rows, batch.weights]
        put = [None if each is None else device.put(each) for each in inputs]
        grad, splits, rows, weights = map(numbers.pointer, put)
        self.unique_rows = device.poisoned((entries,), np.int64)
        self.first_unique = device.poisoned((count + 1,), np.int64)
        self.row_grads: list[gpu.Array] = []
        samples = numbers.row_splits(
            np.array([t.samples for t in self._tables])
        )
        values = numbers.row_splits(batch.sizes())
        blocks = [
            gpu.GradBlock(t, int(samples[t]), int(values[t]))
            for t, table in enumerate(self._tables)
            if table.samples
        ]
        self._args = gpu.RowGrads(
            grad,
            device.put_structures(blocks).pointer,
            len(blocks),
            None,
            count,
            sum(t.rows for t in self._tables),
            max(t.width for t in self._tables),
            all(t.width % 4 == 0 for t in self._tables),
            int(samples[-1]),
            splits,
            rows,
            weights,
            entries,
            self.unique_rows.pointer,
            self.first_unique.pointer,
        )
        needed = device.library.RowGradsScratch(ctypes.byref(self._args))
        scratch = device.poisoned((needed,), np.uint8)
        self._scratch = gpu.POINTER(scratch.pointer)
        self._put_tables([None] * count)

    def give_room(self, unique: Sequence[int] | np.ndarray) -> None:
        """Makes place for so many rows of every table."""
        self.row_grads = [
            self._device.poisoned((int(n), table.width), np.float32)
            for n, table in zip(unique, self._tables, strict=True)
        ]
        self._put_tables([each.pointer for each in self.row_grads])

    def _put_tables(self, row_grads: Sequence[int | None]) -> None:
        keys = numbers.row_splits(np.array([t.rows for t in self._tables]))
        tables = [
            gpu.GradTable(int(keys[t]), table.rows, table.width, row_grads[t])
            for t, table in enumerate(self._tables)
        ]
        self._args.tables = self._device.put_structures(tables).pointer

    def sort(self) -> None:
        self._device.call("SortRows", self._args, self._scratch)

    def sum(self) -> None:
        self._device.call("SumRowGrads", self._args, self._scratch)
