# SPDX-License-Identifier: Apache-2.0
"""What one rank measures of itself while steps run."""

import dataclasses
import pathlib
import resource
import time
from collections.abc import Callable

import numpy as np

from benchmarks import network


@dataclasses.dataclass(frozen=True)
class Sample:
    """Counters of this process at one moment."""

    seconds: float
    cpu_seconds: float
    traffic: network.Traffic


def sample(interface: str) -> Sample:
    """Reads the clock, the CPU time and the interface (if there is one)."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    traffic = network.Traffic(0, 0)
    if interface:
        traffic = network.read_traffic(interface)
    cpu_seconds = usage.ru_utime + usage.ru_stime
    return Sample(time.perf_counter(), cpu_seconds, traffic)


def peak_rss_bytes() -> int:
    """Peak resident memory of this process since it started."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise ValueError("No VmHWM in /proc/self/status")


def time_steps(step: Callable[[int], object], count: int) -> list[float]:
    """Runs `step(0) ... step(count - 1)`, returns the seconds of each.

    `step` must not return before its results are there.
    """
    seconds = []
    for index in range(count):
        start = time.perf_counter()
        step(index)
        seconds.append(time.perf_counter() - start)
    return seconds


def steps_in_budget(
    warm_up: list[float], budget_seconds: float, most: int, least: int = 5
) -> int:
    """How many steps fit into the budget, judged by the warm-up steps."""
    fitting = int(budget_seconds / max(float(np.median(warm_up)), 1e-9))
    return max(least, min(most, fitting))


def quantiles_ms(seconds: list[float]) -> dict[str, float]:
    """Returns min, p50, mean and p99 of durations in milliseconds."""
    milliseconds = np.asarray(seconds) * 1e3
    return {
        "min": float(milliseconds.min()),
        "p50": float(np.median(milliseconds)),
        "mean": float(milliseconds.mean()),
        "p99": float(np.percentile(milliseconds, 99)),
    }


def per_step(before: Sample, after: Sample, steps: int) -> dict[str, float]:
    """Returns bytes and CPU milliseconds per step between two samples."""
    traffic = after.traffic - before.traffic
    return {
        "egress_bytes": traffic.egress / steps,
        "ingress_bytes": traffic.ingress / steps,
        "cpu_ms": (after.cpu_seconds - before.cpu_seconds) * 1e3 / steps,
        "wall_ms": (after.seconds - before.seconds) * 1e3 / steps,
    }
