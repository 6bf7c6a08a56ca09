# SPDX-License-Identifier: Apache-2.0
"""A lookup in a table of more than 2^31 elements: offsets of 64 bits."""

from __future__ import annotations

import numpy as np

from benchmarks.gpu import check_lookup
from benchmarks.gpu import device as gpu
from benchmarks.gpu.numbers import WrongResult
from benchmarks.gpu.numbers import expect_equal

WIDTH = 128
ROWS = 2**31 // WIDTH + 1000
ROWS_WRITTEN = 18  # at most, as many as are looked up
__all__ = ["WrongResult", "check"]


def check(device: gpu.Device, seed: int) -> str:
    """Writes a few rows of such a table and looks them up.

    Returns:
        What was done, or why it was not.

    Raises:
        WrongResult: other rows came.
        DeviceError: an error of CUDA, other than too little memory.
    """
    pointer = gpu.POINTER()
    size = ROWS * WIDTH * 4
    try:
        device.call("Allocate", gpu.INT64(size), pointer)
    except gpu.DeviceError:
        return f"not checked, the device has no {size >> 30} GiB of memory"
    try:
        rng = np.random.default_rng(seed)
        rows = np.concatenate([ROWS - 1 - np.arange(9), rng.integers(0, 9, 9)])
        values = rng.standard_normal((ROWS_WRITTEN, WIDTH)).astype(np.float32)
        place = {int(row): i for i, row in enumerate(np.unique(rows))}
        for row, i in place.items():
            device.call(
                "Copy",
                gpu.POINTER((pointer.value or 0) + row * WIDTH * 4),
                gpu.POINTER(values[i].ctypes.data),
                gpu.INT64(WIDTH * 4),
            )
        got = look_up(device, pointer.value, rows)
        expected = values[[place[int(row)] for row in rows]]
        expect_equal("rows beyond 2^31 elements", got, expected)
    finally:
        device.release()
        device.call("Free", pointer)
    return f"{len(rows)} rows of {ROWS} x {WIDTH} are right"


def look_up(
    device: gpu.Device, table: int | None, rows: np.ndarray
) -> np.ndarray:
    out = device.poisoned((len(rows), WIDTH), np.float32)
    block = gpu.LookupBlock(table, False, ROWS, WIDTH, 0, out.pointer)
    splits = np.arange(len(rows) + 1)
    args = check_lookup.arguments(device, [block], len(rows), rows, splits)
    device.call("Lookup", args)
    device.synchronize()
    return out.get()
