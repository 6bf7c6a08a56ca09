# SPDX-License-Identifier: Apache-2.0
"""Copies of rows that a rank has read, and answers its own lookups from.

With `LocalSteps(tables=True)` the rows of tables change only where rounds end,
so all copies of a round can be used until then. With `SSP` each copy has a
clock, and can be used until it is too old. The gradients of these rows are
added up here as well, and each sum is sent when it is old enough.

Source: Miao et al., HET: Scaling out Huge Embedding Model Training via
Cache-enabled Distributed Framework, PVLDB 15(2), 2021, arXiv:2112.07221.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from tfdist_ext.embedding.feature import Feature
from tfdist_ext.embedding.sharded_variable import local_variable
from tfdist_ext.keras_internals import value_of
from tfdist_ext.type_names import Variable


class _Rows:
    """Rows with an id and a clock each.

    Attributes:
        ids: int64 `[n]`, unique ids.
        values: float32 `[n, dim]`.
        clocks: int64 `[n]`, see `Age`.
    """

    def __init__(self, dim: int, name: str) -> None:
        self.ids = local_variable(
            lambda: tf.zeros([0], tf.int64), f"ids_of_{name}", [None]
        )
        self.values = local_variable(
            lambda: tf.zeros([0, dim]), name, [None, dim]
        )
        self.clocks = local_variable(
            lambda: tf.zeros([0], tf.int64), f"clocks_of_{name}", [None]
        )

    def read(self) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Ids, values and clocks."""
        return (
            self.ids.read_value(),
            self.values.read_value(),
            self.clocks.read_value(),
        )

    def assign(
        self, ids: tf.Tensor, values: tf.Tensor, clocks: tf.Tensor
    ) -> None:
        self.ids.assign(ids)
        self.values.assign(values)
        self.clocks.assign(clocks)


class _Copies:
    """What a rank has for one feature.

    Attributes:
        rows: copies of rows.
        round: number of the round in which they were read.
        sums: sums of gradients that wait, by ascending id. Their clocks are
            the steps that this rank had completed before the first gradient.
    """

    def __init__(self, dim: int) -> None:
        self.rows = _Rows(dim, "copies_of_rows")
        self.sums = _Rows(dim, "sums_of_gradients")
        self.round = local_variable(
            lambda: tf.constant(-1, tf.int64), "round_of_copies"
        )

    def add(
        self, ids: tf.Tensor, gradients: tf.Tensor, age: Age
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Adds gradients to the sums of their rows; see `Found.add`."""
        waiting, sums, clocks = self.sums.read()
        unique, places = tf.unique(tf.concat([waiting, ids], 0))
        count = tf.size(unique)
        sums = tf.math.unsorted_segment_sum(
            tf.concat([sums, gradients], 0), places, count
        )
        new = tf.fill([count - tf.size(waiting)], age.own)
        clocks = tf.concat([clocks, new], 0)
        order = tf.argsort(unique)
        unique, sums, clocks = (
            tf.gather(each, order) for each in (unique, sums, clocks)
        )
        due = clocks <= age.due
        self.sums.assign(
            *(tf.boolean_mask(each, ~due) for each in (unique, sums, clocks))
        )
        return tf.boolean_mask(unique, due), tf.boolean_mask(sums, due)


class Age(NamedTuple):
    """Clocks of copies: numbers of steps of every rank that a row has had.

    Attributes:
        now: int64 scalar, the clock of rows that are asked for now.
        oldest: int64 scalar, the lowest clock of copies that can be used.
        own: int64 scalar, steps that this rank has completed.
        due: int64 scalar; a sum of gradients is sent if this rank had not
            completed more steps when it computed the first of them.
    """

    now: tf.Tensor
    oldest: tf.Tensor
    own: tf.Tensor
    due: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Found:
    """What a rank has of the rows that a batch asks for.

    Attributes:
        missing: int64 `[m]`, ids whose rows must be asked for.
        complete: returns the rows of all ids, float32 `[u, dim]`, when it is
            given those of the missing ids, float32 `[m, dim]`.
        count: counts the rows. Called where the batch is trained.
        add: adds gradients of the rows of all ids, float32 `[u, dim]`, to the
            sums of their rows. Returns the ids and sums that are to be sent
            now, int64 `[n]`, ascending, and float32 `[n, dim]`. Only with
            `Age`.
    """

    missing: tf.Tensor
    complete: Callable[[tf.Tensor], tf.Tensor]
    count: Callable[[], None]
    add: Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]


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

    def find(
        self,
        ids: tf.Tensor,
        feature: Feature,
        table: Variable,
        age: Age | None = None,
    ) -> Found:
        """Finds the ids of which this rank has copies.

        Args:
            ids: int64 `[u]`, unique ids of a batch.
            feature: the feature that is looked up.
            table: this rank's part of the table.
            age: clocks; None if all copies of a round can be used.
        """
        copies = self._copies(feature, table)
        rows = copies.rows
        in_round = self._open.read_value() & tf.equal(
            copies.round.read_value(), self._round.read_value()
        )
        if age is None:
            count = tf.where(in_round, tf.size(rows.ids.read_value()), 0)
        else:
            young = rows.clocks.read_value() >= age.oldest
            chosen = tf.where(young & in_round)[:, 0]
            count = tf.size(chosen)

        def usable(values: tf.Variable) -> tf.Tensor:
            if age is None:
                return values.read_value()[:count]
            return tf.gather(values.read_value(), chosen)

        # Copies come first, then missing ids, both in their order.
        unique, places = tf.unique(tf.concat([usable(rows.ids), ids], 0))
        places = places[count:]

        def complete(received: tf.Tensor) -> tf.Tensor:
            values = tf.concat([usable(rows.values), received], 0)
            # If the exchange fails, the copies stay as they are.
            with tf.control_dependencies([values]):
                if age is not None:
                    new = tf.fill([tf.size(unique) - count], age.now)
                    clocks = tf.concat([usable(rows.clocks), new], 0)
                    rows.clocks.assign(clocks)
                rows.ids.assign(unique)
                rows.values.assign(values)
                copies.round.assign(self._round.read_value())
            return tf.gather(values, places)

        def note() -> None:
            asked = tf.cast(tf.size(places), tf.float64)
            sent = tf.cast(tf.size(unique) - count, tf.float64)
            self._counts.assign_add(tf.stack([asked, asked - sent]))

        def add(gradients: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            assert age is not None
            return copies.add(ids, gradients, age)

        return Found(unique[count:], complete, note, add)

    def take_gradients(
        self, feature: Feature, table: Variable
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the ids and sums of all rows that wait, and forgets them."""
        waiting = self._copies(feature, table).sums
        found = waiting.read()
        with tf.control_dependencies(found):
            waiting.assign(*(each[:0] for each in found))
        ids, sums, _ = found
        return ids, sums

    def _copies(self, feature: Feature, table: Variable) -> _Copies:
        native = value_of(table)
        key = id(native), feature.name
        if key not in self._of:
            forget = weakref.ref(native, lambda _: self._of.pop(key, None))
            self._of[key] = forget, _Copies(feature.spec.dim)
        return self._of[key][1]
