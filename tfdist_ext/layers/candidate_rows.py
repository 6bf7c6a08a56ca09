# SPDX-License-Identifier: Apache-2.0
"""Candidates on their ranks, and the search for the highest scores."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext.comm import exchanges
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.comm.exchanges import agree
from tfdist_ext.embedding import pooled_lookup
from tfdist_ext.embedding import sharded_variable
from tfdist_ext.embedding import whole_tables
from tfdist_ext.keras_internals import value_of
from tfdist_ext.tables import placement
from tfdist_ext.tables.placement import ShardSpec
from tfdist_ext.tables.placement import TablePlacement

# Scores at a time, 64 MB.
CELLS = 1 << 24
# Queries at a time are a multiple of it: products of few queries are summed in
# another order, and a score shall not depend on who else asks.
_QUERIES = 16
# Where there is no candidate: behind all of them.
_NOWHERE = tf.int64.max


@dataclasses.dataclass(frozen=True)
class Part:
    """The candidates that a rank scores.

    Attributes:
        rows: `[m, dim]`.
        positions: int64 `[m]`, ascending, of each among all candidates.
        everywhere: whether every rank has all of them.
    """

    rows: tf.Tensor
    positions: tf.Tensor
    everywhere: bool


def dtype_of_scores(dtype: tf.DType) -> tf.DType:
    """The dtype of scores for queries of a dtype: at least single."""
    return dtype if dtype.size >= tf.float32.size else tf.float32


def best_candidates(
    queries: tf.Tensor,
    part: Part,
    k: int,
    collectives: Collectives | None,
    label: str,
) -> tuple[tf.Tensor, tf.Tensor]:
    """The best candidates of all ranks; all of them must call.

    Args:
        queries: `[n, dim]`; n may differ between the ranks.
        part: what this rank scores.
        k: how many, at most as many as there are candidates.
        collectives: of the strategy.
        label: names the exchanges in errors.

    Returns:
        The scores, `[n, k]`, highest first, and int64 `[n, k]`, the positions
        of the candidates.

    Raises:
        tf.errors.InvalidArgumentError: on every rank, if they ask for
            different numbers, or with queries of different kinds.
    """
    if collectives is None or part.everywhere:
        return _best_here(queries, part, k)
    world_size = collectives.group.world_size
    dim, dtype = queries.shape[-1], queries.dtype.name
    agree(collectives, [f"search {label}: k={k}, queries {dtype} [n, {dim}]"])
    everyone, sizes = collectives.all_gather_parts(queries, f"{label}/queries")
    answers = _best_here(everyone, part, k)
    names = ("scores", "positions")
    scores, positions = (
        _by_query(
            collectives.all_to_all(answer, sizes, f"{label}/{name}")[0],
            (world_size, k),
        )
        for answer, name in zip(answers, names, strict=True)
    )
    # Of equal numbers, `top_k` takes the first.
    order = tf.argsort(positions, axis=1)
    scores = tf.gather(scores, order, batch_dims=1)
    positions = tf.gather(positions, order, batch_dims=1)
    scores, places = tf.math.top_k(scores, k)
    return scores, tf.gather(positions, places, batch_dims=1)


def _by_query(answers: tf.Tensor, sizes: tuple[int, int]) -> tf.Tensor:
    """`[ranks * n, k]`, one rank after the other, as `[n, ranks * k]`."""
    ranks, k = sizes
    queries = tf.shape(answers)[0] // ranks
    answers = tf.reshape(answers, tf.stack([ranks, queries, k]))
    answers = tf.transpose(answers, [1, 0, 2])
    return tf.reshape(answers, tf.stack([queries, ranks * k]))


def _best_here(
    queries: tf.Tensor, part: Part, k: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """The best of a part, filled up with -inf where it has fewer than k."""
    asked, rows = tf.shape(queries)[0], tf.shape(part.rows)[0]
    queries = tf.pad(queries, [[0, -asked % _QUERIES], [0, 0]])
    number = tf.shape(queries)[0]
    block = tf.maximum(CELLS // tf.maximum(number, 1), 1)
    lowest = tf.constant(queries.dtype.as_numpy_dtype("-inf"), queries.dtype)
    nowhere = tf.constant(_NOWHERE, tf.int64)

    def more(
        first: tf.Tensor, scores: tf.Tensor, positions: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """The best of what was found before and of a block of rows."""
        found = tf.matmul(
            queries,
            tf.cast(part.rows[first : first + block], queries.dtype),
            transpose_b=True,
        )
        # Above what fills up, so that it comes before that.
        found = tf.maximum(found, queries.dtype.min)
        # Rows of before come first: their positions are lower.
        scores, places = tf.math.top_k(tf.concat([scores, found], axis=1), k)
        new = tf.gather(part.positions, tf.maximum(first + places - k, 0))
        old = tf.gather(positions, tf.minimum(places, k - 1), batch_dims=1)
        return first + block, scores, tf.where(places < k, old, new)

    shapes = [tf.TensorShape([]), *[tf.TensorShape([None, k])] * 2]
    _, scores, positions = tf.while_loop(
        lambda first, *_: first < rows,
        more,
        (
            tf.constant(0),
            tf.fill(tf.stack([number, k]), lowest),
            tf.fill(tf.stack([number, k]), nowhere),
        ),
        shape_invariants=tuple(shapes),
        parallel_iterations=1,
    )
    return scores[:asked], positions[:asked]


def best_without(
    scores: tf.Tensor, ids: tf.Tensor, exclusions: tf.Tensor, k: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """The best of what is found that are not among some.

    Args:
        scores: `[n, m]`, highest first.
        ids: `[n, m]`, of what has them.
        exclusions: `[n, e]`, ids.
        k: how many, at most m.

    Returns:
        Scores and ids, `[n, k]`; scores are -inf where there are no more.
    """
    hit = tf.equal(ids[:, :, tf.newaxis], exclusions[:, tf.newaxis, :])
    lowest = tf.constant(scores.dtype.as_numpy_dtype("-inf"), scores.dtype)
    scores = tf.where(tf.reduce_any(hit, axis=2), lowest, scores)
    scores, places = tf.math.top_k(scores, k)
    return scores, tf.gather(ids, places, batch_dims=1)


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
        if collectives is not None and pooled_lookup.is_asked():
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
    every, _ = exchanges.all_gather(collectives, mine, "candidates/all")
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


class TableRows:
    """Candidates that are rows of a table, as they are at every search.

    Args:
        variable: a shard, or a variable that every rank has.
        rows: int64 `[n]`, which rows are candidates; None for all in order.
        name: of the layer that searches, for errors.

    Raises:
        ValueError: for rows that the table has not.
    """

    def __init__(self, variable: Any, rows: Any, name: str) -> None:
        self.variable = variable
        self._name = name
        self._places: dict[ShardSpec, tuple[tf.Tensor, tf.Tensor]] = {}
        spec = marks.shard_spec(variable)
        self._size = (spec.rows, spec.dim) if spec else tuple(variable.shape)
        size, self.dim = self._size
        self.rows = None
        self.count = size
        if rows is not None:
            self.rows = np.asarray(rows, np.int64)
            self.count = len(self.rows)
            wrong = self.rows[(self.rows < 0) | (self.rows >= size)]
            if self.rows.ndim != 1 or wrong.size:
                raise ValueError(
                    f"Argument `rows` must be [n] numbers of rows in [0, "
                    f"{size}). Received: shape {self.rows.shape}, with "
                    f"{wrong[:5].tolist()} (layer '{name}')."
                )

    def part(self, collectives: Collectives | None) -> Part:
        """What this rank scores now; all ranks must call."""
        spec = marks.shard_spec(self.variable)
        if spec is None or collectives is None or pooled_lookup.is_asked():
            return self._whole(spec)
        if not tf.executing_eagerly():
            marks.fix(self.variable)  # a graph relies on where rows are
        local = value_of(self.variable).read_value()
        first, end = 0, spec.local_rows
        if spec.column_parts > 1:
            local, first, end = self._full_rows(local, spec, collectives)
        if spec not in self._places:
            with tf.init_scope():
                self._places[spec] = self._placed(spec, first, end)
        chosen, positions = self._places[spec]
        if self.rows is None:
            return Part(local[: tf.size(positions)], positions, False)
        return Part(tf.gather(local, chosen), positions, False)

    def _whole(self, spec: ShardSpec | None) -> Part:
        """All candidates, of a table that is whole here, or where it goes."""
        if pooled_lookup.is_asked():
            whole = TablePlacement.data_parallel()
            name, (rows, dim) = self.variable.name, self._size
            spec = spec or ShardSpec.of(name, rows, dim, whole, 0, 1)
            found = pooled_lookup.all_rows(self.variable, spec)
        else:
            with sharded_variable.reads_allowed():
                found = tf.convert_to_tensor(value_of(self.variable))
        if self.rows is not None:
            found = tf.gather(found, self.rows)
        return Part(found, tf.range(self.count, dtype=tf.int64), True)

    def _placed(
        self, spec: ShardSpec, first: int, end: int
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Which of this rank's rows are candidates, and their positions.

        Args:
            spec: of the rank's part.
            first: the first of the part's local rows that this rank scores.
            end: the one after the last.
        """
        none = np.zeros([0], np.int64)
        if spec.cell is None:
            chosen, positions = none, none
        elif self.rows is None:
            args = (spec.cell[0], spec.row_parts, spec.rows, first, end)
            chosen, positions = none, placement.ids_of_part(*args)
        else:
            local = placement.local_row(self.rows, spec.row_parts)
            part = placement.part_of(self.rows, spec.row_parts)
            mine = (part == spec.cell[0]) & (local >= first) & (local < end)
            chosen, positions = local[mine] - first, np.flatnonzero(mine)
        return tf.constant(chosen, tf.int64), tf.constant(positions, tf.int64)

    def _full_rows(
        self, local: tf.Tensor, spec: ShardSpec, collectives: Collectives
    ) -> tuple[tf.Tensor, int, int]:
        """All columns of some rows, of parts that hold columns.

        The ranks that hold columns of the same rows share these out: each
        gets the other columns of its share. That is fewer numbers than their
        scores would be, and every score is summed in the order of one process.

        Returns:
            `[m, dim]`, and which of the part's local rows they are.
        """
        peers = spec.row_peers
        ends = [
            (i + 1) * spec.local_rows // max(len(peers), 1)
            for i in range(len(peers))
        ]
        # Shares lie, and parts come, in the order of the ranks.
        by_rank = sorted(peers)
        sizes = dict(zip(by_rank, np.diff([0, *ends]), strict=True))
        splits = [
            int(sizes.get(rank, 0)) * spec.local_dim
            for rank in range(spec.world_size)
        ]
        flat, _ = collectives.all_to_all(
            tf.reshape(local, [-1]),
            tf.constant(splits, tf.int64),
            f"{self._name}/columns",
        )
        if spec.cell is None:
            return tf.zeros([0, spec.dim], local.dtype), 0, 0
        share = int(sizes[spec.rank])
        first = ends[by_rank.index(spec.rank)] - share
        widths = {peer: spec.at(peer).local_dim for peer in peers}
        parts = tf.split(flat, [share * widths[p] for p in by_rank])
        by_peer = dict(zip(by_rank, parts, strict=True))
        columns = [tf.reshape(by_peer[p], [share, widths[p]]) for p in peers]
        return tf.concat(columns, axis=1), first, first + share


