# SPDX-License-Identifier: Apache-2.0
"""Report of a check: differences, their probable causes and remedies."""

from __future__ import annotations

import dataclasses
import logging
import statistics
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Literal

import numpy as np
import tensorflow as tf

from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.launch.variables import CHECK_VARIABLE
from tfdist_ext.numbers.check_runs import CannotCheck
from tfdist_ext.numbers.check_runs import Outcome
from tfdist_ext.numbers.check_runs import Rows
from tfdist_ext.numbers.model_state import Held
from tfdist_ext.numbers.model_state import Snapshot
from tfdist_ext.tables import checks

_LOG = logging.getLogger("tfdist_ext")


def mode_of(check: str, environment: Mapping[str, str]) -> str:
    """Mode of the check.

    Args:
        check: argument of the strategy; "auto" uses the launcher's mode.
        environment: environment of the process.

    Raises:
        ValueError: the environment has an unknown mode.
    """
    if check != "auto":
        return check
    found = environment.get(CHECK_VARIABLE) or check
    checks.one_of(CHECK_VARIABLE, found, checks.CHECKS, "the environment")
    return found


Kind = Literal["log", "gradient", "metric", "state"]
_Mean = tf.VariableAggregation.MEAN
_First = tf.VariableAggregation.ONLY_FIRST_REPLICA


@dataclasses.dataclass(frozen=True)
class Compared:
    """Norms of a number, or an array, in both runs.

    Attributes:
        kind: kind of the value.
        name: name of the log or the variable.
        whole: norm in one process.
        ranks: norm on the ranks.
        apart: norm of the difference.
        noise: norm of the difference of two runs in one process.
        product: dot product of both, as vectors.
        size: norm of the values that the changes are added to.
    """

    kind: Kind
    name: str
    whole: float
    ranks: float
    apart: float
    noise: float
    product: float
    size: float


@dataclasses.dataclass(frozen=True)
class _Item:
    kind: Kind
    name: str
    whole: np.ndarray | Rows
    again: np.ndarray | Rows
    ranks: np.ndarray | Rows
    size: float = 0.0
    is_shard: bool = False


def compare(
    wholes: Sequence[Outcome],
    ranks: Outcome,
    snapshot: Snapshot,
    sums: Sequence[str],
    collectives: Collectives,
) -> list[Compared]:
    """Compares a run on the ranks with one in a single process.

    Args:
        wholes: one or two runs on the global batch.
        ranks: the run of this rank on its part.
        snapshot: state before the runs.
        sums: names of logs of a custom loop, which the program sums or
            averages over the ranks; the closer of both is compared.
        collectives: collectives of the strategy; all ranks must call this.

    Returns:
        The comparisons, equal on all ranks.
    """
    items = [
        *_logs(wholes, ranks, sums, collectives),
        *_gradients(wholes, ranks, snapshot.held),
        *_state(wholes, ranks, snapshot, collectives),
    ]
    return _of_all_ranks(items, collectives)


def _logs(
    wholes: Sequence[Outcome],
    ranks: Outcome,
    sums: Sequence[str],
    collectives: Collectives,
) -> list[_Item]:
    found = []
    names = [name for name in wholes[0].logs if name in ranks.logs]
    totals = _sum([ranks.logs[name] for name in sums], collectives)
    means = [each / collectives.group.world_size for each in totals]
    either = dict(zip(sums, zip(totals, means, strict=True), strict=True))
    for name in names:
        whole, again = wholes[0].logs[name], wholes[-1].logs[name]
        if not _is_number(whole):
            continue
        value = ranks.logs[name]
        if name in either:
            total, mean = either[name]
            nearer = abs(total - whole).max() <= abs(mean - whole).max()
            value = total if nearer else mean
        if np.shape(value) == np.shape(whole):
            found.append(_Item("log", name, whole, again, value))
    return found


def _is_number(value: np.ndarray) -> bool:
    return bool(np.issubdtype(value.dtype, np.number) and value.ndim == 0)


def _gradients(
    wholes: Sequence[Outcome], ranks: Outcome, held: Sequence[Held]
) -> list[_Item]:
    shards = {each.name for each in held if each.is_shard}
    return [
        _Item(
            "gradient",
            key[0],
            wholes[0].gradients[key],
            wholes[-1].gradients.get(key, wholes[0].gradients[key]),
            ranks.gradients[key],
            is_shard=key[0] in shards,
        )
        for key in wholes[0].gradients
        if key in ranks.gradients
    ]


