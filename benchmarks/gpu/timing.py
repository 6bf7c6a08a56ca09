# SPDX-License-Identifier: Apache-2.0
"""How fast the kernels are, against a copy on the same device and run."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable
from collections.abc import Iterator

import numpy as np

from benchmarks.gpu import check_decoding
from benchmarks.gpu import check_gradient
from benchmarks.gpu import check_lookup
from benchmarks.gpu import check_updates
from benchmarks.gpu import device as gpu

SAMPLES = 16384
HOTNESS = 16
TABLE_ROWS = 1_000_000
WIDTHS = (32, 64, 128, 256)
COPIED_BYTES = 1 << 30
REPEATS = 20
LOOKUP_GOAL, UPDATE_GOAL = 0.85, 0.60


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table: bytes that a kernel must move, and its times."""

    kernel: str
    width: int
    megabytes: float
    minimum_ms: float
    median_ms: float
    maximum_ms: float
    gigabytes_per_second: float
    of_copy: float  # bandwidth, as a part of the copy's
    goal: float  # of that; 0 for none

    @property
    def missed(self) -> bool:
        return self.of_copy < self.goal


def measure(device: gpu.Device) -> Iterator[Row]:
    """Times the copy, then every kernel; memory is freed after each."""
    copied = timed(device, copy(device))
    device.release()
    # A copy reads and writes.
    bandwidth = 2 * COPIED_BYTES / np.median(copied) / 1e6
    yield row("copy", 0, 2 * COPIED_BYTES, copied, bandwidth, 0.0)
    run, size = decoding(device)
    yield row("decoding", 0, size, timed(device, run), bandwidth, 0.0)
    device.release()
    for width in WIDTHS:
        for name, prepare, goal in (
            ("lookup", lookup, LOOKUP_GOAL),
            ("gradient", gradient, UPDATE_GOAL),
            ("adagrad", update, UPDATE_GOAL),
        ):
            run, size = prepare(device, width)
            yield row(name, width, size, timed(device, run), bandwidth, goal)
            device.release()


def bytes_moved(width: int) -> dict[str, int]:
    """What must be read and written of a batch, if nothing is read twice."""
    entries = SAMPLES * HOTNESS
    unique = len(np.unique(random_rows(entries)))
    gradient = (entries + unique) * width * 4 + entries * 8
    # Weights and slot are read and written, the gradient read.
    adagrad = unique * (5 * width * 4 + 8)
    return {
        "lookup": (entries + SAMPLES) * (width * 4 + 8),
        "gradient": gradient,
        "adagrad": adagrad,
        "update": gradient + adagrad,
    }


def row(
    name: str,
    width: int,
    size: int,
    times: np.ndarray,
    bandwidth: float,
    goal: float,
) -> Row:
    speed = size / np.median(times) / 1e6
    low, middle, high = np.percentile(times, [0, 50, 99])
    return Row(
        name,
        width,
        size / 1e6,
        low,
        middle,
        high,
        speed,
        speed / bandwidth,
        goal,
    )


def timed(device: gpu.Device, run: Callable[[], None]) -> np.ndarray:
    """Runs it a few times to warm up, then measures it by events, in ms."""
    for _ in range(3):
        run()
    times = []
    for _ in range(REPEATS):
        device.call("BeginTiming")
        run()
        milliseconds = ctypes.c_float()
        device.call("EndTiming", ctypes.byref(milliseconds))
        times.append(milliseconds.value)
    return np.array(times)


def copy(device: gpu.Device) -> Callable[[], None]:
    source, target = (
        device.put(np.zeros(COPIED_BYTES, np.uint8)) for _ in range(2)
    )
    pointers = gpu.POINTER(target.pointer), gpu.POINTER(source.pointer)
    return lambda: device.call(
        "CopyOnDevice", *pointers, gpu.INT64(COPIED_BYTES)
    )


def random_rows(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, TABLE_ROWS, count)


def zeros(device: gpu.Device, *shape: int) -> gpu.Array:
    return device.put(np.zeros(shape, np.float32))


def decoding(device: gpu.Device) -> tuple[Callable[[], None], int]:
    """Ids of as many features as a lookup has ids per sample."""
    rng = np.random.default_rng(0)
    section = check_decoding.Section(SAMPLES, HOTNESS, "repeats", TABLE_ROWS)
    messages = [
        check_decoding.coded(device, section, check_decoding.draw(section, rng))
        for _ in range(HOTNESS)
    ]
    placed = check_decoding.Placed(device, messages, [TABLE_ROWS] * HOTNESS)
    args, _ = placed.on_device(device)
    size = len(placed.payload) + sum(each.nbytes for each in placed.outputs())
    return lambda: device.call("DecodeIds", args), size


def lookup(device: gpu.Device, width: int) -> tuple[Callable[[], None], int]:
    entries = SAMPLES * HOTNESS
    table = zeros(device, TABLE_ROWS, width).pointer
    out = zeros(device, SAMPLES, width).pointer
    block = gpu.LookupBlock(table, False, TABLE_ROWS, width, 0, out)
    splits = np.arange(SAMPLES + 1) * HOTNESS
    args = check_lookup.arguments(
        device, [block], SAMPLES, random_rows(entries), splits
    )
    size = bytes_moved(width)["lookup"]
    return lambda: device.call("Lookup", args), size


def gradient(device: gpu.Device, width: int) -> tuple[Callable[[], None], int]:
    entries = SAMPLES * HOTNESS
    rows = random_rows(entries)
    unique = len(np.unique(rows))
    batch = check_gradient.Batch(
        np.zeros(SAMPLES * width, np.float32),
        np.arange(SAMPLES + 1) * HOTNESS,
        rows,
        None,
        [check_gradient.Table(TABLE_ROWS, width, SAMPLES)],
    )
    on_device = check_gradient.OnDevice(device, batch)
    on_device.give_room([unique])
    size = bytes_moved(width)["gradient"]

    def run() -> None:
        on_device.sort()
        on_device.sum()

    return run, size


def update(device: gpu.Device, width: int) -> tuple[Callable[[], None], int]:
    rows = np.unique(random_rows(SAMPLES * HOTNESS))
    case = check_updates.Case(
        "adagrad", width, len(rows), table_rows=TABLE_ROWS
    )
    slot = zeros(device, TABLE_ROWS, width).pointer
    bad = device.put(np.array([check_updates.NO_ROW]))
    args = check_updates.arguments(
        case,
        [
            device.put(rows).pointer,
            zeros(device, len(rows), width).pointer,
            zeros(device, TABLE_ROWS, width).pointer,
            slot,
            None,
            None,
            bad.pointer,
        ],
        len(rows),
    )
    code, values = 2, check_updates.numbers_of("adagrad")
    size = bytes_moved(width)["adagrad"]
    return (
        lambda: device.call("ApplyRows", args, code, values, None),
        size,
    )
