# SPDX-License-Identifier: Apache-2.0
"""Initial rows, and numbers of 16 bits, against the CPU's functors."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator

import numpy as np

from benchmarks.gpu import device as gpu
from benchmarks.gpu import numbers

DISTRIBUTIONS = ("constant", "uniform", "normal", "truncated_normal")
TYPES = ("float16", "bfloat16")
SPECIAL = np.array(
    [0, -0.0, np.nan, np.inf, -np.inf, 65504, 65520, 1e-8, 6e-8, 3e38, -1e-41],
    np.float32,
)


@dataclasses.dataclass(frozen=True)
class Rows:
    """A cell of a table's initial rows."""

    distribution: str
    rows: int
    parts: int
    part: int
    first_column: int
    dim: int


@dataclasses.dataclass(frozen=True)
class Wire:
    """A conversion of so many numbers, from a place that is aligned or not."""

    conversion: str  # "widen", "narrow" or "narrow at random"
    type: str
    count: int
    shift: int = 0


def cases(rng: np.random.Generator) -> Iterator[Rows | Wire]:
    for distribution in DISTRIBUTIONS:
        yield Rows(distribution, 29, 1, 0, 0, int(rng.integers(1, 20)))
        yield Rows(distribution, 29, 3, 2, int(rng.integers(0, 9)), 6)
    yield Rows("normal", 5, 7, 6, 3, 1)  # padding alone, or one row
    for type_ in TYPES:
        for conversion in ("widen", "narrow", "narrow at random"):
            yield Wire(conversion, type_, 1021)
            yield Wire(conversion, type_, 64, shift=1)
            yield Wire(conversion, type_, 0)


def check(
    device: gpu.Device, case: Rows | Wire, rng: np.random.Generator
) -> None:
    """Runs one case.

    Raises:
        WrongResult: it is not the CPU's result.
    """
    if isinstance(case, Rows):
        check_rows(device, case, int(rng.integers(2**63)))
    else:
        check_wire(device, case, rng)


def check_rows(device: gpu.Device, case: Rows, seed: int) -> None:
    local = -(-case.rows // case.parts)
    block = gpu.Block(
        case.rows, case.part, case.parts, local, case.first_column, case.dim
    )
    values = gpu.Values(DISTRIBUTIONS.index(case.distribution), -0.5, 1.5)
    out = device.poisoned((local, case.dim), np.float32)
    key = ctypes.c_uint64(seed)
    device.call("InitRows", block, values, key, gpu.POINTER(out.pointer))
    device.synchronize()
    ids, expected = expected_rows(device, case, values, key)
    numbers.expect_close(f"{case}", out.get(), expected, 1.0, 1e-6)
    chosen = np.flatnonzero(ids < case.rows)[::2]
    rows = device.put(np.stack([ids[chosen], chosen], 1).astype(np.int64))
    before = np.full(expected.shape, 7, np.float32)
    after = before.copy()
    after[chosen] = expected[chosen]
    for bfloat16 in (False, True):
        table = device.put(numbers.to_bfloat16(before) if bfloat16 else before)
        where = [gpu.POINTER(None), gpu.POINTER(table.pointer)]
        count = gpu.INT64(len(chosen))
        where = where if bfloat16 else where[::-1]
        there = gpu.POINTER(rows.pointer)
        device.call("ResetRows", block, values, key, there, count, *where)
        device.synchronize()
        got = table.get()
        got = numbers.from_bfloat16(got) if bfloat16 else got
        # Rounded to nearest: half of the last of 8 bits.
        room = 2.0**-8 if bfloat16 else 1e-6
        numbers.expect_close(f"{case}, reset", got, after, 1.0, room)


def expected_rows(
    device: gpu.Device, case: Rows, values: gpu.Values, key: ctypes.c_uint64
) -> tuple[np.ndarray, np.ndarray]:
    """Ids of the cell's rows, and their values by the CPU's functions."""
    local = -(-case.rows // case.parts)
    ids = np.zeros(local, np.int64)
    expected = np.zeros((local, case.dim), np.float32)
    for row in range(local):
        id_ = device.library.IdOfRow(
            gpu.INT64(case.parts), gpu.INT64(case.part), gpu.INT64(row)
        )
        ids[row] = id_
        for j in range(case.dim) if id_ < case.rows else ():
            expected[row, j] = device.library.InitialValue(
                ctypes.byref(values),
                key,
                gpu.INT64(id_),
                gpu.INT64(case.first_column + j),
            )
    return ids, expected


def check_wire(
    device: gpu.Device, case: Wire, rng: np.random.Generator
) -> None:
    size = case.count + case.shift
    exponents = rng.integers(-9, 5, size)
    wide = (numbers.floats(rng, size) * 10.0**exponents).astype(np.float32)
    if case.count > len(SPECIAL):
        wide[-len(SPECIAL) :] = SPECIAL
    every = rng.integers(0, 2**16, len(wide)).astype(np.uint16)
    source = every if case.conversion == "widen" else wide
    to = np.float32 if case.conversion == "widen" else np.uint16
    out = device.poisoned((case.count,), to)
    expected = np.zeros(case.count, to)
    name = {"widen": "Widen", "narrow": "Narrow"}.get(
        case.conversion, "NarrowAtRandom"
    )
    code, offset = TYPES.index(case.type), case.shift * source.itemsize
    seed = [ctypes.c_uint64(99)] if name == "NarrowAtRandom" else []
    count = gpu.INT64(case.count)
    given = device.put(source).pointer or 0
    device.call(
        name,
        code,
        gpu.POINTER(given + offset),
        *seed,
        count,
        gpu.POINTER(out.pointer),
    )
    getattr(device.library, f"{name}OnCpu")(
        code,
        gpu.POINTER(source.ctypes.data + offset),
        *seed,
        count,
        numbers.address(expected),
    )
    device.synchronize()
    bits = np.uint32 if to is np.float32 else np.uint16
    numbers.expect_equal(f"{case}", out.get().view(bits), expected.view(bits))
