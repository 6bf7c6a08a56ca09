# SPDX-License-Identifier: Apache-2.0
"""What differs by more than rounding and random ops do, and why."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from tfdist_ext.checking.comparing import Compared

# How far apart float32 sums in another order, or a few random numbers, may be.
_RANDOM_TIMES = 4.0
_ROUNDING = 1e-6
# A ratio counts as that of the number of ranks, within this: where ranks have
# different numbers of samples, it is not quite that.
_NEAR, _PARALLEL = 0.15, 0.95

_SUM_OR_MEAN = (
    "a sum over the samples counts as a mean, or a mean as a sum",
    "write it as tfdist_ext.losses.batch_mean or batch_sum",
)
_OF_A_LOOP = (
    "gradients of a loop of your own are summed over the ranks",
    "divide losses by the samples of all ranks "
    "(tf.nn.compute_average_loss), or by strategy.num_replicas_in_sync, "
    "within the step",
)
_NORMALIZED = (
    "BatchNormalization sees the samples of its rank only",
    "BatchNormalization(synchronized=True)",
)
_STATE = (
    "state that the step updates by the samples of its rank",
    "update it by tfdist_ext.losses.batch_mean or batch_sum, or give "
    "add_weight an aggregation=",
)
_METRIC = (
    "the states of this metric do not add up over the ranks",
    "give its states an aggregation=, or update it by what "
    "tfdist_ext.losses.gather_batch returns",
)
_JOINT = (
    "computed of all samples jointly, not by sample",
    "compute it of what tfdist_ext.losses.gather_batch returns",
)


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that is not what one process computes.

    Attributes:
        compared: both numbers.
        cause: the probable one.
        remedy: against it.
    """

    compared: Compared
    cause: str
    remedy: str


@dataclasses.dataclass(frozen=True)
class Circumstances:
    """What is known of a step besides its numbers.

    Attributes:
        world_size: number of ranks.
        tolerance: relative, of gradients that are added in another order.
        unsynchronized: names of layers that normalize by rank.
        is_random: whether the step draws random numbers.
        of_keras: whether it is a step of Keras's loops.
    """

    world_size: int
    tolerance: float
    unsynchronized: Sequence[str] = ()
    is_random: bool = False
    of_keras: bool = True


def findings(
    compared: Sequence[Compared], known: Circumstances
) -> list[Finding]:
    """What differs, the largest relative difference first.

    Args:
        compared: of all ranks.
        known: of the step.
    """
    scale = max(
        (each.whole for each in compared if each.kind == "gradient"),
        default=0.0,
    )
    found = []
    for each in compared:
        floor = scale if each.kind == "gradient" else each.size
        norm = max(each.whole, min(each.ranks, 2 * each.whole))
        allowed = known.tolerance * norm + _ROUNDING * floor + 1e-12
        if known.is_random:
            noise = max(each.noise, _loudness(compared, each.kind) * norm)
            allowed += _RANDOM_TIMES * noise
        if not each.apart <= allowed:  # not a number is one, too
            found.append(Finding(each, *_cause(each, known)))
    return sorted(found, key=lambda f: -_relative(f.compared))


def ratio_of(compared: Compared) -> float:
    """What the ranks have, by what one process has."""
    if compared.whole == 0.0:
        return float("inf") if compared.ranks else 1.0
    return compared.ranks / compared.whole


def _relative(compared: Compared) -> float:
    return compared.apart / (compared.whole + 1e-30)


def _loudness(compared: Sequence[Compared], kind: str) -> float:
    """How much random ops change a number of a kind, relative to it.

    One number alone may be the same twice by chance.
    """
    relative = [
        each.noise / each.whole
        for each in compared
        if each.kind == kind and each.whole and each.noise
    ]
    return statistics.median(relative) if relative else 0.0


def _cause(compared: Compared, known: Circumstances) -> tuple[str, str]:
    name = compared.name.rsplit("/", 1)[-1]
    if compared.kind == "metric":
        return _METRIC
    if name.startswith("moving_") and known.unsynchronized:
        return _normalized(known)
    if compared.kind == "state":
        return _STATE
    if _is_multiple(compared, known.world_size):
        return _SUM_OR_MEAN if known.of_keras else _OF_A_LOOP
    if known.unsynchronized:
        return _normalized(known)
    return _JOINT


def _normalized(known: Circumstances) -> tuple[str, str]:
    cause, remedy = _NORMALIZED
    return f"{cause} ({', '.join(known.unsynchronized[:3])})", remedy


def _is_multiple(compared: Compared, world_size: int) -> bool:
    """Whether it is one process's, times or by the number of ranks."""
    if not compared.whole or not compared.ranks:
        return False
    ratio = ratio_of(compared)
    near = min(abs(ratio / world_size - 1), abs(ratio * world_size - 1))
    cosine = compared.product / (compared.whole * compared.ranks)
    return near < _NEAR and cosine > _PARALLEL