def _state(
    wholes: Sequence[Outcome],
    ranks: Outcome,
    snapshot: Snapshot,
    collectives: Collectives,
) -> list[_Item]:
    seen = {name for name, _ in ranks.gradients}
    changed = changed_anywhere(wholes, ranks, snapshot.held, collectives)
    hidden = any(
        each.trainable and each.name not in seen
        for each in (snapshot.held[i] for i in changed)
    )
    chosen = []
    for i in changed:
        each = snapshot.held[i]
        of_optimizer = each.trainable or each.owner is None or each.is_slot
        if each.is_random or each.name in seen or not _is_plain(each.dtype):
            continue
        # An optimizer computes equal values from equal gradients.
        if hidden or not of_optimizer:
            chosen.append(i)
    deltas = [_delta(ranks, snapshot, i) for i in chosen]
    _read_as_metrics(deltas, [snapshot.held[i] for i in chosen], collectives)
    return [
        _Item(
            "metric" if snapshot.held[i].aggregation is not None else "state",
            snapshot.held[i].name,
            _delta(wholes[0], snapshot, i),
            _delta(wholes[-1], snapshot, i),
            delta,
            float(np.linalg.norm(_numbers(snapshot.before[i]).ravel())),
            snapshot.held[i].is_shard,
        )
        for i, delta in zip(chosen, deltas, strict=True)
    ]


def changed_anywhere(
    wholes: Sequence[Outcome],
    ranks: Outcome,
    held: Sequence[Held],
    collectives: Collectives,
) -> list[int]:
    """Indices of the variables that a run has changed on any rank."""
    flags = np.zeros(len(held), np.int32)
    for outcome in (*wholes, ranks):
        flags[list(outcome.changed)] = 1
    if not len(held):
        return []
    (total,) = collectives.all_reduce([tf.constant(flags)], "check/changed")
    return [int(i) for i in np.flatnonzero(total.numpy())]


def _is_plain(dtype: tf.DType) -> bool:
    return bool(dtype.is_floating or dtype.is_integer or dtype.is_bool)


def _numbers(value: np.ndarray) -> np.ndarray:
    return value.astype(np.float64)


def _delta(outcome: Outcome, snapshot: Snapshot, i: int) -> np.ndarray:
    before = _numbers(snapshot.before[i])
    after = outcome.changed.get(i)
    return np.zeros_like(before) if after is None else _numbers(after) - before


def _read_as_metrics(
    deltas: list[np.ndarray], held: Sequence[Held], collectives: Collectives
) -> None:
    """Replaces metric states of a rank by what is read from all ranks."""
    world_size, rank = collectives.group.world_size, collectives.group.rank
    metrics = [i for i, each in enumerate(held) if each.aggregation is not None]
    parts = []
    for i in metrics:
        factor = 1.0
        if held[i].aggregation == _Mean:
            factor = 1.0 / world_size
        elif held[i].aggregation == _First:
            factor = float(rank == 0)
        parts.append(deltas[i] * factor)
    for i, total in zip(metrics, _sum(parts, collectives), strict=True):
        deltas[i] = total


def _sum(
    arrays: Sequence[np.ndarray], collectives: Collectives
) -> list[np.ndarray]:
    """Sums of arrays over the ranks, in one exchange."""
    if not arrays:
        return []
    flat = np.concatenate([np.asarray(a, np.float64).ravel() for a in arrays])
    (total,) = collectives.all_reduce([tf.constant(flat)], "check/sums")
    ends = np.cumsum([np.size(each) for each in arrays])[:-1]
    parts = np.split(total.numpy(), ends)
    return [
        part.reshape(np.shape(each))
        for part, each in zip(parts, arrays, strict=True)
    ]


