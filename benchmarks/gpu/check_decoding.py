# SPDX-License-Identifier: Apache-2.0
"""Ids decoded in blocks, against what was coded and against the CPU."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator
from collections.abc import Sequence

import numpy as np

from benchmarks.gpu import device as gpu
from benchmarks.gpu import numbers

BLOCK = 128  # entries; kBlockEntries of id_section.h
ALL_DECODED = np.uint64(2**64 - 1)


@dataclasses.dataclass(frozen=True)
class Section:
    """Samples of 1 to `most` entries each.

    Attributes:
        kind: "plain", "repeats", "weighted", or "running": rows of all
            samples ascend.
        in_blocks: several, where there is enough for them.
    """

    samples: int
    most: int = 1
    kind: str = "plain"
    limit: int = 100_000
    in_blocks: bool = True


@dataclasses.dataclass(frozen=True)
class Case:
    """Sections that are decoded together, some bits of them `damaged`."""

    sections: tuple[Section, ...]
    damaged: int = 0


def cases(rng: np.random.Generator) -> Iterator[Case]:
    """Every kind, borders of blocks and one off, then damage."""
    for kind in ("plain", "repeats", "weighted", "running"):
        for samples in (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 700):
            yield Case((Section(samples, 1, kind),))
        most = 1 if kind == "running" else 30
        yield Case((Section(150, most, kind, limit=2**40),))
        yield Case((Section(150, most, kind, in_blocks=False),))
    yield Case(())
    yield Case((Section(3, 1500, "repeats"),))
    mixed = (
        Section(90, 20, "repeats"),
        Section(1, 1),
        Section(300, 9, "weighted"),
        Section(500, 1, "running", limit=2**40),
        Section(64, 2, in_blocks=False),
    )
    yield Case(mixed)
    for _ in range(40):
        kept = rng.permutation(len(mixed))[: rng.integers(1, 4)]
        chosen = tuple(mixed[k] for k in kept)
        yield Case(chosen, damaged=int(rng.integers(1, 4)))


@dataclasses.dataclass
class Entries:
    """What a section says; `bits` are its counts or weights."""

    row_splits: np.ndarray
    rows: np.ndarray
    bits: np.ndarray
    weights: np.ndarray


def draw(section: Section, rng: np.random.Generator) -> Entries:
    counts = rng.integers(1, section.most + 1, section.samples)
    splits = numbers.row_splits(counts)
    size = int(splits[-1])
    longest = size if section.kind == "running" else section.most
    steps = rng.integers(1, section.limit // longest + 1, size)
    rows = np.cumsum(steps)
    if section.kind != "running":
        before = np.concatenate([[0], rows])[splits[:-1]]
        rows = rows - np.repeat(before, counts)
    weights = np.ones(size, np.float32)
    bits = np.ones(size, np.uint32)
    if section.kind == "repeats":
        bits[rng.random(size) < 0.2] = rng.integers(2, 9)
        weights = bits.astype(np.float32)
    if section.kind == "weighted":
        weights = numbers.floats(rng, size)
        bits = weights.view(np.uint32)
    return Entries(splits, rows - 1, bits, weights)


def coded(device: gpu.Device, section: Section, what: Entries) -> np.ndarray:
    """The bytes of a section."""

    def write(out: np.ndarray | None) -> int:
        size = device.library.WriteIdSection(
            numbers.address(what.row_splits),
            gpu.INT64(section.samples),
            numbers.address(what.rows),
            numbers.address(what.bits),
            section.kind == "weighted",
            section.kind == "running",
            section.in_blocks,
            numbers.address(out),
        )
        return int(size)

    message = np.zeros(write(None), np.uint8)
    write(message)
    return message


class Placed:
    """Sections of one payload, and the blocks that they are cut into.

    Args:
        device: whose library reads them.
        messages: their bytes.
        limits: of their rows.
    """

    def __init__(
        self,
        device: gpu.Device,
        messages: Sequence[np.ndarray],
        limits: Sequence[int],
    ) -> None:
        library = device.library
        none = np.zeros(0, np.uint8)
        self.payload = np.concatenate([none, *messages])
        self.sizes = np.zeros(3, np.int64)  # samples, entries, any weights
        self.well = True
        ends = np.cumsum([len(message) for message in messages])
        sections, blocks = [], []
        for number, (message, limit) in enumerate(
            zip(messages, limits, strict=True)
        ):
            section = np.zeros(library.IdSectionBytes(), np.uint8)
            given = (
                numbers.address(self.payload),
                gpu.INT64(int(ends[number]) - len(message)),
                gpu.INT64(len(message)),
                gpu.INT64(number),
                ctypes.c_uint64(limit),
                numbers.address(self.sizes),
                numbers.address(section),
            )
            count = library.PlaceIdSection(*given, None)
            self.well &= count > 0
            block = np.zeros(max(count, 0) * library.IdBlockBytes(), np.uint8)
            if self.well:
                library.PlaceIdSection(*given, numbers.address(block))
            sections.append(section)
            blocks.append(block)
        self.sections = np.concatenate([none, *sections])
        self.blocks = np.concatenate([none, *blocks])
        self.count = len(self.blocks) // library.IdBlockBytes()

    def outputs(self) -> list[np.ndarray]:
        """Room for row_splits, rows, weights and the status."""
        samples, entries, weighted = self.sizes.tolist()
        return [
            np.zeros(samples + 1, np.int64),
            np.zeros(entries, np.int64),
            np.zeros(entries if weighted else 0, np.float32),
            np.zeros(1, np.uint64),
        ]

    def arguments(
        self, inputs: Sequence[int | None], outputs: Sequence[int | None]
    ) -> gpu.DecodeIds:
        payload, sections, blocks = inputs
        splits, rows, weights, status = outputs
        return gpu.DecodeIds(
            *(payload, sections, blocks, self.count, splits, rows),
            weights if self.sizes[2] else None,
            status,
        )

    def on_cpu(self, device: gpu.Device) -> list[np.ndarray]:
        outputs = self.outputs()
        arrays = (self.payload, self.sections, self.blocks), outputs
        args = self.arguments(
            *([numbers.address(each).value for each in a] for a in arrays)
        )
        device.library.DecodeIdsOnCpu(ctypes.byref(args))
        return outputs

    def on_device(
        self, device: gpu.Device
    ) -> tuple[gpu.DecodeIds, list[gpu.Array]]:
        """Arguments in the device's memory, and the outputs there."""
        inputs = [
            device.put(each).pointer
            for each in (self.payload, self.sections, self.blocks)
        ]
        outputs = [
            device.poisoned(each.shape, each.dtype.type)
            for each in self.outputs()
        ]
        pointers = [each.pointer for each in outputs]
        return self.arguments(inputs, pointers), outputs


