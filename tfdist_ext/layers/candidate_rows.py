# SPDX-License-Identifier: Apache-2.0
"""Rows of candidates on their ranks, and the search for the highest scores."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext.comm import exchanges
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.comm.exchanges import check_same
from tfdist_ext.embedding import pooled_lookup
from tfdist_ext.embedding import sharded_variable
from tfdist_ext.embedding import whole_tables
from tfdist_ext.keras_internals import value_of
from tfdist_ext.tables import placement
from tfdist_ext.tables.placement import ShardSpec
from tfdist_ext.tables.placement import TablePlacement
from tfdist_ext.type_names import Model
from tfdist_ext.type_names import TensorLike
from tfdist_ext.type_names import Variable

# Scores that are computed at a time: 64 MB.
CELLS = 1 << 24
# Queries are padded to a multiple of this number. Products of few queries are
# summed in another order, and scores must not depend on the number of queries.
_QUERIES = 16
# The position of an absent candidate; greater than all other positions.
_NOWHERE = tf.int64.max


@dataclasses.dataclass(frozen=True)
class Part:
    """The candidates that a rank scores.

    Attributes:
        rows: the candidates' rows, `[m, dim]`.
        positions: int64 `[m]`, ascending: the position of each candidate among
            all candidates.
        everywhere: whether every rank has all candidates.
    """

    rows: tf.Tensor
    positions: tf.Tensor
    everywhere: bool


def dtype_of_scores(dtype: tf.DType) -> tf.DType:
    """Returns the dtype of scores for queries of a dtype: float32 or wider."""
    return dtype if dtype.size >= tf.float32.size else tf.float32


def best_candidates(
    queries: tf.Tensor,
    part: Part,
    k: int,
    collectives: Collectives | None,
    label: str,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Finds the best candidates of all ranks; a joint call of all ranks.

    Args:
        queries: `[n, dim]`; n may differ between ranks.
        part: the candidates that this rank scores.
        k: how many candidates to find; at most the number of candidates.
        collectives: the strategy's collectives; None in one process.
        label: the name of the exchanges in errors.

    Returns:
        The scores `[n, k]`, highest first, and the positions of the candidates,
        int64 `[n, k]`.

    Raises:
        tf.errors.InvalidArgumentError: on every rank, if the ranks' `k`, or
            the dtype or width of their queries, differ.
    """
    if collectives is None or part.everywhere:
        return _best_here(queries, part, k)
    world_size = collectives.group.world_size
    dim, dtype = queries.shape[-1], queries.dtype.name
    check_same(
        collectives, [f"search {label}: k={k}, queries {dtype} [n, {dim}]"]
    )
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
    # `top_k` returns the first of equal scores, so sort by position before.
    order = tf.argsort(positions, axis=1)
    scores = tf.gather(scores, order, batch_dims=1)
    positions = tf.gather(positions, order, batch_dims=1)
    scores, places = tf.math.top_k(scores, k)
    return scores, tf.gather(positions, places, batch_dims=1)


def _by_query(answers: tf.Tensor, sizes: tuple[int, int]) -> tf.Tensor:
    """Reshapes `[ranks * n, k]`, ordered by rank, to `[n, ranks * k]`."""
    ranks, k = sizes
    queries = tf.shape(answers)[0] // ranks
    answers = tf.reshape(answers, tf.stack([ranks, queries, k]))
    answers = tf.transpose(answers, [1, 0, 2])
    return tf.reshape(answers, tf.stack([queries, ranks * k]))