def _of_all_ranks(
    items: Sequence[_Item], collectives: Collectives
) -> list[Compared]:
    world_size = collectives.group.world_size
    own = np.array([_squares(each) for each in items], np.float64)
    own = np.nan_to_num(own.reshape(-1, 6), nan=np.inf, posinf=np.inf)
    gathered, sizes = collectives.all_gather_parts(
        tf.constant(own), "check/compared"
    )
    if len(set(sizes.numpy().tolist())) > 1:
        raise CannotCheck("the ranks update different variables")
    ranks = gathered.numpy().reshape(world_size, len(items), 6)
    found = []
    for i, item in enumerate(items):
        if item.is_shard:
            numbers = ranks[:, i].sum(axis=0)
        else:  # The rank with the largest difference counts.
            numbers = ranks[np.argmax(ranks[:, i, 2]), i]
        norms = np.sqrt(numbers[[0, 1, 2, 3, 5]])
        found.append(
            Compared(
                item.kind,
                item.name,
                whole=float(norms[0]),
                ranks=float(norms[1]),
                apart=float(norms[2]),
                noise=float(norms[3]),
                product=float(numbers[4]),
                size=float(norms[4]),
            )
        )
    return found


def _squares(item: _Item) -> list[float]:
    """Squared norms of both, their difference, noise; product; squared size."""
    whole, again, ranks = _vectors_of_equal_size(
        item.whole, item.again, item.ranks
    )
    return [
        float(whole @ whole),
        float(ranks @ ranks),
        float((whole - ranks) @ (whole - ranks)),
        float((whole - again) @ (whole - again)),
        float(whole @ ranks),
        item.size**2,
    ]


def _vectors_of_equal_size(*values: Any) -> list[np.ndarray]:
    """Vectors of equal sizes; of rows, all that occur in any of the values."""
    rows = [value for value in values if isinstance(value, Rows)]
    if not rows:
        return [np.asarray(v, np.float64).ravel() for v in values]
    if len(rows) < len(values):
        width = rows[0].values.shape[1]
        values = tuple(_as_rows(value, width) for value in values)
    every = np.unique(np.concatenate([value.indices for value in values]))
    vectors = []
    for value in values:
        total = np.zeros([len(every), value.values.shape[1]])
        np.add.at(total, np.searchsorted(every, value.indices), value.values)
        vectors.append(total.ravel())
    return vectors


def _as_rows(value: np.ndarray | Rows, width: int) -> Rows:
    if isinstance(value, Rows):
        return value
    table = np.asarray(value, np.float64).reshape(-1, width)
    return Rows(np.arange(len(table)), table)


# Relative differences of float32 sums in another order, and of few random
# numbers.
_RANDOM_TIMES = 4.0
_ROUNDING = 1e-6
# A ratio this close to the number of ranks counts as equal to it. The ratio
# is not exact if ranks have different numbers of samples.
_NEAR, _PARALLEL = 0.15, 0.95

_SUM_OR_MEAN = (
    "a sum over the samples is treated as a mean, or a mean as a sum",
    "compute it by tfdist_ext.losses.batch_mean or batch_sum",
)
_OF_A_LOOP = (
    "the loop sums gradients over the ranks",
    "divide losses by the samples of all ranks "
    "(tf.nn.compute_average_loss), or by strategy.num_replicas_in_sync, "
    "within the step",
)
_NORMALIZED = (
    "BatchNormalization normalizes by the samples of its rank only",
    "BatchNormalization(synchronized=True)",
)
_STATE = (
    "the step updates a state from the samples of its rank only",
    "update it by tfdist_ext.losses.batch_mean or batch_sum, or give "
    "add_weight an aggregation=",
)
_METRIC = (
    "the states of this metric do not add up over the ranks",
    "give its states an aggregation=, or update it from the result of "
    "tfdist_ext.losses.gather_batch",
)
_JOINT = (
    "it is computed from all samples jointly, not for each sample",
    "compute it from the result of tfdist_ext.losses.gather_batch",
)


@dataclasses.dataclass(frozen=True)
class Finding:
    """A value that differs from one process.

    Attributes:
        compared: norms of both values.
        cause: the probable cause.
        remedy: what to do about it.
    """

    compared: Compared
    cause: str
    remedy: str


@dataclasses.dataclass(frozen=True)
class Circumstances:
    """Properties of a checked step.

    Attributes:
        world_size: number of ranks.
        tolerance: relative tolerance of gradients summed in another order.
        unsynchronized: names of layers that normalize on each rank.
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
    """Differences, the largest relative difference first.

    Args:
        compared: comparisons over all ranks.
        known: properties of the step.
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
            noise = max(each.noise, _noise_level(compared, each.kind) * norm)
            allowed += _RANDOM_TIMES * noise
        if not each.apart <= allowed:  # Also if it is NaN.
            found.append(Finding(each, *_cause(each, known)))
    return sorted(found, key=lambda f: -_relative(f.compared))