def variable_of_table(given: Any, table: str | None) -> Any:
    """The table that candidates were given as.

    Args:
        given: a layer, or its variable.
        table: its name, if the layer has several.

    Raises:
        ValueError: for a layer that is not built, or without that table, or a
            table whose vocabulary grows.
    """
    found = _variable_of(given, table)
    _refuse_growing(found)
    return found


def _variable_of(given: Any, table: str | None) -> Any:
    if not isinstance(given, tf.keras.layers.Layer):
        return given
    if not given.built:
        raise ValueError(
            f"Layer '{given.name}', whose rows are candidates, is not built: "
            "call it before, or build it in `strategy.scope()`."
        )
    if not hasattr(given, "get_embedding_tables"):
        return whole_tables.kernel_of(given)
    tables = {
        config.table.name: feature.table for config, feature in given.lookups()
    }
    if table is None and len(tables) == 1:
        (table,) = tables
    if table not in tables:
        raise ValueError(
            f"Argument `table` must name one of the tables of layer "
            f"'{given.name}', {sorted(tables)}. Received: table={table!r}."
        )
    return given.table_variables()[tables[table]]


def _refuse_growing(variable: Any) -> None:
    if marks.keys_of(variable) is not None:
        raise ValueError(
            f"Table '{variable.name}' has a vocabulary that grows: rows "
            "without a key would be candidates too. Give the rows of its keys "
            "(`get_vocabularies`) as a tensor."
        )
