# SPDX-License-Identifier: Apache-2.0
"""The position of `fit` in its data, and how another `fit` gets there.

Keras hands an iterator to each step. A shuffled dataset gives every iterator
another order, so a position is the number of the iterator, and the number of
samples that were read from it. To get there, as many iterators are made, then
as many samples are read and dropped. Keras makes some iterators that it never
reads, so they are counted where they are made.

Samples are counted, not batches, because the size of a batch may be another
one when training goes on: `.batch(per_rank * ranks)` at another number of
ranks, for example.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext import batches
from tfdist_ext import marks
from tfdist_ext.comm.calls import count_samples
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.embedding.prefetched_ids import PrefetchedIds
from tfdist_ext.patching import Need
from tfdist_ext.patching import extend
from tfdist_ext.patching import stage


@dataclasses.dataclass
class Place:
    """A position in the data of `fit`.

    Attributes:
        epoch: its number.
        batch: batches of the epoch that were trained.
        iterators: that had been made when the one was that is read.
        taken: batches of that one.
        step: batches trained in all epochs.
        samples: of that iterator, of all ranks; None if nobody counted.
    """

    epoch: int = 0
    batch: int = 0
    iterators: int = 0
    taken: int = 0
    step: int = 0
    samples: int | None = None


class Walk:
    """Follows `fit` through its data, from a position on.

    Args:
        collectives: of the strategy; None in one process.
        per_call: batches that one call of the train function reads.

    Attributes:
        place: before the step that is next.
    """

    def __init__(
        self, collectives: Collectives | None, per_call: int = 1
    ) -> None:
        self.place = Place()
        self._collectives = collectives
        self._per_call = per_call
        self._dataset: Any = None
        self._own_data = False
        self._samples: Any = None
        self._made = 0
        self._latest: Any = None
        self._goal: Place | None = None
        self._steps: int | None = None
        self._first = 0
        self._given: Any = None
        self._read: Any = None
        self._once: Any = None

    def watch(self, dataset: Any, own_data: bool) -> Any:
        """Counts iterators and samples of a dataset; the first one counts.

        Args:
            dataset: that Keras reads on this rank.
            own_data: whether ranks read other samples each, instead of parts
                of the same batches.

        Returns:
            The dataset that Keras is to read.
        """
        if self._dataset is not None:
            return dataset
        if isinstance(dataset, tf.data.Dataset):
            dataset = self._counting(dataset)
        self._dataset, self._own_data = dataset, own_data
        extend(type(dataset), "__iter__", stage(_counted, Need.STRATEGY))
        marks.set_watch(dataset, self)
        return dataset

    def _counting(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        with tf.init_scope(), tf.device("CPU:0"):
            self._samples = samples = tf.Variable(
                np.int64(0),
                trainable=False,
                synchronization=tf.VariableSynchronization.NONE,
            )

        def count(*batch: Any) -> Any:
            element = batch if len(batch) > 1 else batch[0]
            samples.assign_add(tf.cast(count_samples(element), tf.int64))
            return element

        # When a step asks for its batch, never ahead of it.
        counted = dataset.map(count, synchronous=True)
        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False
        counted = counted.with_options(options)
        if marks.is_distributed(dataset):
            marks.set_distributed(counted, marks.samples_of(dataset))
        return counted

    def leave(self) -> None:
        """Ends what `watch` has begun."""
        if self._dataset is not None:
            marks.set_watch(self._dataset, None)

    def has_made(self, iterator: Any) -> None:
        """Notes that an iterator was made."""
        self._made += 1
        self._latest = iterator

    def go_to(self, goal: Place, steps: int | None) -> None:
        """Lets the next `fit` begin at a position.

        Args:
            goal: the position.
            steps: of an epoch, None if not known.
        """
        self._goal, self._steps = goal, steps
        self.place = dataclasses.replace(goal, iterators=0, taken=0)

    def skips(self, first: int, last: int) -> bool:
        """Whether Keras's loop is to leave out a call of the train function.

        The first call of `fit` also brings the data to the position.

        Args:
            first: batch of the call, in its epoch.
            last: batch of the call.
        """
        if self._goal is not None:
            goal, self._goal = self._goal, None
            self._first = self._arrive(goal)
        return last < self._first

    def _arrive(self, goal: Place) -> int:
        """Reads up to a position; the batch of the epoch that is next."""
        self._given = self._latest
        self._begin_iterator(self._latest)
        while self._made < goal.iterators:
            self._renew()
        first = goal.batch
        if self.place.iterators == goal.iterators and goal.taken:
            self._drop(goal)
            first = goal.batch * self.place.taken // goal.taken
        if self._steps is not None:
            # An epoch of no steps is an error in tf_keras.
            first = max(0, min(first, self._steps - 1))
        return first

    def _drop(self, goal: Place) -> None:
        """Reads the samples of the current iterator that were trained."""
        ends = np.zeros([1], np.int64)
        counts = goal.samples is not None and self._samples is not None
        batch: Any = None
        before = ends
        alone = 0  # batches to read before ranks tell each other their counts
        while (
            alone
            or (counts and ends.sum() < goal.samples)
            or (not counts and self.place.taken < goal.taken)
        ):
            batch = next(self._read, None)
            if batch is None:
                break
            self.place.taken += 1
            alone = max(0, alone - 1)
            if counts and not alone:
                before, ends = ends, self._of_ranks()
            same = ends.sum() * goal.taken == goal.samples
            if self.place.taken == 1 and same:
                alone = max(0, goal.taken - 2)  # one exchange for all of them
        if counts and ends.sum() > goal.samples:
            return self._cut(goal, batch, ends - before, int(ends.sum()))
        cardinality = -1
        if isinstance(self._dataset, tf.data.Dataset):
            cardinality = int(self._dataset.cardinality())
        if batch is None or self.place.taken == cardinality:
            self._renew()  # it has come to its end

    def _cut(
        self, goal: Place, batch: Any, sizes: np.ndarray, read: int
    ) -> None:
        """Gives the next step the samples of a batch that were not trained.

        Args:
            goal: the position, inside of the batch.
            batch: this rank's part of it.
            sizes: of all parts, by rank.
            read: samples up to the end of the batch.
        """
        assert goal.samples is not None
        rank = self._collectives.group.rank if self._collectives else 0
        flat = tf.nest.flatten(batch)
        if (
            self._own_data
            or any(isinstance(value, PrefetchedIds) for value in flat)
            or int(count_samples(batch)) != sizes[rank]  # of many batches
        ):
            raise ValueError(
                f"Resume: the checkpoint was made after {goal.taken} batches "
                f"with {goal.samples} samples together, now there are batches "
                f"of {sizes.sum()} samples. Where each rank reads its own data,"
                " layers prefetch ids or batches vary in size, training can go "
                "on only at the end of a batch. Give batches of "
                f"{goal.samples // goal.taken} samples, as before."
            )
        trained = int(sizes.sum()) - (read - goal.samples)
        start = min(max(trained - int(sizes[:rank].sum()), 0), int(sizes[rank]))
        flat = [_from(value, start, int(sizes[rank])) for value in flat]
        first = tf.nest.pack_sequence_as(batch, flat)
        found = tf.data.Dataset.from_tensors(first)
        self.place.taken -= 1
        per_call = self._per_call
        if self._steps is not None:
            left = self._steps - goal.batch * self.place.taken // goal.taken
            per_call = min(per_call, left)
        for _ in range(1, per_call):
            more = next(self._read, None)
            if more is None:
                break
            found = found.concatenate(tf.data.Dataset.from_tensors(more))
        self._once = iter(found)

    def _renew(self) -> None:
        self._begin_iterator(iter(self._dataset))

    def _begin_iterator(self, iterator: Any) -> None:
        self._read = iterator
        self.place.iterators = self._made
        self.place.taken = 0
        self._count_anew()

    def _count_anew(self) -> None:
        if self._samples is not None:
            self._samples.assign(0)

    def _of_ranks(self) -> np.ndarray:
        """Samples that each rank has read from its current iterator."""
        mine = tf.reshape(self._samples.read_value(), [1])
        if self._collectives is not None:
            mine = self._collectives.all_gather(mine, "resume/samples")
        found: np.ndarray = mine.numpy()
        return found

    def enter(self, iterator: Any, batch: int) -> None:
        """Notes which step is next.

        Args:
            iterator: that Keras has for the step.
            batch: the step's first, in its epoch.
        """
        if iterator is not self._given:
            self._given = iterator
            self._begin_iterator(iterator)
        self.place.batch = batch

    def counted(self) -> Place:
        """The position, with samples of all ranks; all ranks must call."""
        if self._samples is not None:
            self.place.samples = int(self._of_ranks().sum())
        return self.place

    def begin_epoch(self, epoch: int) -> None:
        """Notes that an epoch begins."""
        self.place.epoch, self.place.batch = epoch, 0
        self._first = 0

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
            self._count_anew()

    @property
    def iterator(self) -> Any:
        """What the step is to read."""
        once, self._once = self._once, None
        return self._read if once is None else once

    def trained(self, batches: int) -> None:
        """Notes that a step has trained some batches."""
        self.place.batch += batches
        self.place.taken += batches
        self.place.step += batches


def is_own_data(dataset: Any) -> bool:
    """Whether ranks read other samples each, not parts of the same batches.

    Args:
        dataset: before it is distributed, or after.
    """
    if marks.is_distributed(dataset):
        return True
    if not isinstance(dataset, tf.data.Dataset):
        return False
    policies = tf.data.experimental.AutoShardPolicy
    policy = dataset.options().experimental_distribute.auto_shard_policy
    return policy in (policies.FILE, policies.OFF)


def _counted(original: Any, dataset: Any) -> Any:
    iterator = original(dataset)
    watch = marks.watch(dataset)
    if watch is not None:
        watch.has_made(iterator)
    return iterator


def _from(value: Any, start: int, stop: int) -> Any:
    """Samples of one value of a batch, from `start` on."""
    if isinstance(value, tf.SparseTensor):
        rest = [0] * (len(value.shape) - 1)
        size = [stop - start, *value.dense_shape[1:]]
        return tf.sparse.slice(value, [start, *rest], size)
    if hasattr(value, "nrows") or len(getattr(value, "shape", ())):
        return batches.rows(value, start, stop)
    return value
