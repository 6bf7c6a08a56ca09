# SPDX-License-Identifier: Apache-2.0
"""Where `fit` is in its data, and how another one gets there.

Keras hands an iterator to each step. A shuffled dataset gives every iterator
another order, so a place is: the how manyth iterator, and how many batches
of it have been taken. To get there, as many iterators are made, then as many
batches are read and dropped.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf


@dataclasses.dataclass
class Place:
    """A place in the data of `fit`.

    Attributes:
        epoch: its number.
        batch: batches of the epoch that were trained.
        iterators: that were made so far, the last of which is read.
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
        dataset: of which iterators are made, once it is known.
    """

    def __init__(self) -> None:
        self.place = Place()
        self.dataset: Any = None
        self._goal: Place | None = None
        self._given: Any = None
        self._read: Any = None

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
            self.place.iterators += 1
            self.place.taken = 0
        goal = self._goal
        if goal is None:
            self.place.batch = batch
            return False
        while self.place.iterators < goal.iterators:
            self._read = iter(self.dataset)
            self.place.iterators += 1
        if self.place.epoch == goal.epoch and batch < goal.batch:
            return True
        if self.place.iterators == goal.iterators:
            self._drop(goal.taken)
        self._goal = None
        self.place.batch = batch
        return False

    def _drop(self, batches: int) -> None:
        cardinality = -1
        if batches and isinstance(self.dataset, tf.data.Dataset):
            cardinality = int(self.dataset.cardinality())
        if 0 <= cardinality <= batches:  # it had come to its end
            self._read = iter(self.dataset)
            self.place.iterators += 1
            return
        for _ in range(batches):
            next(self._read)
        self.place.taken = batches

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
            self.place.iterators += 1
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
