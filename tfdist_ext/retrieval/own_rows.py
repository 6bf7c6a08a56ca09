# SPDX-License-Identifier: Apache-2.0
"""Candidates that a tower has computed, spread over the ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext.collectives import any_dtype
from tfdist_ext.collectives.agreeing import agree
from tfdist_ext.collectives.collectives import Collectives
from tfdist_ext.embedding import stock_lookup
from tfdist_ext.retrieval.search import Part


class OwnRows:
    """Candidates that are kept as they were given, a part on every rank.

    They are given in batches, of each of which a rank has some rows. Batches
    of rank 0 [a b] [e], and of rank 1 [c d] [f]: the candidates are
    a b c d e f, in this order.

    Args:
        batches: this rank's rows of each, `[n, dim]`; on all ranks equally
            many.
        ids: of each row, `[n]` for each batch; None for positions.
        collectives: of the strategy; all ranks must call.

    Raises:
        tf.errors.InvalidArgumentError: on every rank, if they have different
            numbers of batches, or rows of different kinds.
    """

    def __init__(
        self,
        batches: Sequence[tf.Tensor],
        ids: Sequence[tf.Tensor] | None,
        collectives: Collectives | None,
    ) -> None:
        rows = tf.concat(batches, axis=0)
        sizes = [int(batch.shape[0]) for batch in batches]
        if collectives is not None:
            kind = f"{rows.dtype.name} [n, {rows.shape[1]}]"
            agree(collectives, [f"candidates, {len(sizes)} batches of {kind}"])
        positions, self.count = _positions(sizes, collectives)
        self.dim = int(rows.shape[1])
        self.ids = None
        if ids is not None:
            self.ids = _in_order(tf.concat(ids, axis=0), positions, collectives)
        self._rows = _variable(rows)
        self._all: tf.Variable | None = None
        self._positions = _variable(positions)

    @property
    def variables(self) -> list[tf.Variable]:
        """What this rank holds."""
        return [self._rows, self._positions]

    def take(self, other: OwnRows) -> None:
        """Holds other candidates, where graphs have these variables."""
        for mine, new in zip(self.variables, other.variables, strict=True):
            mine.assign(new.read_value())
        self._all = None

    def _every(self, collectives: Collectives) -> tf.Variable:
        """All candidates, for a graph that leaves.

        Gathered once: rank 0 traces such a graph again, by itself.
        """
        if self._all is None:
            with tf.init_scope():
                self._all = _variable(tf.constant(self.gather(collectives)))
        return self._all

    def gather(self, collectives: Collectives | None) -> np.ndarray:
        """All candidates in order, on every rank; all ranks must call."""
        rows, positions = self.variables
        found = rows.read_value()
        if collectives is None:
            return np.asarray(found)
        return np.asarray(_in_order(found, positions.read_value(), collectives))

    def part(self, collectives: Collectives | None) -> Part:
        """What this rank scores now; all, in a model that leaves the ranks."""
        if collectives is not None and stock_lookup.is_asked():
            every = self._every(collectives)
            positions = tf.range(self.count, dtype=tf.int64)
            return Part(every.read_value(), positions, True)
        return Part(
            self._rows.read_value(),
            self._positions.read_value(),
            collectives is None,
        )


def _variable(value: tf.Tensor) -> tf.Variable:
    # A graph that is traced already shall find new ones, of any number.
    return tf.Variable(
        value,
        shape=[None, *value.shape[1:]],
        trainable=False,
        synchronization=tf.VariableSynchronization.NONE,
        aggregation=tf.VariableAggregation.NONE,
    )


def _positions(
    sizes: Sequence[int], collectives: Collectives | None
) -> tuple[tf.Tensor, int]:
    """The positions of this rank's rows among all, and how many there are."""
    mine = tf.constant([list(sizes)], tf.int64)
    rank = 0
    if collectives is not None:
        rank = collectives.group.rank
        mine = collectives.all_gather(mine, "candidates/sizes")
    table = mine.numpy()
    ends = np.cumsum(table.T.reshape(-1)).reshape(table.T.shape)
    found = [
        np.arange(end - size, end)
        for end, size in zip(ends[:, rank], table[rank], strict=True)
    ]
    flat = np.fromiter(itertools.chain(*found), np.int64)
    return tf.constant(flat, tf.int64), int(table.sum())


def _in_order(
    mine: tf.Tensor, positions: tf.Tensor, collectives: Collectives | None
) -> tf.Tensor:
    """What the ranks have of their candidates, for all, by position."""
    if collectives is None:
        return mine
    every, _ = any_dtype.all_gather(collectives, mine, "candidates/all")
    places = collectives.all_gather(positions, "candidates/positions")
    return tf.gather(every, tf.argsort(places))


def of_all_alike(
    dataset: tf.data.Dataset, collectives: Collectives | None
) -> tuple[list[tf.Tensor], list[tf.Tensor] | None]:
    """This rank's part of a dataset that every rank reads.

    Args:
        dataset: of rows `[n, dim]`, or of pairs of ids and rows.
        collectives: of the strategy.

    Returns:
        `batches` and `ids` of `OwnRows`.
    """
    rows, ids = [], []
    for batch in dataset:
        *names, found = batch if isinstance(batch, tuple) else (batch,)
        rows.append(slice_of(found, collectives))
        ids += [slice_of(each, collectives) for each in names]
    return rows, ids or None


def of_tower(
    dataset: tf.data.Dataset, model: Any, strategy: tf.distribute.Strategy
) -> tuple[list[tf.Tensor], list[tf.Tensor] | None]:
    """Rows that the ranks compute, each of its part of a dataset.

    Args:
        dataset: batches of what the model takes, or pairs of ids and that.
        model: makes rows `[n, dim]`.
        strategy: all ranks of it must call.

    Returns:
        `batches` and `ids` of `OwnRows`.
    """

    @tf.function
    def compute(features: Any) -> Any:
        return strategy.run(lambda features: model(features), (features,))

    rows, ids = [], []
    for batch in strategy.experimental_distribute_dataset(dataset):
        *names, features = batch if isinstance(batch, tuple) else (batch,)
        rows.append(compute(features))
        ids += names
    return rows, ids or None


def slice_of(batch: Any, collectives: Collectives | None) -> tf.Tensor:
    """This rank's rows of what all ranks have alike."""
    batch = tf.convert_to_tensor(batch)
    if collectives is None:
        return batch
    rank, ranks = collectives.group.rank, collectives.group.world_size
    number = int(batch.shape[0])
    return batch[rank * number // ranks : (rank + 1) * number // ranks]


def check_rows(candidates: tf.Tensor, identifiers: Any, name: str) -> None:
    """Refuses what are no candidates with their identifiers.

    Raises:
        ValueError: naming the layer.
    """
    if candidates.shape.rank != 2 or not candidates.dtype.is_floating:
        raise ValueError(
            "Candidates must be rows [n, dim] of floating numbers. Received: "
            f"shape {candidates.shape}, dtype {candidates.dtype.name} (layer "
            f"'{name}')."
        )
    check_ids(int(candidates.shape[0]), identifiers, name)


def check_ids(count: int, identifiers: Any, name: str) -> None:
    """Refuses identifiers that are not one for each candidate.

    Raises:
        ValueError: naming the layer.
    """
    if identifiers is None:
        return
    shape = tuple(tf.convert_to_tensor(identifiers).shape)
    if shape != (count,):
        raise ValueError(
            f"Identifiers must be one for each of the {count} candidates. "
            f"Received: shape {shape} (layer '{name}')."
        )
