# SPDX-License-Identifier: Apache-2.0
"""Results joined of the owners' parts, and the gradient of that."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator

import numpy as np

from benchmarks.gpu import device as gpu
from benchmarks.gpu import numbers


@dataclasses.dataclass(frozen=True)
class Case:
    """Ranges of columns of results, each of some samples, from some owners.

    Attributes:
        widths: of the ranges.
        samples: of each.
        owners: of each; every one has sent about half of the samples.
        scale: of the gradient.
    """

    widths: tuple[int, ...]
    samples: tuple[int, ...]
    owners: int = 2
    scale: float = 0.5


@dataclasses.dataclass(frozen=True)
class Range:
    """A range of columns: which samples the owners sent, and where they lie.

    Attributes:
        before: columns of the result in front of the range.
        result: `[samples, dim]`, of which the range is a part.
        sent: by owner, the samples, ascending.
        firsts: by owner, where its numbers begin in the parts.
    """

    before: int
    width: int
    result: np.ndarray
    sent: list[np.ndarray]
    firsts: list[int]

    @property
    def columns(self) -> slice:
        return slice(self.before, self.before + self.width)


def cases(rng: np.random.Generator) -> Iterator[Case]:
    for width in (1, 3, 16, 33, 257):
        yield Case((width,), (int(rng.integers(1, 90)),))
    yield Case((5, 64, 1), (40, 1, 700), owners=4)
    yield Case((5, 8), (30, 9), scale=0.0)
    yield Case((5,), (30,), owners=0)
    yield Case((5, 2), (0, 0))


def draw(case: Case, rng: np.random.Generator) -> tuple[list[Range], int]:
    """The ranges, and how many numbers there are of all parts."""
    ranges, count = [], 0
    for width, samples in zip(case.widths, case.samples, strict=True):
        sent, firsts = [], []
        for _ in range(case.owners):
            sent.append(np.flatnonzero(rng.random(samples) < 0.5))
            firsts.append(count)
            count += len(sent[-1]) * width
        before, behind = rng.integers(0, 4, 2).tolist()
        result = numbers.floats(rng, samples, before + width + behind)
        ranges.append(Range(before, width, result, sent, firsts))
    return ranges, count


def check(device: gpu.Device, case: Case, rng: np.random.Generator) -> None:
    """Joins parts, and takes the gradient apart.

    Raises:
        WrongResult: it is not the reference's.
    """
    ranges, count = draw(case, rng)
    check_joined(device, case, ranges, numbers.floats(rng, count))
    check_gradient(device, case, ranges, count)


def check_joined(
    device: gpu.Device, case: Case, ranges: list[Range], parts: np.ndarray
) -> None:
    blocks, outputs, counts, places = [], [], [], []
    for each in ranges:
        samples, dim = each.result.shape
        outputs.append(device.put(each.result))
        if samples:
            to = (outputs[-1].pointer or 0) + 4 * each.before
            first = sum(map(len, counts))
            blocks.append(gpu.CombineBlock(first, each.width, dim, to))
        counts.append(np.zeros(samples, np.int64))
        rows = [[] for _ in range(samples)]
        for sent, first in zip(each.sent, each.firsts, strict=True):
            counts[-1][sent] += 1
            for k, sample in enumerate(sent):
                rows[sample].append(first + k * each.width)
        places += [place for row in rows for place in row]
    splits = device.put(numbers.row_splits(np.concatenate(counts)))
    args = gpu.Combine(
        device.put_structures(blocks).pointer,
        len(blocks),
        max(case.widths),
        sum(map(len, counts)),
        splits.pointer,
        device.put(np.array(places, np.int64)).pointer,
        device.put(parts).pointer,
    )
    device.call("Combine", args)
    device.synchronize()
    for each, output in zip(ranges, outputs, strict=True):
        expected = each.result.astype(np.float64)
        expected[:, each.columns] = 0
        for sent, first in zip(each.sent, each.firsts, strict=True):
            end = first + len(sent) * each.width
            rows = parts[first:end].reshape(-1, each.width)
            expected[sent, each.columns] += rows
        numbers.expect_close(f"{case}", output.get(), expected, case.owners)


def check_gradient(
    device: gpu.Device, case: Case, ranges: list[Range], count: int
) -> None:
    sections, samples = [], []
    expected = np.zeros(count)
    for each in ranges:
        grad = each.result.copy()
        if case.scale == 0:
            grad[::2] = np.nan
        start = (device.put(grad).pointer or 0) + 4 * each.before
        for sent, first in zip(each.sent, each.firsts, strict=True):
            if not len(sent):
                continue
            entry = sum(map(len, samples))
            sections.append(
                gpu.CombineSection(
                    entry, first, each.width, grad.shape[1], start
                )
            )
            samples.append(sent.astype(np.int32))
            if case.scale:
                end = first + len(sent) * each.width
                rows = grad[sent, each.columns].astype(np.float64)
                expected[first:end] = case.scale * rows.reshape(-1)
    values = device.poisoned((count,), np.float32)
    none = np.zeros(0, np.int32)
    args = gpu.CombineGrad(
        device.put_structures(sections).pointer,
        len(sections),
        max(case.widths),
        sum(map(len, samples)),
        device.put(np.concatenate([none, *samples])).pointer,
        ctypes.c_float(case.scale),
        values.pointer,
    )
    device.call("CombineGrad", args)
    device.synchronize()
    numbers.expect_close(f"{case}", values.get(), expected)
