# SPDX-License-Identifier: Apache-2.0
"""Copies of rows that a rank has read in a round of `LocalSteps`.

With `LocalSteps(tables=True)` the rows of tables change only where rounds end.
With `row_cache=True` as well, a rank asks the owner of a row once in a round,
and then answers its lookups from its own copy.

Source: Miao et al., HET: Scaling out Huge Embedding Model Training via
Cache-enabled Distributed Framework, PVLDB 15(2), 2021. There, each row has a
clock of its own; here, all copies are as old as the round.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable

import tensorflow as tf

from tfdist_ext.embedding.feature import Feature
from tfdist_ext.embedding.sharded_variable import local_variable
from tfdist_ext.keras_internals import value_of
from tfdist_ext.type_names import Variable


class _Copies:
    """Copies for one feature.

    Attributes:
        ids: int64 `[n]`, unique ids.
        rows: float32 `[n, dim]`, their rows.
        round: number of the round in which they were read.
    """

    def __init__(self, dim: int) -> None:
        self.ids = local_variable(
            lambda: tf.zeros([0], tf.int64), "ids_of_copies", [None]
        )
        self.rows = local_variable(
            lambda: tf.zeros([0, dim]), "copies_of_rows", [None, dim]
        )
        self.round = local_variable(
            lambda: tf.constant(-1, tf.int64), "round_of_copies"
        )


@dataclasses.dataclass(frozen=True)
class Found:
    """What a rank has of the rows that a batch asks for.

    Attributes:
        missing: int64 `[m]`, ids whose rows must be asked for.
        complete: returns the rows of all ids, float32 `[u, dim]`, when it is
            given those of the missing ids, float32 `[m, dim]`.
        count: counts the rows. Called where the batch is trained.
    """

    missing: tf.Tensor
    complete: Callable[[tf.Tensor], tf.Tensor]
    count: Callable[[], None]


class RowCopies:
    """Copies of rows of all features of a strategy.

    They are used from the second step of a round on. In between, a program
    may evaluate, or assign tables.
    """

    def __init__(self) -> None:
        self._round = local_variable(lambda: tf.zeros([], tf.int64), "round")
        self._open = local_variable(lambda: tf.constant(False), "in_round")
        self._counts = local_variable(
            lambda: tf.zeros([2], tf.float64), "counts_of_copies"
        )
        self._of: dict[
            tuple[int, str], tuple[weakref.ref[Variable], _Copies]
        ] = {}

    def counts(self) -> tf.Tensor:
        """float64 `[2]`, rows asked for in training, and of these found."""
        return self._counts.read_value()

    def open(self) -> None:
        """Notes that a step of a round has ended, and the round goes on."""
        self._open.assign(True)

    def clear(self) -> None:
        """Notes that rows may change: forgets all copies."""
        self._open.assign(False)
        self._round.assign_add(1)

    def find(self, ids: tf.Tensor, feature: Feature, table: Variable) -> Found:
        """Finds the ids of which this rank has copies.

        Args:
            ids: int64 `[u]`, unique ids of a batch.
            feature: the feature that is looked up.
            table: this rank's part of the table.
        """
        copies = self._copies(feature, table)
        usable = self._open.read_value() & tf.equal(
            copies.round.read_value(), self._round.read_value()
        )
        known = copies.ids.read_value()
        count = tf.where(usable, tf.size(known), 0)
        known = known[:count]
        # Copies come first, then missing ids, both in their order.
        unique, places = tf.unique(tf.concat([known, ids], 0))
        places = places[count:]

        def complete(received: tf.Tensor) -> tf.Tensor:
            rows = tf.concat([copies.rows.read_value()[:count], received], 0)
            copies.ids.assign(unique)
            copies.rows.assign(rows)
            copies.round.assign(self._round.read_value())
            return tf.gather(rows, places)

        def note() -> None:
            asked = tf.cast(tf.size(places), tf.float64)
            sent = tf.cast(tf.size(unique) - count, tf.float64)
            self._counts.assign_add(tf.stack([asked, asked - sent]))

        return Found(unique[count:], complete, note)

    def _copies(self, feature: Feature, table: Variable) -> _Copies:
        native = value_of(table)
        key = id(native), feature.name
        if key not in self._of:
            forget = weakref.ref(native, lambda _: self._of.pop(key, None))
            self._of[key] = forget, _Copies(feature.spec.dim)
        return self._of[key][1]
