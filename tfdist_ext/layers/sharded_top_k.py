# SPDX-License-Identifier: Apache-2.0
"""An exact index of candidates that stay on the ranks that have them."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any
from typing import TypeVar

import numpy as np
import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext.comm import collectives as collectives_lib
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.comm.exchanges import agree
from tfdist_ext.embedding import whole_tables
from tfdist_ext.keras_internals import is_shape_inference
from tfdist_ext.keras_internals import is_symbolic_build
from tfdist_ext.keras_internals import value_of
from tfdist_ext.layers import candidate_rows
from tfdist_ext.layers.candidate_rows import OwnRows
from tfdist_ext.layers.candidate_rows import TableRows
from tfdist_ext.layers.candidate_rows import variable_of_table
from tfdist_ext.patching import Need
from tfdist_ext.patching import hold
from tfdist_ext.saving import served_model
from tfdist_ext.tables import checks

Method = TypeVar("Method", bound=Callable[..., Any])


def on_all_ranks(method: Method) -> Method:
    """Lets a method of a layer with `_collectives` fail on all ranks, or none.

    An error that one rank meets before an exchange would leave the others
    waiting in theirs.
    """

    @functools.wraps(method)
    def together(layer: Any, *args: Any, **kwargs: Any) -> Any:
        collectives = layer._collectives or collectives_lib.active()
        if collectives is None:
            return method(layer, *args, **kwargs)
        what = f"{method.__name__} of '{layer.name}'"
        with collectives.together(what, own_first=True):
            return method(layer, *args, **kwargs)

    return together  # type: ignore[return-value]


def check_index(
    collectives: Collectives | None,
    name: str,
    candidates: Any,
    **given: Any,
) -> None:
    """Compares what the ranks index, but for the numbers in the rows.

    Args:
        collectives: of the strategy; all ranks must call.
        name: of the layer.
        candidates: a layer, a variable or rows.
        **given: identifiers and the like, compared by their bytes.

    Raises:
        tf.errors.InvalidArgumentError: on every rank, naming who differs.
    """
    if collectives is None:
        return
    kind = type(candidates).__name__
    if isinstance(candidates, tf.Tensor):
        kind = f"rows {candidates.dtype.name} {candidates.shape}"
    lines = [f"{key}: {_brief(value)}" for key, value in given.items()]
    agree(collectives, [f"index '{name}' of {kind}", *lines])


def _brief(given: Any) -> str:
    """What tells values from others: their number, dtype and bytes."""
    if given is None or isinstance(given, str):
        return str(given)
    given = tf.convert_to_tensor(given)
    values = np.asarray(given)
    digest = hashlib.blake2b(digest_size=6)
    parts = values.flat if values.dtype == object else [values.tobytes()]
    for part in parts:
        digest.update(b"%d " % len(part) + part)
    return f"{given.dtype.name} {list(values.shape)} {digest.hexdigest()}"


keras = tf.keras


class IndexModel(keras.Model):  # type: ignore[name-defined]
    """Gives what an index finds.

    Args:
        index: a `ShardedTopK`.
    """

    def __init__(self, index: Any) -> None:
        super().__init__(name=index.name)
        self.index = index

    def call(self, queries: Any) -> Any:
        """Searches.

        Args:
            queries: as the index takes them.
        """
        return self.index(queries)


_NOT_TRACKED = frozenset(
    ("candidate_embeddings", "_given", "_found", "_strategy", "_asked")
)


@keras.utils.register_keras_serializable(package="tfdist_ext")
class ShardedTopK(keras.layers.Layer):  # type: ignore[name-defined]
    """Finds the k candidates whose rows have the highest products with a query.

    Exact, as `tfrs.layers.factorized_top_k.BruteForce` and
    `keras_rs.layers.BruteForceRetrieval`, whose methods it has. Candidates are
    the rows of a table, wherever it is, as they are at each search; or rows
    that a tower has computed, a part of them on every rank. Queries travel to
    the candidates and the k best of each rank back, equal scores in the order
    of one process.

    >>> index = ShardedTopK(k=2).index(tf.constant([[1.0], [3.0], [2.0]]))
    >>> scores, ids = index(tf.constant([[1.0], [-1.0]]))
    >>> ids.numpy().tolist()
    [[1, 2], [0, 2]]

    All ranks must search together: in `fit`, `evaluate` and `predict` they do,
    outside of them each calls with its own queries, of any number. A search
    has no gradient. What is in an index is saved with the table that it is
    of, or not at all.

    Args:
        candidate_embeddings: see `index`; None to give them later.
        candidate_ids: see `index`.
        k: how many candidates to find.
        return_scores: whether to return scores and ids, or ids alone.
        query_model: makes the rows of queries, if they are not given.
        **kwargs: of a Keras layer.

    Raises:
        ValueError: for a k below 1, or ids without candidates.
    """

    # XLA cannot compile what the ranks exchange.
    supports_jit = False

    def __init__(
        self,
        candidate_embeddings: Any = None,
        candidate_ids: Any = None,
        k: int = 10,
        return_scores: bool = True,
        query_model: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        hold(Need.TABLES, self)
        self.supports_jit = False
        self.k = checks.integer("k", k, 1, f"layer '{self.name}'")
        self.return_scores = return_scores
        if isinstance(query_model, dict):
            query_model = keras.saving.deserialize_keras_object(query_model)
        self.query_model = query_model
        self._collectives: Collectives | None = None
        self._join()
        self._given: Any = None
        self._table: str | None = None
        self._rows: Any = None
        self._found: TableRows | OwnRows | None = None
        self._ids: tf.Tensor | None = None
        self._asked: Any = None
        if candidate_embeddings is not None:
            self.index(candidate_embeddings, candidate_ids)
        elif candidate_ids is not None:
            raise ValueError(
                "Argument `candidate_ids` needs `candidate_embeddings` "
                f"(layer '{self.name}')."
            )

    def __setattr__(self, name: str, value: Any) -> None:
        # A table is a weight of its own layer, and a part of rows of none.
        if name in _NOT_TRACKED:
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def _join(self) -> None:
        """Searches with the ranks of the strategy in scope, if there is one."""
        if self._collectives is None:
            self._strategy = tf.distribute.get_strategy()
            self._collectives = collectives_lib.active()

    @on_all_ranks
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Searches, see `call`."""
        return super().__call__(*args, **kwargs)

    @property
    def candidate_embeddings(self) -> Any:
        """What the candidates were given as; may be set, see `index`."""
        return self._given

    @candidate_embeddings.setter
    def candidate_embeddings(self, value: Any) -> None:
        self.index(value)

    @on_all_ranks
    def index(
        self,
        candidates: Any,
        identifiers: Any = None,
        *,
        rows: Any = None,
        table: str | None = None,
    ) -> ShardedTopK:
        """Takes other candidates; all ranks must call.

        Args:
            candidates: a layer of `tfdist_ext.layers` or an Embedding of
                Keras's, built by the first search, or its variable; then what
                is found is what its table says at the time. Or rows
                `[n, dim]`, equal on all ranks, of which each keeps its part.
            identifiers: `[n]`, integers or strings, what to return for each
                candidate; None for its position, int64.
            rows: int64 `[n]`, which rows of a table are candidates; None for
                all in order.
            table: its name, for a DistributedEmbedding of several tables.

        Returns:
            The layer.

        Raises:
            ValueError: for candidates of another rank than 2, or another
                number of identifiers.
            tf.errors.InvalidArgumentError: on every rank, if one indexes
                another number or kind of candidates, or other identifiers.
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
        self, candidate_embeddings: Any, candidate_ids: Any = None
    ) -> None:
        """Takes other candidates, by the name that keras-rs has for `index`.

        Args:
            candidate_embeddings: its `candidates`.
            candidate_ids: its `identifiers`.
        """
        self.index(candidate_embeddings, candidate_ids)

    @on_all_ranks
    def index_from_dataset(
        self, candidates: tf.data.Dataset, model: Any = None
    ) -> ShardedTopK:
        """Takes candidates from a dataset; all ranks must call.

        Args:
            candidates: batches of rows `[n, dim]`, or pairs of identifiers
                and rows; every rank reads all and keeps its part. With a
                model, of what that takes instead of rows: then every rank
                reads and computes its part alone.
            model: makes rows of candidates.

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
        self, given: Any, found: OwnRows | None, identifiers: Any
    ) -> None:
        old = self._found
        if isinstance(old, OwnRows) and found and old.dim == found.dim:
            # Functions that search have been traced.
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

    def _track(self, variables: list[Any], part: bool) -> None:
        """Lets a SavedModel find what a search reads, unless it is a part."""
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

    def call(self, queries: Any, k: int | None = None) -> Any:
        """Finds candidates for each query.

        Args:
            queries: `[..., dim]`; or what `query_model` takes.
            k: how many to find; None for the layer's own.

        Returns:
            Scores `[..., k]`, highest first, and identifiers `[..., k]`; or
            these alone.

        Raises:
            ValueError: without candidates, with fewer than k, or with rows
                of another size.
        """
        if self._asked is None:
            self._asked = served_model.inputs_of(self, queries)
        scores, ids = self._find(queries, self.k if k is None else k)
        return (scores, ids) if self.return_scores else ids

    def _find(
        self, queries: Any, k: int, excluded: int = 0
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """The best candidates, and as many more as may be excluded of them."""
        if self.query_model is not None:
            queries = self.query_model(queries)
        queries = tf.stop_gradient(tf.convert_to_tensor(queries))
        shape = tf.shape(queries)[:-1]
        if is_symbolic_build() or is_shape_inference():
            # Nothing is run, and candidates may not be built.
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
        """How many are found for each of `[n, dim]`, scores and positions."""
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
        # Of scores that are no numbers, anything may be found.
        return count, scores, tf.minimum(positions, candidates.count - 1)

    def _named(self, positions: tf.Tensor) -> tf.Tensor:
        if self._ids is None:
            return positions
        return tf.gather(self._ids, positions)

    @on_all_ranks
    def query_with_exclusions(
        self, queries: Any, exclusions: Any, k: int | None = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Finds candidates other than some for each query.

        Args:
            queries: `[n, dim]`; or what `query_model` takes.
            exclusions: `[n, m]`, identifiers that are not to be found.
            k: how many to find; None for the layer's own.

        Returns:
            Scores and identifiers, `[n, k]`. Where fewer than k are left, the
            last scores are -inf.
        """
        exclusions = tf.convert_to_tensor(exclusions)
        if exclusions.shape.rank != 2 or exclusions.shape[1] is None:
            raise ValueError(
                "Argument `exclusions` must be [n, m], with as many for each "
                f"query. Received: shape {exclusions.shape} (layer "
                f"'{self.name}')."
            )
        k = self.k if k is None else k
        scores, ids = self._find(queries, k, exclusions.shape[1])
        return candidate_rows.best_without(
            scores, ids, tf.cast(exclusions, ids.dtype), k
        )

    def is_exact(self) -> bool:
        """True, for `tfrs.metrics.FactorizedTopK`."""
        return True

    @on_all_ranks
    def gather(self) -> tuple[np.ndarray, np.ndarray]:
        """All candidates, on every rank; all ranks must call.

        For an index that one process serves, and for candidates that fit
        into its memory.

        Returns:
            The identifiers `[n]` and the rows `[n, dim]`.
        """
        found, ranks = self._source(), self._collectives
        if isinstance(found, TableRows):
            rows = whole_tables.gather(found.variable, ranks)
            rows = rows if found.rows is None else rows[found.rows]
        else:
            rows = found.gather(ranks)
        return self._named(tf.range(found.count, dtype=tf.int64)).numpy(), rows

    def as_model(self) -> tuple[Any, Any]:
        """The layer as a model of Keras, for `tfdist_ext.export`.

        Returns:
            The model; and specs of what it takes, once it has been called.
        """
        with self._strategy.scope():
            return IndexModel(self), self._asked

    def get_config(self) -> dict[str, Any]:
        """Arguments to make the layer again, without candidates."""
        config: dict[str, Any] = super().get_config()
        config["k"] = self.k
        config["return_scores"] = self.return_scores
        config["query_model"] = self.query_model and (
            keras.saving.serialize_keras_object(self.query_model)
        )
        return config


class _Held(tf.__internal__.tracking.AutoTrackable):
    """Variables that are no weights of a layer."""
