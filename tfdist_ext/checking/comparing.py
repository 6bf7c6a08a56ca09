# SPDX-License-Identifier: Apache-2.0
"""How far two runs of a step are apart, as all ranks see it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any
from typing import Literal

import numpy as np
import tensorflow as tf

from tfdist_ext.checking.runs import Outcome
from tfdist_ext.checking.runs import Rows
from tfdist_ext.checking.skipping import CannotCheck
from tfdist_ext.checking.state import Held
from tfdist_ext.checking.state import Snapshot
from tfdist_ext.collectives.collectives import Collectives

Kind = Literal["log", "gradient", "metric", "state"]
_Mean = tf.VariableAggregation.MEAN
_First = tf.VariableAggregation.ONLY_FIRST_REPLICA


@dataclasses.dataclass(frozen=True)
class Compared:
    """A number, or an array, of both runs.

    Attributes:
        kind: what it is.
        name: of the log or the variable.
        whole: norm in one process.
        ranks: norm of what the ranks have.
        apart: norm of the difference.
        noise: norm of the difference of two runs in one process.
        product: of both, as vectors.
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
    whole: Any
    again: Any
    ranks: Any
    size: float = 0.0
    is_shard: bool = False


def compare(
    wholes: Sequence[Outcome],
    ranks: Outcome,
    snapshot: Snapshot,
    sums: Sequence[str],
    collectives: Collectives,
) -> list[Compared]:
    """Compares a run on the ranks with what one process computes.

    Args:
        wholes: one or two runs on the whole batch.
        ranks: the run of this rank on its part.
        snapshot: of the state before.
        sums: logs of a custom loop, of which the program takes a sum or a
            mean of the ranks; what is nearer to one process counts.
        collectives: of the strategy; all ranks must call.

    Returns:
        The same on all ranks.
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
        # What an optimizer makes of equal gradients is equal.
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
    """Makes of the ranks' metric states what is read of them."""
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
        else:  # of the rank that differs most
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
    whole, again, ranks = _alike(item.whole, item.again, item.ranks)
    return [
        float(whole @ whole),
        float(ranks @ ranks),
        float((whole - ranks) @ (whole - ranks)),
        float((whole - again) @ (whole - again)),
        float(whole @ ranks),
        item.size**2,
    ]


def _alike(*values: Any) -> list[np.ndarray]:
    """Vectors that can be compared: of rows, those that any of them has."""
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


def _as_rows(value: Any, width: int) -> Rows:
    if isinstance(value, Rows):
        return value
    table = np.asarray(value, np.float64).reshape(-1, width)
    return Rows(np.arange(len(table)), table)
