# SPDX-License-Identifier: Apache-2.0
"""The row updates against the CPU's functors and against float64."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator

import numpy as np

from benchmarks.gpu import device as gpu
from benchmarks.gpu import numbers
from benchmarks.gpu import rules
from benchmarks.gpu.rules import RULES
from benchmarks.gpu.rules import reference

NO_ROW = np.uint64(2**64 - 1)
LONGEST = ctypes.c_float(rules.LONGEST)
SEED = 0x1234567890ABCDEF


@dataclasses.dataclass(frozen=True)
class Case:
    """One update of `size` rows; "all" updates the others as well."""

    rule: str
    dim: int
    size: int
    bfloat16: bool = False
    stochastic: bool = False
    all_rows: bool = False
    means: bool = False  # mean squares given, or those of rows to clip
    special: str = ""  # "nan", "outside" or none
    table_rows: int = 61


def cases(rng: np.random.Generator) -> Iterator[Case]:
    """All rules for both dtypes, with and without loads of 16 bytes."""
    dims = (1, 3, 4, 12, 32, 58, 128, 132)
    for rule in RULES:
        for bfloat16 in (False, True):
            for width in ("any", "of quads"):
                choice = [d for d in dims if width == "any" or d % 4 == 0]
                yield Case(
                    rule,
                    int(rng.choice(choice)),
                    int(rng.choice([1, 7, 40])),
                    bfloat16,
                    stochastic=bool(rng.integers(2)),
                    special=str(rng.choice(["", "nan", "outside"])),
                )
    for rule in ("adam", "amsgrad"):
        for dim in (5, 8):
            yield Case(rule, dim, 20, bfloat16=dim == 8, all_rows=True)
            yield Case(rule, dim, 0, bfloat16=dim == 5, all_rows=True)
    yield Case("row-wise adagrad", 32, 40)
    yield Case("row-wise adagrad", 3, 40, means=True)
    for dim in (1, 32, 58, 132):
        for bfloat16 in (False, True):
            yield Case(
                "clip",
                dim,
                40,
                bfloat16,
                stochastic=dim == 58,
                means=dim == 32,
                special=str(rng.choice(["", "nan", "outside"])),
            )
    yield Case("scale", 8, 0)
    yield Case("scale", 5, 0, bfloat16=True, stochastic=True)
    yield Case("sgd", 8, 0)


@dataclasses.dataclass
class State:
    """A table, its slots and a batch, on the host."""

    table: np.ndarray
    slots: list[np.ndarray]
    rows: np.ndarray
    grads: np.ndarray
    means: np.ndarray | None

    def copy(self) -> State:
        slots = [slot.copy() for slot in self.slots]
        return dataclasses.replace(self, table=self.table.copy(), slots=slots)


def draw(case: Case, rng: np.random.Generator) -> State:
    shape = (case.table_rows, case.dim)
    table = numbers.floats(rng, *shape)
    row_wise = case.rule == "row-wise adagrad"
    slot_shape = shape[:1] if row_wise else shape
    slots = [np.abs(numbers.floats(rng, *slot_shape)) + 0.1 for _ in range(3)]
    rows = np.sort(rng.permutation(case.table_rows)[: case.size])
    grads = numbers.floats(rng, case.size, case.dim)
    if case.special == "nan":
        grads[0] = np.nan
    if case.special == "nan" and case.rule == "clip":
        table[rows[0]] = np.nan
    means = np.abs(numbers.floats(rng, case.size)) if case.means else None
    stored = numbers.to_bfloat16(table) if case.bfloat16 else table
    return State(stored, slots, rows, grads, means)


def check(device: gpu.Device, case: Case, rng: np.random.Generator) -> None:
    """Runs one update.

    Raises:
        WrongResult: it is not that of the CPU's functor, or far from float64.
    """
    before = draw(case, rng)
    given, means = before.rows.copy(), before.means
    if case.special == "outside":
        given[-1] = case.table_rows
        given[0] = -1
        inside = (given >= 0) & (given < case.table_rows)
        before = dataclasses.replace(
            before,
            rows=before.rows[inside],
            grads=before.grads[inside],
            means=None if means is None else means[inside],
        )
    after = before.copy()
    apply_on_cpu(device, case, after)
    grads = np.zeros((len(given), case.dim), np.float32)
    grads[np.isin(given, before.rows)] = before.grads
    got, bad = apply(
        device,
        case,
        dataclasses.replace(
            before.copy(), rows=given, grads=grads, means=means
        ),
    )
    first = np.uint64(0) if case.special == "outside" else NO_ROW
    numbers.expect_equal(f"{case}: bad_row", bad, np.array([first]))
    compare(f"{case}, as the CPU", case, got, after.table, after.slots)
    wide = widened(case, before)
    table, slots = reference(case.rule, wide, before, case.all_rows)
    relative = 1e-4
    if case.bfloat16:  # rounded to either neighbour
        relative = 2.0**-7 if case.stochastic else 2.0**-8
    numbers.expect_close(
        f"{case}: table", widened(case, got), table, 0.02, relative
    )
    for got_slot, slot in zip(got.slots, slots, strict=True):
        numbers.expect_close(f"{case}: slot", got_slot, slot, 0.1, 1e-4)


def widened(case: Case, state: State) -> np.ndarray:
    return numbers.from_bfloat16(state.table) if case.bfloat16 else state.table


def compare(
    what: str,
    case: Case,
    got: State,
    table: np.ndarray,
    slots: list[np.ndarray],
) -> None:
    if case.bfloat16:
        near = np.abs(got.table.astype(int) - table.astype(int)) <= 1
        nan = np.isnan(numbers.from_bfloat16(table))
        if not (near | nan).all() or (~near & ~nan).mean() > 0.01:
            raise numbers.WrongResult(f"{what}: bfloat16 more than one step")
        numbers.expect_equal(
            what, np.isnan(numbers.from_bfloat16(got.table)), nan
        )
    else:
        numbers.expect_close(f"{what}: table", got.table, table, 0.1)
    for got_slot, slot in zip(got.slots, slots, strict=True):
        numbers.expect_close(f"{what}: slot", got_slot, slot, 0.1)


def arguments(case: Case, pointers: list[int | None], size: int) -> gpu.Rows:
    rows, grads, table, *slots, bad = pointers
    return gpu.Rows(
        rows,
        grads,
        size,
        case.dim,
        None if case.bfloat16 else table,
        (gpu.POINTER * 3)(*slots),
        table if case.bfloat16 else None,
        case.stochastic,
        SEED,
        case.table_rows,
        bad,
    )


def numbers_of(rule: str) -> ctypes.Array[ctypes.c_float]:
    values = RULES[rule].numbers if rule in RULES else ()
    return (ctypes.c_float * 5)(*values)


def apply(
    device: gpu.Device, case: Case, state: State
) -> tuple[State, np.ndarray]:
    table, grads = device.put(state.table), device.put(state.grads)
    rows, slots = device.put(state.rows), [device.put(s) for s in state.slots]
    bad = device.put(np.array([NO_ROW]))
    arrays = [rows, grads, table, *slots, bad]
    args = arguments(case, [each.pointer for each in arrays], len(state.rows))
    means = None if state.means is None else device.put(state.means)
    given = gpu.POINTER(numbers.pointer(means))
    values = numbers_of(case.rule)
    if case.rule == "scale":
        device.call("ScaleAllRows", args, ctypes.c_float(0.7))
    elif case.rule == "clip":
        device.call("ClipLongRows", args, LONGEST, given)
    elif case.all_rows:
        device.call("ApplyAllRows", args, values)
    else:
        device.call("ApplyRows", args, RULES[case.rule].code, values, given)
    device.synchronize()
    after = State(
        table.get(),
        [slot.get() for slot in slots],
        state.rows,
        state.grads,
        state.means,
    )
    return after, bad.get()


def apply_on_cpu(device: gpu.Device, case: Case, state: State) -> None:
    arrays = [state.rows, state.grads, state.table, *state.slots]
    pointers = [numbers.address(each).value for each in arrays]
    args = ctypes.byref(arguments(case, [*pointers, None], len(state.rows)))
    values = numbers_of(case.rule)
    given = numbers.address(state.means)
    if case.rule == "scale":
        device.library.ScaleAllRowsOnCpu(args, ctypes.c_float(0.7))
    elif case.rule == "clip":
        device.library.ClipLongRowsOnCpu(args, LONGEST, given)
    elif case.all_rows:
        device.library.ApplyAllRowsOnCpu(args, values)
    else:
        code = RULES[case.rule].code
        device.library.ApplyRowsOnCpu(args, code, values, given)