def check(device: gpu.Device, case: Case, rng: np.random.Generator) -> None:
    """Decodes some sections.

    Raises:
        WrongResult: it is not what was coded, or not what a CPU reads.
    """
    drawn = [draw(section, rng) for section in case.sections]
    messages = [
        coded(device, section, entries)
        for section, entries in zip(case.sections, drawn, strict=True)
    ]
    for _ in range(case.damaged):
        message = messages[rng.integers(len(messages))]
        message[rng.integers(len(message))] ^= 1 << rng.integers(8)
    limits = [section.limit for section in case.sections]
    placed = Placed(device, messages, limits)
    if not placed.well:
        if case.damaged:
            return
        raise numbers.WrongResult(f"{case}: a header is refused")
    args, outputs = placed.on_device(device)
    device.call("DecodeIds", args)
    device.synchronize()
    *got, status = [each.get() for each in outputs]
    *expected, why = placed.on_cpu(device)
    numbers.expect_equal(f"{case}: status", status, why)
    if status[0] == ALL_DECODED:
        for name, ours, theirs in zip(
            ("row_splits", "rows", "weights"), got, expected, strict=True
        ):
            # Bits: damaged weights may be NaN.
            bits = [each.view(f"u{each.itemsize}") for each in (ours, theirs)]
            numbers.expect_equal(f"{case}: {name}", *bits)
    elif not case.damaged:
        raise numbers.WrongResult(f"{case}: refused, {int(status[0]):#x}")
    if not case.damaged:
        compare(case, drawn, got)


def compare(
    case: Case, drawn: Sequence[Entries], got: Sequence[np.ndarray]
) -> None:
    counts = [np.diff(each.row_splits) for each in drawn]
    none = np.zeros(0, np.int64)
    splits = numbers.row_splits(np.concatenate([none, *counts]))
    rows = np.concatenate([none, *(each.rows for each in drawn)])
    numbers.expect_equal(f"{case}: row_splits as coded", got[0], splits)
    numbers.expect_equal(f"{case}: rows as coded", got[1], rows)
    if len(got[2]):
        weights = np.concatenate([each.weights for each in drawn])
        numbers.expect_equal(f"{case}: weights as coded", got[2], weights)
