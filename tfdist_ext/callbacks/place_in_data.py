# SPDX-License-Identifier: Apache-2.0
"""Where `fit` is in its data, and how another one gets there.

Keras hands an iterator to each step. A shuffled dataset gives every iterator
another order, so a place is: the how manyth iterator, and how many batches
of it have been taken. To get there, as many iterators are made, then as many
batches are read and dropped. Keras makes some that it never reads, so they
are counted where they are made.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext.wrapping import wrap


@dataclasses.dataclass
class Place:
    """A place in the data of `fit`.

    Attributes:
        epoch: its number.
        batch: batches of the epoch that were trained.
        iterators: that had been made when the one was that is read.
        taken: batches of that one.
        step: batches trained in all epochs.
    """

    epoch: int = 0
    batch: int = 0
    iterators: int = 0
    taken: int = 0
    step: int = 0


class Walk:
    """Follows `fit` through its data, from a place on.

    Attributes:
        place: before the step that is next.
    """

    def __init__(self) -> None:
        self.place = Place()
        self._dataset: Any = None
        self._made = 0
        self._goal: Place | None = None
        self._given: Any = None
        self._read: Any = None

    def watch(self, dataset: Any) -> None:
        """Counts the iterators of a dataset; the first one counts."""
        if self._dataset is None:
            self._dataset = dataset
            wrap(type(dataset), "__iter__", _counted)
            marks.set_watch(dataset, self)

    def leave(self) -> None:
        """Ends what `watch` has begun."""
        if self._dataset is not None:
            marks.set_watch(self._dataset, None)

    def has_made(self) -> None:
        """Notes that an iterator was made."""
        self._made += 1

    def go_to(self, goal: Place) -> None:
        """Lets the next steps be skipped up to a place."""
        self._goal = goal
        self.place = dataclasses.replace(goal, iterators=0, taken=0)

    def skips(self, iterator: Any, batch: int) -> bool:
        """Whether the step is one that was trained before.

        Args:
            iterator: that Keras has for the step.
            batch: the step's first, in its epoch.
        """
        if iterator is not self._given:
            self._given = self._read = iterator
            self.place.iterators = self._made
            self.place.taken = 0
        goal = self._goal
        if goal is None:
            self.place.batch = batch
            return False
        while self._made < goal.iterators:
            self._renew()
        if self.place.epoch == goal.epoch and batch < goal.batch:
            return True
        if self.place.iterators == goal.iterators:
            self._drop(goal.taken)
        self._goal = None
        self.place.batch = batch
        return False

    def _drop(self, batches: int) -> None:
        cardinality = -1
        if batches and isinstance(self._dataset, tf.data.Dataset):
            cardinality = int(self._dataset.cardinality())
        if 0 <= cardinality <= batches:  # it had come to its end
            return self._renew()
        for _ in range(batches):
            next(self._read)
        self.place.taken = batches

    def _renew(self) -> None:
        self._read = iter(self._dataset)
        self.place.iterators = self._made

    def begin_epoch(self, epoch: int) -> None:
        """Notes that an epoch begins."""
        self.place.epoch, self.place.batch = epoch, 0

    def end(self, epoch: int, one_iterator: bool) -> None:
        """Goes to where another `fit` begins after this one.

        Args:
            epoch: its first.
            one_iterator: whether epochs go on with the iterator of the last.
        """
        self.begin_epoch(epoch)
        if not one_iterator:
            self.place.iterators = self._made + 1
            self.place.taken = 0

    @property
    def iterator(self) -> Any:
        """What the step is to read."""
        return self._read

    def trained(self, batches: int) -> None:
        """Notes that a step has trained some batches."""
        self.place.batch += batches
        self.place.taken += batches
        self.place.step += batches


def _counted(original: Any, dataset: Any) -> Any:
    iterator = original(dataset)
    watch = marks.watch(dataset)
    if watch is not None:
        watch.has_made()
    return iterator
