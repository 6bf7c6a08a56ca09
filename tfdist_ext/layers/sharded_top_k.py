# SPDX-License-Identifier: Apache-2.0
"""An exact search for the best candidates, which are stored on all ranks."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable
from typing import Any
from typing import TypeVar

import numpy as np
import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext.comm import collectives as collectives_lib
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.comm.exchanges import check_same
from tfdist_ext.comm.exchanges import text_of_first_rank
from tfdist_ext.embedding import whole_tables
from tfdist_ext.keras_internals import is_shape_inference
from tfdist_ext.keras_internals import is_symbolic_build
from tfdist_ext.keras_internals import value_of
from tfdist_ext.layers import candidate_rows
from tfdist_ext.layers import faiss_index
from tfdist_ext.layers.candidate_rows import OwnRows
from tfdist_ext.layers.candidate_rows import TableRows
from tfdist_ext.layers.candidate_rows import variable_of_table
from tfdist_ext.patching import Need
from tfdist_ext.patching import hold
from tfdist_ext.saving import served_model
from tfdist_ext.tables import checks
from tfdist_ext.type_names import Config
from tfdist_ext.type_names import Model
from tfdist_ext.type_names import Nest
from tfdist_ext.type_names import TensorLike
from tfdist_ext.type_names import Variable

keras = tf.keras
Method = TypeVar("Method", bound=Callable[..., Any])
# Candidates that are queries where none are given to measure a recall.
_SAMPLED_QUERIES = 1000


def on_all_ranks(method: Method) -> Method:
    """Decorates a method so that an error of one rank ends it on all ranks.

    The method's layer has `_collectives`. Without this, an error of one rank
    before an exchange would leave the other ranks waiting in that exchange.
    """

    @functools.wraps(method)
    def in_joint_call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        collectives = layer._collectives or collectives_lib.active()
        if collectives is None:
            return method(layer, *args, **kwargs)
        what = f"{method.__name__} of '{layer.name}'"
        with collectives.joint_call(what, own_error_first=True):
            return method(layer, *args, **kwargs)

    return in_joint_call  # type: ignore[return-value]


def check_index(
    collectives: Collectives | None,
    name: str,
    candidates: TensorLike,
    **given: object,
) -> None:
    """Checks that all ranks index the same; values of rows are not compared.

    A joint call of all ranks.

    Args:
        collectives: the strategy's collectives; None in one process.
        name: the layer's name.
        candidates: a layer, a variable or rows.
        **given: identifiers and other arguments, compared by their bytes.

    Raises:
        tf.errors.InvalidArgumentError: on every rank, if a rank differs; the
            error names it.
    """
    if collectives is None:
        return
    kind = type(candidates).__name__
    if isinstance(candidates, tf.Tensor):
        kind = f"rows {candidates.dtype.name} {candidates.shape}"
    lines = [f"{key}: {_brief(value)}" for key, value in given.items()]
    check_same(collectives, [f"index '{name}' of {kind}", *lines])


def _brief(given: TensorLike) -> str:
    """Describes values by number, dtype and a hash, to compare them."""
    if given is None or isinstance(given, str):
        return str(given)
    given = tf.convert_to_tensor(given)
    values = np.asarray(given)
    digest = hashlib.blake2b(digest_size=6)
    parts = values.flat if values.dtype == object else [values.tobytes()]
    for part in parts:
        digest.update(b"%d " % len(part) + part)
    return f"{given.dtype.name} {list(values.shape)} {digest.hexdigest()}"


class IndexModel(keras.Model):  # type: ignore[name-defined]
    """A model that calls an index.

    Args:
        index: a `ShardedTopK`.
    """

    def __init__(self, index: ShardedTopK) -> None:
        super().__init__(name=index.name)
        self.index = index

    def call(self, queries: TensorLike) -> Nest:
        """Searches.

        Args:
            queries: queries of the index, see `ShardedTopK.call`.
        """
        return self.index(queries)


_NOT_TRACKED = frozenset(
    ("candidate_embeddings", "_given", "_found", "_strategy", "_asked")
)


@keras.utils.register_keras_serializable(package="tfdist_ext")
class ShardedTopK(keras.layers.Layer):  # type: ignore[name-defined]
    """Finds the k candidates whose rows have the highest products with a query.

    The search is exact, as in `tfrs.layers.factorized_top_k.BruteForce` and
    `keras_rs.layers.BruteForceRetrieval`, and this layer has their methods.
    Candidates are the current rows of a table under any placement, or rows
    that a tower has computed, of which every rank stores a part. Queries are
    sent to the ranks of the candidates, and each rank sends back its k best.
    Equal scores are in the same order as in one process.

    >>> index = ShardedTopK(k=2).index(tf.constant([[1.0], [3.0], [2.0]]))
    >>> scores, ids = index(tf.constant([[1.0], [-1.0]]))
    >>> ids.numpy().tolist()
    [[1, 2], [0, 2]]

    A search is a joint call of all ranks. In `fit`, `evaluate` and `predict`
    they make it jointly; elsewhere each rank must call, with any number of
    queries of its own. A search has no gradient. Candidates from a table are
    saved with that table, and other candidates are not saved.

    Args:
        candidate_embeddings: see `index`; None if `index` is called later.
        candidate_ids: see the argument `identifiers` of `index`.
        k: how many candidates to find.
        return_scores: whether to return scores and ids, or ids only.
        query_model: a model that computes rows of queries; None if queries
            are rows.
        **kwargs: arguments of a Keras layer.

    Raises:
        ValueError: if k is below 1, or ids are given without candidates.
    """

    # XLA cannot compile the exchanges.
    supports_jit = False

    def __init__(
        self,
        candidate_embeddings: TensorLike = None,
        candidate_ids: TensorLike = None,
        k: int = 10,
        return_scores: bool = True,
        query_model: Callable[[Nest], tf.Tensor] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        hold(Need.TABLES, self)
        self.supports_jit = False
        self.k = checks.integer("k", k, 1, f"layer '{self.name}'")
        self.return_scores = return_scores
        if isinstance(query_model, dict):
            query_model = keras.utils.deserialize_keras_object(query_model)
        self.query_model = query_model
        self._collectives: Collectives | None = None
        self._join()
        self._given: TensorLike = None
        self._table: str | None = None
        self._rows: TensorLike = None
        self._found: TableRows | OwnRows | None = None
        self._ids: tf.Tensor | None = None
        self._asked: Nest = None
        if candidate_embeddings is not None:
            self.index(candidate_embeddings, candidate_ids)
        elif candidate_ids is not None:
            raise ValueError(
                "Argument `candidate_ids` needs `candidate_embeddings` "
                f"(layer '{self.name}')."
            )

    def __setattr__(self, name: str, value: object) -> None:
        # A table is a weight of its own layer. Parts of rows are no weights.
        if name in _NOT_TRACKED:
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def _join(self) -> None:
        """Takes the collectives of the strategy in scope, if there is one."""
        if self._collectives is None:
            self._strategy = tf.distribute.get_strategy()
            self._collectives = collectives_lib.active()

    @on_all_ranks
    def __call__(self, *args: Any, **kwargs: Any) -> Nest:
        """Searches, see `call`.

        Args:
            *args: arguments of `call`.
            **kwargs: keyword arguments of `call`.
        """
        return super().__call__(*args, **kwargs)

    @property
    def candidate_embeddings(self) -> TensorLike:
        """The candidates as given to `index`; setting them calls `index`."""
        return self._given

    @candidate_embeddings.setter
    def candidate_embeddings(self, value: TensorLike) -> None:
        self.index(value)

    @on_all_ranks
    def index(
        self,
        candidates: TensorLike,
        identifiers: TensorLike = None,
        *,
        rows: TensorLike = None,
        table: str | None = None,
    ) -> ShardedTopK:
        """Replaces the candidates; a joint call of all ranks.

        Args:
            candidates: a layer of `tfdist_ext.layers` or a Keras Embedding,
                which must be built before the first search, or its variable:
                each search then reads the current rows of its table. Or rows
                `[n, dim]`, equal on all ranks, of which each stores its part.
            identifiers: `[n]`, integers or strings to return for the
                candidates; None returns positions, int64.
            rows: int64 `[n]`, the rows of the table that are candidates; None
                for all rows in order.
            table: the table's name, for a DistributedEmbedding with several
                tables.

        Returns:
            The layer.

        Raises:
            ValueError: if candidates do not have 2 dimensions, or the number
                of identifiers differs.
            tf.errors.InvalidArgumentError: on every rank, if the number or type
                of candidates, or the identifiers, differ between ranks.
        """
        self._join()
        of_layer = isinstance(candidates, keras.layers.Layer)
        of_table = of_layer or hasattr(candidates, "assign")
        if not of_table:
            candidates = tf.convert_to_tensor(candidates)
        given = {"identifiers": identifiers, "rows": rows, "table": table}
        check_index(self._collectives, self.name, candidates, **given)
        if of_table:
            self._hold(candidates, None, identifiers)
            self._table, self._rows = table, rows
            return self
        if rows is not None or table is not None:
            raise ValueError(
                "Arguments `rows` and `table` are for candidates that are a "
                f"layer or its variable. Received: {type(candidates).__name__} "
                f"(layer '{self.name}')."
            )
        candidate_rows.check_rows(candidates, identifiers, self.name)
        mine = candidate_rows.slice_of(candidates, self._collectives)
        found = OwnRows([mine], None, self._collectives)
        self._hold(candidates, found, identifiers)
        return self

    def update_candidates(
        self, candidate_embeddings: TensorLike, candidate_ids: TensorLike = None
    ) -> None:
        """Replaces the candidates: keras-rs's name of `index`.

        Args:
            candidate_embeddings: see the argument `candidates` of `index`.
            candidate_ids: see the argument `identifiers` of `index`.
        """
        self.index(candidate_embeddings, candidate_ids)

    @on_all_ranks
    def index_from_dataset(
        self, candidates: tf.data.Dataset, model: Model = None
    ) -> ShardedTopK:
        """Replaces the candidates from a dataset; a joint call of all ranks.

        Args:
            candidates: batches of rows `[n, dim]`, or of pairs of identifiers
                and rows. Every rank reads all batches and stores its part.
                With a model, batches contain the model's inputs instead of
                rows, and each rank reads and computes only its part.
            model: a model that computes rows of candidates, or None.

        Returns:
            The layer.
        """
        self._join()
        if model is None:
            batches, ids = candidate_rows.of_all_alike(
                candidates, self._collectives
            )
        else:
            strategy = self._strategy
            batches, ids = candidate_rows.of_tower(candidates, model, strategy)
        found = OwnRows(batches, ids, self._collectives)
        self._hold(candidates, found, found.ids)
        return self

    def _hold(
        self, given: TensorLike, found: OwnRows | None, identifiers: TensorLike
    ) -> None:
        old = self._found
        if isinstance(old, OwnRows) and found and old.dim == found.dim:
            # Update the variables, because traced graphs read them.
            old.take(found)
            old.count, found = found.count, old
        self._given, self._found = given, found
        self._table = self._rows = None
        part = found is not None and self._collectives is not None
        self._track(found.variables if found else [], part)
        self._ids = None
        if identifiers is not None:
            with tf.init_scope():
                self._ids = tf.convert_to_tensor(identifiers)

    def _track(self, variables: list[Variable], part: bool) -> None:
        """Tracks the variables of a search for SavedModels, except parts."""
        self._held = _Held()
        if part:
            marks.set_part_of_index(self._held, self.name)
        else:
            self._held.variables = variables

    def _source(self) -> TableRows | OwnRows:
        if self._given is None:
            raise ValueError(
                f"Layer '{self.name}' has no candidates: call its `index`."
            )
        if self._found is None:
            variable = variable_of_table(self._given, self._table)
            if self._collectives is None:
                self._collectives = marks.collectives_of_shard(
                    value_of(variable)
                )
            self._found = TableRows(variable, self._rows, self.name)
            part = marks.shard_spec(variable) is not None
            self._track([value_of(variable)], part)
            candidate_rows.check_ids(self._found.count, self._ids, self.name)
        return self._found

    def call(self, queries: TensorLike, k: int | None = None) -> Nest:
        """Finds candidates for each query.

        Args:
            queries: `[..., dim]`, or inputs of `query_model`.
            k: how many candidates to find; None for the layer's `k`.

        Returns:
            Scores `[..., k]`, highest first, and identifiers `[..., k]`; only
            the identifiers if `return_scores` is False.

        Raises:
            ValueError: if there are fewer than k candidates or none, or if
                their rows have another width than the queries.
        """
        if self._asked is None:
            self._asked = served_model.inputs_of(self, queries)
        scores, ids = self._find(queries, self.k if k is None else k)
        return (scores, ids) if self.return_scores else ids

    def _find(
        self, queries: TensorLike, k: int, excluded: int = 0
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the best k + `excluded` candidates of each query."""
        if self.query_model is not None:
            queries = self.query_model(queries)
        queries = tf.stop_gradient(tf.convert_to_tensor(queries))
        shape = tf.shape(queries)[:-1]
        if is_symbolic_build() or is_shape_inference():
            # No search is run here, and candidates may not be built yet.
            count = k + excluded
            found = tf.zeros([tf.reduce_prod(shape), count], tf.int64)
            scores = tf.cast(
                found, candidate_rows.dtype_of_scores(queries.dtype)
            )
        else:
            count, scores, found = self._search(queries, k, excluded)
        shape = tf.concat([shape, [count]], axis=0)
        static = [*queries.shape[:-1], count]
        scores = tf.ensure_shape(tf.reshape(scores, shape), static)
        ids = tf.reshape(self._named(found), shape)
        return scores, tf.ensure_shape(ids, static)

    def _search(
        self, queries: tf.Tensor, k: int, excluded: int
    ) -> tuple[int, tf.Tensor, tf.Tensor]:
        """Returns the number of results per query, scores and positions."""
        candidates = self._source()
        if k > candidates.count or queries.shape[-1] != candidates.dim:
            raise ValueError(
                f"Layer '{self.name}' has {candidates.count} candidates of "
                f"{candidates.dim} columns. Received: k={k}, queries of shape "
                f"{queries.shape}."
            )
        count = min(k + excluded, candidates.count)
        flat = tf.reshape(queries, [-1, candidates.dim])
        flat = tf.cast(flat, candidate_rows.dtype_of_scores(queries.dtype))
        part = candidates.part(self._collectives)
        scores, positions = candidate_rows.best_candidates(
            flat, part, count, self._collectives, self.name
        )
        # If scores are NaN, a position may be that of an absent candidate.
        return count, scores, tf.minimum(positions, candidates.count - 1)

    def _named(self, positions: tf.Tensor) -> tf.Tensor:
        if self._ids is None:
            return positions
        return tf.gather(self._ids, positions)

    @on_all_ranks
    def query_with_exclusions(
        self, queries: TensorLike, exclusions: TensorLike, k: int | None = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Finds candidates for each query, except excluded ones.

        Args:
            queries: `[n, dim]`, or inputs of `query_model`.
            exclusions: `[n, m]`, identifiers of candidates to exclude.
            k: how many candidates to find; None for the layer's `k`.

        Returns:
            Scores and identifiers, `[n, k]`. Where fewer than k candidates
            remain, the last scores are -inf.
        """
        exclusions = tf.convert_to_tensor(exclusions)
        if exclusions.shape.rank != 2 or exclusions.shape[1] is None:
            raise ValueError(
                "Argument `exclusions` must be [n, m], with m identifiers for "
                f"each query. Received: shape {exclusions.shape} (layer "
                f"'{self.name}')."
            )
        k = self.k if k is None else k
        scores, ids = self._find(queries, k, exclusions.shape[1])
        return candidate_rows.best_without(
            scores, ids, tf.cast(exclusions, ids.dtype), k
        )

    def is_exact(self) -> bool:
        """Returns True, for `tfrs.metrics.FactorizedTopK`."""
        return True

    @on_all_ranks
    def gather(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns all candidates on every rank; a joint call of all ranks.

        Use it to make an index for one process to serve. All candidates must
        fit into the memory of every rank.

        Returns:
            The identifiers `[n]` and the rows `[n, dim]`.
        """
        return self._gathered()

    def _gathered(self) -> tuple[np.ndarray, np.ndarray]:
        found, ranks = self._source(), self._collectives
        if isinstance(found, TableRows):
            rows = whole_tables.gather(found.variable, ranks)
            rows = rows if found.rows is None else rows[found.rows]
        else:
            rows = found.gather(ranks)
        return self._named(tf.range(found.count, dtype=tf.int64)).numpy(), rows

    @on_all_ranks
    def export_faiss(
        self,
        path: str | os.PathLike[str],
        factory: str = "HNSW32",
        queries: TensorLike = None,
        k: int | None = None,
    ) -> dict[str, Any]:
        """Writes an approximate index for faiss; a joint call of all ranks.

        The index finds the largest products, and its results are identifiers.
        Where identifiers are strings, its results are positions in the list
        "identifiers" of the file `PATH.json`. All candidates must fit into the
        memory of every rank. Needs `pip install faiss-cpu`.

        Args:
            path: path of the index file, which rank 0 writes.
            factory: a description for `faiss.index_factory`: "HNSW32" (a
                graph), "IVF1024,Flat" or "IVF1024,PQ16" (clusters, the latter
                compressed), "Flat" (exact).
            queries: float `[q, dim]`, rows of queries that measure the recall,
                best those of real users. None takes up to 1,000 candidates.
            k: how many candidates are compared; None for the layer's k.

        Returns:
            What `PATH.json` contains too: "recall", the share of the k best
            candidates of an exact search that the index finds; "candidates",
            "queries", "k", "dim", "factory", and the index's "bytes".

        Raises:
            ImportError: faiss is not installed, on rank 0.
            ValueError: faiss cannot build the index, or `k` or the shape of
                `queries` is wrong.
            OSError: rank 0 cannot write.
        """
        where = f"layer '{self.name}'"
        identifiers, rows = self._gathered()
        k = checks.integer("k", self.k if k is None else k, 1, where)
        k = min(k, len(rows))
        if queries is None:
            step = -(-len(rows) // _SAMPLED_QUERIES)
            queries = rows[::step]
        queries = np.asarray(queries)
        if queries.ndim != 2 or queries.shape[1:] != rows.shape[1:]:
            raise ValueError(
                f"`queries` must have the shape [q, {rows.shape[1]}] ({where})."
                f" Received: {queries.shape}."
            )
        facts = ""
        if self._collectives is None or self._collectives.group.rank == 0:
            inputs = (identifiers, rows, queries, k)
            facts = json.dumps(
                faiss_index.write(os.fspath(path), factory, *inputs)
            )
        facts = text_of_first_rank(facts, self._collectives, "faiss index")
        result: dict[str, Any] = json.loads(facts)
        return result

    def as_model(self) -> tuple[Model, Nest]:
        """Returns the layer as a Keras model, for `tfdist_ext.export`.

        Returns:
            The model, and the specs of its inputs; None before the first call.
        """
        with self._strategy.scope():
            return IndexModel(self), self._asked

    def get_config(self) -> Config:
        """Returns the arguments that create this layer, without candidates."""
        config: Config = super().get_config()
        config["k"] = self.k
        config["return_scores"] = self.return_scores
        config["query_model"] = self.query_model and (
            keras.utils.serialize_keras_object(self.query_model)
        )
        return config


class _Held(tf.__internal__.tracking.AutoTrackable):
    """An object that tracks variables which are not weights of a layer."""