def _best_here(
    queries: tf.Tensor, part: Part, k: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """Finds the best k candidates of a part; missing ones score -inf."""
    asked, rows = tf.shape(queries)[0], tf.shape(part.rows)[0]
    queries = tf.pad(queries, [[0, -asked % _QUERIES], [0, 0]])
    number = tf.shape(queries)[0]
    block = tf.maximum(CELLS // tf.maximum(number, 1), 1)
    lowest = tf.constant(queries.dtype.as_numpy_dtype("-inf"), queries.dtype)
    nowhere = tf.constant(_NOWHERE, tf.int64)

    def more(
        first: tf.Tensor, scores: tf.Tensor, positions: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Merges the best candidates so far with a block of rows."""
        found = tf.matmul(
            queries,
            tf.cast(part.rows[first : first + block], queries.dtype),
            transpose_b=True,
        )
        # Candidates must score above the -inf of missing ones.
        found = tf.maximum(found, queries.dtype.min)
        # Earlier rows come first, because their positions are lower.
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
    """Finds the best results that are not excluded.

    Args:
        scores: `[n, m]`, highest first.
        ids: `[n, m]`, the ids of the results.
        exclusions: `[n, e]`, the ids to exclude.
        k: how many results to return, at most m.

    Returns:
        Scores and ids, `[n, k]`. Where fewer than k results remain, the last
        scores are -inf.
    """
    hit = tf.equal(ids[:, :, tf.newaxis], exclusions[:, tf.newaxis, :])
    lowest = tf.constant(scores.dtype.as_numpy_dtype("-inf"), scores.dtype)
    scores = tf.where(tf.reduce_any(hit, axis=2), lowest, scores)
    scores, places = tf.math.top_k(scores, k)
    return scores, tf.gather(ids, places, batch_dims=1)


class OwnRows:
    """Candidates that are stored as given, a part of them on every rank.

    They are given in batches, and every rank has some rows of each batch. The
    order is by batch, then by rank. For example, if rank 0 has the batches
    [a b] [e], and rank 1 has [c d] [f], the order is a b c d e f.

    Args:
        batches: this rank's rows of each batch, `[n, dim]`; all ranks have the
            same number of batches.
        ids: the ids of each batch's rows, `[n]`; None if ids are positions.
        collectives: the strategy's collectives; the constructor is a joint
            call of all ranks.

    Raises:
        tf.errors.InvalidArgumentError: on every rank, if the number of batches,
            or the dtype or width of the rows, differ between ranks.
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
            check_same(
                collectives, [f"candidates, {len(sizes)} batches of {kind}"]
            )
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
        """Returns this rank's rows and their positions."""
        return [self._rows, self._positions]

    def take(self, other: OwnRows) -> None:
        """Replaces the candidates; graphs that read the variables stay valid.

        Args:
            other: the new candidates, with the same dtype and width.
        """
        for mine, new in zip(self.variables, other.variables, strict=True):
            mine.assign(new.read_value())
        self._all = None

    def _every(self, collectives: Collectives) -> tf.Variable:
        """Returns all candidates as a variable, for an exported graph.

        They are gathered once, because rank 0 traces such a graph a second
        time without the other ranks.
        """
        if self._all is None:
            with tf.init_scope():
                self._all = _variable(tf.constant(self.gather(collectives)))
        return self._all

    def gather(self, collectives: Collectives | None) -> np.ndarray:
        """Returns all candidates in order; a joint call of all ranks."""
        rows, positions = self.variables
        found = rows.read_value()
        if collectives is None:
            return np.asarray(found)
        return np.asarray(_in_order(found, positions.read_value(), collectives))

    def part(self, collectives: Collectives | None) -> Part:
        """Returns the candidates that this rank scores.

        In an exported model these are all candidates.
        """
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
    # The shape leaves the number of rows open, so that graphs that are already
    # traced can read new candidates.
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
    """Returns the positions of this rank's rows, and the number of all rows."""
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
    """Returns the rows of all ranks, in the order of their positions."""
    if collectives is None:
        return mine
    every, _ = exchanges.all_gather(collectives, mine, "candidates/all")
    places = collectives.all_gather(positions, "candidates/positions")
    return tf.gather(every, tf.argsort(places))


def of_all_alike(
    dataset: tf.data.Dataset, collectives: Collectives | None
) -> tuple[list[tf.Tensor], list[tf.Tensor] | None]:
    """Returns this rank's part of a dataset that every rank reads.

    Args:
        dataset: batches of rows `[n, dim]`, or of pairs of ids and rows.
        collectives: the strategy's collectives.

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
    dataset: tf.data.Dataset, model: Model, strategy: tf.distribute.Strategy
) -> tuple[list[tf.Tensor], list[tf.Tensor] | None]:
    """Computes rows; each rank computes those of its part of the dataset.

    Args:
        dataset: batches of the model's inputs, or of pairs of ids and inputs.
        model: a model that computes rows `[n, dim]`.
        strategy: the strategy; this is a joint call of all its ranks.

    Returns:
        `batches` and `ids` of `OwnRows`.
    """

    @tf.function
    def compute(features: TensorLike) -> tf.Tensor:
        return strategy.run(lambda features: model(features), (features,))

    rows, ids = [], []
    for batch in strategy.experimental_distribute_dataset(dataset):
        *names, features = batch if isinstance(batch, tuple) else (batch,)
        rows.append(compute(features))
        ids += names
    return rows, ids or None


def slice_of(batch: TensorLike, collectives: Collectives | None) -> tf.Tensor:
    """Returns this rank's rows of a batch that is equal on all ranks."""
    batch = tf.convert_to_tensor(batch)
    if collectives is None:
        return batch
    rank, ranks = collectives.group.rank, collectives.group.world_size
    number = int(batch.shape[0])
    return batch[rank * number // ranks : (rank + 1) * number // ranks]


def check_rows(
    candidates: tf.Tensor, identifiers: TensorLike, name: str
) -> None:
    """Checks candidates and their identifiers.

    Raises:
        ValueError: if candidates are not a matrix of floats, or the number of
            identifiers differs. The error names the layer.
    """
    if candidates.shape.rank != 2 or not candidates.dtype.is_floating:
        raise ValueError(
            "Candidates must be floating-point rows [n, dim]. Received: shape "
            f"{candidates.shape}, dtype {candidates.dtype.name} (layer "
            f"'{name}')."
        )
    check_ids(int(candidates.shape[0]), identifiers, name)


def check_ids(count: int, identifiers: TensorLike, name: str) -> None:
    """Checks that there is one identifier for each candidate.

    Raises:
        ValueError: if there are more or fewer. The error names the layer.
    """
    if identifiers is None:
        return
    shape = tuple(tf.convert_to_tensor(identifiers).shape)
    if shape != (count,):
        raise ValueError(
            f"There must be one identifier for each of the {count} "
            f"candidates. Received: shape {shape} (layer '{name}')."
        )


class TableRows:
    """Candidates that are rows of a table; each search reads them anew.

    Args:
        variable: a shard, or a variable that every rank has.
        rows: int64 `[n]`, the rows that are candidates; None for all rows in
            order.
        name: the name of the layer that searches, for errors.

    Raises:
        ValueError: if the table does not have one of the rows.
    """

    def __init__(self, variable: Variable, rows: TensorLike, name: str) -> None:
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
                    f"Argument `rows` must be row numbers [n] in [0, {size}). "
                    f"Received: shape {self.rows.shape}, with "
                    f"{wrong[:5].tolist()} (layer '{name}')."
                )

    def part(self, collectives: Collectives | None) -> Part:
        """Returns the candidates that this rank scores; a joint call."""
        spec = marks.shard_spec(self.variable)
        if spec is None or collectives is None or pooled_lookup.is_asked():
            return self._whole(spec)
        if not tf.executing_eagerly():
            marks.fix(self.variable)  # the graph relies on its placement
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
        """Returns all candidates of an unpartitioned or exported table."""
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
        """Returns which local rows are candidates, and the positions of these.

        Args:
            spec: this rank's part of the table.
            first: the first local row that this rank scores.
            end: the local row after the last one that this rank scores.
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
        """Returns all columns of some rows, from shards that hold columns.

        The ranks that hold columns of the same rows divide these rows among
        themselves. Each receives the missing columns of its share. This sends
        fewer numbers than an exchange of partial scores would, and sums every
        score in the order of one process.

        Returns:
            The rows `[m, dim]`, and the first and end of their local rows.
        """
        peers = spec.row_peers
        ends = [
            (i + 1) * spec.local_rows // max(len(peers), 1)
            for i in range(len(peers))
        ]
        # Shares are in the order of ranks, as are the parts that are received.
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


def variable_of_table(given: Variable, table: str | None) -> Variable:
    """Returns the variable of a table whose rows are candidates.

    Args:
        given: a layer, or its variable.
        table: the table's name; needed if the layer has several tables.

    Raises:
        ValueError: if the layer is not built or does not have the table, or if
            the table has a dynamic vocabulary.
    """
    found = _variable_of(given, table)
    _refuse_growing(found)
    return found


def _variable_of(given: Variable, table: str | None) -> Variable:
    if not isinstance(given, tf.keras.layers.Layer):
        return given
    if not given.built:
        raise ValueError(
            f"Layer '{given.name}', whose rows are the candidates, is not "
            "built. Call it first, or build it in `strategy.scope()`."
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


def _refuse_growing(variable: Variable) -> None:
    if marks.keys_of(variable) is not None:
        raise ValueError(
            f"Table '{variable.name}' has a dynamic vocabulary: rows without "
            "a key would be candidates too. Pass the rows of its keys "
            "(`get_vocabularies`) as a tensor."
        )
