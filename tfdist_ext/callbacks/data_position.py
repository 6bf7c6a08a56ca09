# SPDX-License-Identifier: Apache-2.0
"""The position of `fit` in its data, and how a later `fit` gets there.

Keras passes an iterator to each step. A shuffled dataset gives every iterator
another order. A position is therefore the number of the iterator, and the
number of samples that were read from it. To reach a position, as many iterators
are created, then as many samples are read and dropped. Keras creates some
iterators that it never reads, so iterators are counted when they are created.

Samples are counted, not batches, because the batch size may change between two
runs: `.batch(per_rank * ranks)` at another number of ranks, for example.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
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
from tfdist_ext.type_names import Nest
from tfdist_ext.type_names import Original
from tfdist_ext.type_names import T
from tfdist_ext.type_names import TensorLike


@dataclasses.dataclass
class Position:
    """A position in the data of `fit`.

    Attributes:
        epoch: number of the epoch.
        batch: batches of the epoch that were trained.
        iterators: number of iterators that had been created when the current
            iterator was created, itself included.
        taken: batches read from the current iterator.
        step: batches trained in all epochs.
        samples: samples read from the current iterator by all ranks; None if
            they were not counted.
        stream: position of a `PositionedDataset`, None for other data. The
            iterators and samples then do not count.
    """

    epoch: int = 0
    batch: int = 0
    iterators: int = 0
    taken: int = 0
    step: int = 0
    samples: int | None = None
    stream: dict[str, Any] | None = None


class DataTracker:
    """Follows `fit` through its data, starting at a position.

    Args:
        collectives: collectives of the strategy; None in one process.
        per_call: batches that one call of the train function reads.

    Attributes:
        position: position before the next step.
    """

    def __init__(
        self, collectives: Collectives | None, per_call: int = 1
    ) -> None:
        self.position = Position()
        self._collectives = collectives
        self._per_call = per_call
        self._dataset: Any = None
        self._own_data = False
        self._stream: Any = None
        self._samples: Any = None
        self._made = 0
        self._latest: Iterator[Nest] | None = None
        self._goal: Position | None = None
        self._steps: int | None = None
        self._first = 0
        self._given: Iterator[Nest] | None = None
        self._read: Any = None
        self._once: Iterator[Nest] | None = None

    def watch(
        self, dataset: tf.data.Dataset, own_data: bool
    ) -> tf.data.Dataset:
        """Counts iterators and samples of the first dataset it is called with.

        Args:
            dataset: dataset that Keras reads on this rank.
            own_data: whether each rank reads other samples, rather than its
                part of the same batches.

        Returns:
            The dataset that Keras is to read.
        """
        if self._dataset is not None:
            return dataset
        feed = marks.feed(dataset)
        if feed is not None:
            self._stream = feed.stream
        elif isinstance(dataset, tf.data.Dataset):
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

        def count(*batch: Nest) -> Nest:
            element = batch if len(batch) > 1 else batch[0]
            samples.assign_add(tf.cast(count_samples(element), tf.int64))
            return element

        # Counts when a step asks for its batch, never in advance.
        counted = dataset.map(count, synchronous=True)
        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False
        counted = counted.with_options(options)
        if marks.is_distributed(dataset):
            marks.set_distributed(counted, marks.samples_of(dataset))
        return counted

    def stop(self) -> None:
        """Ends the counting that `watch` began."""
        if self._dataset is not None:
            marks.set_watch(self._dataset, None)

    def count_iterator(self, iterator: Iterator[Nest]) -> None:
        """Counts an iterator that was created."""
        self._made += 1
        self._latest = iterator

    def go_to(self, goal: Position, steps: int | None) -> None:
        """Makes the next `fit` begin at a position.

        Args:
            goal: the position.
            steps: steps of an epoch, None if not known.

        Raises:
            ValueError: the position is in a stream, and the data is not, or the
                other way round.
        """
        if (goal.stream is None) != (self._stream is None):
            saved, now = "other data", "a PositionedDataset"
            if goal.stream is not None:
                saved, now = now, saved
            raise ValueError(
                f"Resume: the checkpoint has a position in {saved}, and `fit` "
                f"now reads {now}. Read the same data, or give Resume another "
                "directory."
            )
        if self._stream is not None:
            self._stream.set_state(goal.stream)
        self._goal, self._steps = goal, steps
        self.position = dataclasses.replace(goal, iterators=0, taken=0)

    def skips(self, first: int, last: int) -> bool:
        """Whether Keras's loop skips a call of the train function.

        The first call of this method in a `fit` also reads the data up to the
        position.

        Args:
            first: first batch of the call, counted in its epoch.
            last: last batch of the call.
        """
        if self._goal is not None:
            goal, self._goal = self._goal, None
            self._first = self._read_up_to(goal)
        return last < self._first

    def _read_up_to(self, goal: Position) -> int:
        """Reads up to a position; returns the next batch of the epoch."""
        self._given = self._latest
        self._begin_iterator(self._latest)
        first = goal.batch
        while self._stream is None and self._made < goal.iterators:
            self._next_iterator()
        same = self.position.iterators == goal.iterators
        if self._stream is None and same and goal.taken:
            self._drop(goal)
            first = goal.batch * self.position.taken // goal.taken
        if self._steps is not None:
            # tf_keras raises an error for an epoch without steps.
            first = max(0, min(first, self._steps - 1))
        return first

    def _drop(self, goal: Position) -> None:
        """Reads and drops the trained samples of the current iterator."""
        ends = np.zeros([1], np.int64)
        counts = goal.samples is not None and self._samples is not None
        batch: Nest = None
        before = ends
        alone = 0  # batches to read before the next exchange of counts
        while (
            alone
            or (counts and ends.sum() < goal.samples)
            or (not counts and self.position.taken < goal.taken)
        ):
            batch = next(self._read, None)
            if batch is None:
                break
            self.position.taken += 1
            alone = max(0, alone - 1)
            if counts and not alone:
                before, ends = ends, self._samples_of_ranks()
            same = ends.sum() * goal.taken == goal.samples
            if self.position.taken == 1 and same:
                alone = max(0, goal.taken - 2)  # one exchange for them
        if counts and ends.sum() > goal.samples:
            return self._cut(goal, batch, ends - before, int(ends.sum()))
        cardinality = -1
        if isinstance(self._dataset, tf.data.Dataset):
            cardinality = int(self._dataset.cardinality())
        if batch is None or self.position.taken == cardinality:
            self._next_iterator()  # the iterator is at its end

    def _cut(
        self, goal: Position, batch: Nest, sizes: np.ndarray, read: int
    ) -> None:
        """Gives the next step the samples of a batch that were not trained.

        Args:
            goal: the position, inside of the batch.
            batch: this rank's part of the batch.
            sizes: samples in the part of each rank.
            read: samples read up to the end of the batch.
        """
        assert goal.samples is not None
        rank = self._collectives.group.rank if self._collectives else 0
        flat = tf.nest.flatten(batch)
        if (
            self._own_data
            or any(isinstance(value, PrefetchedIds) for value in flat)
            or int(count_samples(batch)) != sizes[rank]  # of several batches
        ):
            raise ValueError(
                f"Resume: the checkpoint was made after {goal.taken} batches "
                f"with {goal.samples} samples in all, but a batch now has "
                f"{sizes.sum()} samples. Where each rank reads its own data, "
                "layers prefetch ids or batches vary in size, training can "
                "only continue at the end of a batch. Make batches of "
                f"{goal.samples // goal.taken} samples, as before."
            )
        trained = int(sizes.sum()) - (read - goal.samples)
        start = min(max(trained - int(sizes[:rank].sum()), 0), int(sizes[rank]))
        flat = [_rows(value, start, int(sizes[rank])) for value in flat]
        first = tf.nest.pack_sequence_as(batch, flat)
        found = tf.data.Dataset.from_tensors(first)
        self.position.taken -= 1
        per_call = self._per_call
        if self._steps is not None:
            left = self._steps - goal.batch * self.position.taken // goal.taken
            per_call = min(per_call, left)
        for _ in range(1, per_call):
            more = next(self._read, None)
            if more is None:
                break
            found = found.concatenate(tf.data.Dataset.from_tensors(more))
        self._once = iter(found)

    def _next_iterator(self) -> None:
        self._begin_iterator(iter(self._dataset))

    def _begin_iterator(self, iterator: Iterator[Nest] | None) -> None:
        self._read = iterator
        self.position.iterators = self._made
        self.position.taken = 0
        self._reset_samples()

    def _reset_samples(self) -> None:
        if self._samples is not None:
            self._samples.assign(0)

    def _samples_of_ranks(self) -> np.ndarray:
        """Samples that each rank has read from its current iterator."""
        mine = tf.reshape(self._samples.read_value(), [1])
        if self._collectives is not None:
            mine = self._collectives.all_gather(mine, "resume/samples")
        found: np.ndarray = mine.numpy()
        return found

    def enter(self, iterator: Iterator[Nest], batch: int) -> None:
        """Records which step is next.

        Args:
            iterator: iterator that Keras passes to the step.
            batch: first batch of the step, counted in its epoch.
        """
        if iterator is not self._given:
            self._given = iterator
            self._begin_iterator(iterator)
        self.position.batch = batch

    def counted(self) -> Position:
        """The position, with the samples of all ranks; all ranks must call."""
        if self._stream is not None:
            self.position.stream = self._stream.get_state()
        elif self._samples is not None:
            self.position.samples = int(self._samples_of_ranks().sum())
        return self.position

    def begin_epoch(self, epoch: int) -> None:
        """Records that an epoch begins."""
        self.position.epoch, self.position.batch = epoch, 0
        self._first = 0

    def end(self, epoch: int, one_iterator: bool) -> None:
        """Moves to the position where the next `fit` begins.

        Args:
            epoch: first epoch of that `fit`.
            one_iterator: whether epochs continue with the iterator of the last
                one.
        """
        self.begin_epoch(epoch)
        if not one_iterator:
            self.position.iterators = self._made + 1
            self.position.taken = 0
            self._reset_samples()

    @property
    def iterator(self) -> Iterator[Nest] | None:
        """The iterator that the next step reads."""
        once, self._once = self._once, None
        return self._read if once is None else once

    def trained(self, batches: int) -> None:
        """Records that a step has trained some batches."""
        self.position.batch += batches
        self.position.taken += batches
        self.position.step += batches


def is_own_data(dataset: object) -> bool:
    """Whether ranks read other samples each, not parts of the same batches.

    Args:
        dataset: the dataset, before or after it is distributed.
    """
    if marks.is_distributed(dataset):
        return True
    if not isinstance(dataset, tf.data.Dataset):
        return False
    policies = tf.data.experimental.AutoShardPolicy
    policy = dataset.options().experimental_distribute.auto_shard_policy
    return policy in (policies.FILE, policies.OFF)


def _counted(original: Original[T], dataset: tf.data.Dataset) -> T:
    iterator = original(dataset)
    watch = marks.watch(dataset)
    if watch is not None:
        watch.count_iterator(iterator)
    return iterator


def _rows(value: TensorLike, start: int, stop: int) -> TensorLike:
    """Samples `start` to `stop` of one value of a batch."""
    if isinstance(value, tf.SparseTensor):
        rest = [0] * (len(value.shape) - 1)
        size = [stop - start, *value.dense_shape[1:]]
        return tf.sparse.slice(value, [start, *rest], size)
    if hasattr(value, "nrows") or len(getattr(value, "shape", ())):
        return batches.rows(value, start, stop)
    return value