def ratio_of(compared: Compared) -> float:
    """Norm on the ranks, divided by the norm in one process."""
    if compared.whole == 0.0:
        return float("inf") if compared.ranks else 1.0
    return compared.ranks / compared.whole


def _relative(compared: Compared) -> float:
    return compared.apart / (compared.whole + 1e-30)


def _noise_level(compared: Sequence[Compared], kind: str) -> float:
    """Median relative change of a kind of values by random ops.

    A single number may be the same in two runs by chance.
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
    """Whether the ratio is the number of ranks, or one over it."""
    if not compared.whole or not compared.ranks:
        return False
    ratio = ratio_of(compared)
    near = min(abs(ratio / world_size - 1), abs(ratio * world_size - 1))
    cosine = compared.product / (compared.whole * compared.ranks)
    return near < _NEAR and cosine > _PARALLEL


_MOST_LINES = 20


@dataclasses.dataclass(frozen=True)
class CheckReport:
    """The result of `HybridParallelStrategy.check_step`.

    Attributes:
        ok: whether the ranks compute what one process computes. True if
            nothing could be compared.
        lines: lines that rank 0 has logged.
        compared: number of compared numbers and arrays, by kind.
    """

    ok: bool
    lines: tuple[str, ...]
    compared: dict[str, int] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return "\n".join(self.lines)


def report_of(
    what: str,
    world_size: int,
    compared: Sequence[Compared],
    found: Sequence[Finding],
) -> CheckReport:
    """Creates the report.

    Args:
        what: name of the step.
        world_size: number of ranks.
        compared: all comparisons.
        found: differences.
    """
    counts = {
        kind: len({each.name for each in compared if each.kind == kind})
        for kind in ("log", "gradient", "metric", "state")
    }
    if found:
        lines = _table(what, world_size, found)
        return CheckReport(False, tuple(lines), counts)
    line = (
        f"checked: {what} on {world_size} ranks equals one process: "
        f"{_closeness(compared)}, {_count(counts['gradient'], 'variable')}, "
        f"{_count(counts['metric'], 'metric state')}"
    )
    if counts["state"]:
        line += f", {_count(counts['state'], 'other state')}"
    return CheckReport(True, (line,), counts)


def show(report: CheckReport, rank: int) -> None:
    """Logs the report on rank 0.

    Args:
        report: the report, equal on all ranks.
        rank: this rank.
    """
    if rank == 0:
        level = logging.INFO if report.ok else logging.WARNING
        _LOG.log(level, "%s", report)


def _closeness(compared: Sequence[Compared]) -> str:
    logs = [each for each in compared if each.kind == "log"]
    loss = [each for each in logs if each.name == "loss"] or logs
    kind = "loss" if loss else "gradients"
    chosen = loss or [each for each in compared if each.kind == "gradient"]
    apart = [each.apart / (each.whole or 1.0) for each in chosen]
    return f"{kind} {max(apart, default=0.0):.0e}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _table(what: str, world_size: int, found: Sequence[Finding]) -> list[str]:
    head = ("", "name", "one process", f"{world_size} ranks", "ratio", "cause")
    rows = [head, *map(_row, found[:_MOST_LINES])]
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = [
        f"checked: {what} on {world_size} ranks is not what one process "
        "computes (norms):"
    ]
    for row in rows:
        cells = [cell.ljust(w) for cell, w in zip(row, widths, strict=False)]
        lines.append("  " + "  ".join([*cells, row[-1]]).rstrip())
    if len(found) > _MOST_LINES:
        lines.append(f"  and {len(found) - _MOST_LINES} more")
    remedies = dict.fromkeys((each.cause, each.remedy) for each in found)
    lines += [f"Remedy ({cause}): {remedy}." for cause, remedy in remedies]
    return lines


def _row(finding: Finding) -> tuple[str, ...]:
    each = finding.compared
    return (
        each.kind,
        each.name,
        f"{each.whole:.6g}",
        f"{each.ranks:.6g}",
        f"{ratio_of(each):.3f}",
        finding.cause,
    )
