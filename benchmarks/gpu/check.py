# SPDX-License-Identifier: Apache-2.0
"""Builds the kernels for GPUs, checks every one and times it: `make gpu-check`.

It needs a GPU, nvcc, Python and numpy, neither TensorFlow nor this package.
Where they are, it compares with PyTorch and FBGEMM, and trains examples with a
TensorFlow for GPUs. What is left out is said.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import os
import pathlib
import sys
from collections.abc import Iterable
from collections.abc import Iterator

from benchmarks.gpu import build
from benchmarks.gpu import checks
from benchmarks.gpu import large
from benchmarks.gpu import timing
from benchmarks.gpu import torch_bags
from benchmarks.gpu import train
from benchmarks.gpu.device import Device
from benchmarks.gpu.device import DeviceError

WRONG, NO_GPU, MISSED = 1, 2, 3


def main(arguments: list[str]) -> int:
    """Returns 0 if all is well.

    1 where a result is wrong, 2 where there is no GPU or nvcc, 3 where all is
    right and a kernel is slower than its goal.
    """
    options = parse(arguments)
    try:
        library = build.build(options.folder, os.cpu_count() or 1)
    except RuntimeError as error:
        print(f"The kernels cannot be built: {error}", file=sys.stderr)
        return NO_GPU
    if options.build_only:
        print(f"built {library}")
        return 0
    device = Device(library)
    if device.count() == 0:
        print(
            "No GPU is found: the kernels were compiled, and not run. Run this "
            "on a machine with a GPU and its driver (nvidia-smi shows both).",
            file=sys.stderr,
        )
        return NO_GPU
    seed = int.from_bytes(os.urandom(4), "little")
    if options.seed is not None:
        seed = options.seed
    wrong = check_all(device, seed)
    if wrong:
        print(f"{wrong} cases are wrong; again: --seed {seed}")
        return WRONG
    missed = 0
    if not options.no_timing:
        rows = rows_of(device)
        missed = report(rows, options.folder / "gpu_check.csv")
    if not options.no_training and train_examples(options.folder):
        return WRONG
    return MISSED if missed else 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu-check", description=__doc__)
    parser.add_argument(
        "--folder",
        type=pathlib.Path,
        default=build.ROOT / "build" / "gpu",
        help="where the library and gpu_check.csv go",
    )
    parser.add_argument("--build-only", action="store_true")
    parser.add_argument("--seed", type=int, help="of the input; random")
    parser.add_argument("--no-timing", action="store_true")
    parser.add_argument("--no-training", action="store_true")
    return parser.parse_args(arguments)


def check_all(device: Device, seed: int) -> int:
    """Prints a line for every kind of kernel; returns how many are wrong."""
    failures = 0
    for kernel in checks.KERNELS:
        count, wrong = checks.check(device, kernel, seed)
        failures += len(wrong)
        print(f"{kernel:10} {count:5} cases {len(wrong):5} wrong", flush=True)
        for text in wrong[:5]:
            print(f"    {text}")
    try:
        what = large.check(device, seed)
    except DeviceError as error:
        what = f"failed: {error}"
        failures += 1
    except large.WrongResult as error:
        what = f"wrong: {error}"
        failures += 1
    finally:
        device.arrays.clear()
    print(f"rows beyond 2^31 elements: {what}")
    return failures


def rows_of(device: Device) -> Iterator[timing.Row]:
    """Times our kernels, then what there is to compare with."""
    bandwidth = 0.0
    for row in timing.measure(device):
        bandwidth = bandwidth or row.gigabytes_per_second
        yield row
    if why := torch_bags.missing():
        print(f"torch.nn.EmbeddingBag and FBGEMM: left out, {why}")
    else:
        yield from torch_bags.measure(bandwidth)


def report(rows: Iterable[timing.Row], path: pathlib.Path) -> int:
    """Prints the times as a table and writes them as CSV.

    Args:
        rows: in their order.
        path: of the CSV.

    Returns:
        How many goals are missed.
    """
    missed = 0
    print(
        "kernel          width      MB   min ms   p50 ms   p99 ms   GB/s  "
        "of copy  goal"
    )
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(field.name for field in dataclasses.fields(timing.Row))
        for row in rows:
            missed += row.missed
            verdict = "miss" if row.missed else "pass"
            print(
                f"{row.kernel:15} {row.width:5} {row.megabytes:7.0f} "
                f"{row.minimum_ms:8.3f} {row.median_ms:8.3f} "
                f"{row.maximum_ms:8.3f} {row.gigabytes_per_second:6.0f} "
                f"{row.of_copy:8.0%}"
                + (f"  {row.goal:.0%} {verdict}" if row.goal else ""),
                flush=True,
            )
            writer.writerow(dataclasses.astuple(row))
    print(f"written to {path}")
    return missed


def train_examples(folder: pathlib.Path) -> int:
    """Returns how many trainings are wrong, none where there can be none."""
    if why := train.missing():
        print(f"training on GPUs: left out, {why}")
        return 0
    return train.report(train.check(), folder / "gpu_training.csv")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
