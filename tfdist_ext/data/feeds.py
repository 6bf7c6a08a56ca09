# SPDX-License-Identifier: Apache-2.0
"""Datasets of streams, and the stages that the strategy puts around them.

Two stages run when a step asks for its batch. The first one exchanges plans,
see `plans`. The last one counts the batch as trained, so the position never
includes what was read in advance. A dataset that a program iterates itself has
no such stages, and does not move the position.
"""

from __future__ import annotations

import collections
import json
import time
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.data.plans import Plan
from tfdist_ext.data.plans import Source
from tfdist_ext.data.plans import plans

# Batches that are planned before a step asks for them, so that they are read
# while earlier ones are trained.
_LEAD = 8
# Longest time between two exchanges while the ranks wait for records, and time
# between two looks for records.
_PATIENCE = 0.5
_PAUSE = 0.02
# Longest time that a thread of tf.data waits for a plan. Then it passes on an
# empty batch, a hole, which is dropped. An iterator cannot end before.
_HOLE_SECONDS = 0.1
_WAITING, _ENDED, _NEXT = range(3)
# Batches that tf.data reads in advance.
_PREFETCH = 2


class Reading:
    """What one iterator of a distributed dataset has read.

    Args:
        number: number of the iterator.

    Attributes:
        number: number of the iterator.
        to_train: what moves the position, for each batch that is not trained.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.to_train: collections.deque[Callable[[], None]]
        self.to_train = collections.deque()


class Feed:
    """A dataset of a stream.

    Args:
        stream: the `PositionedDataset`.

    Attributes:
        stream: the stream.
        divides: whether a rank reads only its records of each batch.
    """

    divides = False

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def dataset(self, spec: Any) -> tf.data.Dataset:
        """The dataset, which `distributed` knows by its mark.

        Args:
            spec: nest of specs of a batch.
        """
        found = tf.data.Dataset.from_generator(
            self._batches, output_signature=spec
        )
        marks.set_feed(found, self)
        return found

    def _batches(self) -> Iterator[Any]:
        """Batches of an iterator; the stream says which one that is."""
        raise NotImplementedError

    def _new_reading(self, number: int) -> Reading:
        return Reading(number)

    def _asked(
        self, numbers: tf.data.Dataset, collectives: Any, name: str
    ) -> tf.data.Dataset:
        """An element for each batch, when a step asks for it."""
        return numbers

    def _whole(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """The dataset without holes."""
        return dataset

    def distributed(
        self,
        dataset: tf.data.Dataset,
        collectives: Collectives | None,
        name: str,
    ) -> tf.data.Dataset:
        """Puts the two stages around a dataset.

        Args:
            dataset: the dataset of this feed, maybe mapped and cut for this
                rank.
            collectives: collectives of the strategy; None in one process.
            name: name of the dataset in tags, equal on all ranks.

        Returns:
            A dataset of this rank's batches.
        """
        numbers = (
            tf.data.Dataset.range(1)
            .map(lambda _: _call(self._begin, tf.int64), synchronous=True)
            .flat_map(lambda n: tf.data.Dataset.from_tensors(n).repeat())
        )
        asked = self._asked(numbers, collectives, name)

        def count(number: tf.Tensor, batch: Any) -> Any:
            counted = _call(self._count, tf.bool, number)
            with tf.control_dependencies([counted]):
                return tf.nest.map_structure(
                    tf.identity, batch, expand_composites=True
                )

        # `zip` reads `asked` first, so an iterator begins before its records.
        found = tf.data.Dataset.zip((asked, self._whole(dataset))).map(
            count, synchronous=True
        )
        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False
        options.experimental_warm_start = False
        if dataset.options().autotune.enabled is None:
            options.autotune.enabled = False  # see `strategy.input`
        found = found.with_options(options)
        marks.set_feed(found, self)
        return found

    def _begin(self) -> np.int64:
        return np.int64(self.stream.begin(self._new_reading))

    def _count(self, number: np.int64) -> np.bool_:
        self.stream.reading_of(number).to_train.popleft()()
        return np.bool_(True)


class _PlannedReading(Reading):
    """What one iterator has read, and is to read.

    Attributes:
        planned: the plans, made by rank 0; None on other ranks.
        to_read: plans that the thread of tf.data has not read.
        ahead: number of plans that no step has asked for.
        ended: whether there are no more plans.
        granted: whether a step may have the next batch.
        holes: for each batch that was read, whether it is a hole.
    """

    def __init__(
        self, number: int, planned: Iterator[Plan | None] | None
    ) -> None:
        super().__init__(number)
        self.planned = planned
        self.to_read: collections.deque[Plan] = collections.deque()
        self.ahead = 0
        self.ended = self.granted = False
        self.holes: collections.deque[bool] = collections.deque()

    def offer(self) -> list[Any]:
        """New plans, and None at the end; waits for the first a while."""
        found: list[Any] = []
        if self.planned is None or self.ended:
            return found
        deadline = time.monotonic() + _PATIENCE
        while self.ahead + len(found) < _LEAD:
            try:
                plan = next(self.planned)
            except StopIteration:
                return [*found, None]
            if plan is not None:
                found.append(plan.ranks)
            elif self.ahead + len(found) or time.monotonic() > deadline:
                break
            else:
                time.sleep(_PAUSE)
        return found

    def next_to_read(self) -> Plan | None:
        """The next plan; None if there is none for a while."""
        deadline = time.monotonic() + _HOLE_SECONDS
        while not self.to_read and not self.ended:
            if time.monotonic() > deadline:
                break
            time.sleep(_PAUSE / 10)
        return self.to_read.popleft() if self.to_read else None


class PlannedFeed(Feed):
    """Batches of records by the plans of rank 0.

    Args:
        stream: the `PositionedDataset`.
        source: where its records are.
        **options: arguments of `plans`: `batch_size`, `wait` and `linger`.

    Raises:
        ValueError: an option is out of range.
    """

    divides = True

    def __init__(self, stream: Any, source: Source, **options: Any) -> None:
        super().__init__(stream)
        size, wait = options["batch_size"], options["wait"]
        if not isinstance(size, int) or size < 1:
            raise ValueError(
                "Argument `batch_size` of `batches` must be the number of "
                f"records of a batch. Received: batch_size={size!r}"
            )
        if not (wait >= 0 and options["linger"] >= 0):
            raise ValueError(
                "Arguments `wait` and `linger` of `batches` are seconds of at "
                f"least 0. Received: wait={wait}, linger={options['linger']}"
            )
        self._source = source
        self._options = options
        self._rank, self._world_size = 0, 1

    def distributed(
        self,
        dataset: tf.data.Dataset,
        collectives: Collectives | None,
        name: str,
    ) -> tf.data.Dataset:
        """See `Feed.distributed`."""
        if collectives is not None:
            self._rank = collectives.group.rank
            self._world_size = collectives.group.world_size
        return super().distributed(dataset, collectives, name)

    def _new_reading(self, number: int) -> Reading:
        planned = self._plans(self._world_size) if self._rank == 0 else None
        return _PlannedReading(number, planned)

    def _plans(self, world_size: int) -> Iterator[Plan | None]:
        return plans(
            self._source, self.stream.offsets, world_size, **self._options
        )

    def _batches(self) -> Iterator[Any]:
        reading = self.stream.invited()
        if reading is None:  # an iterator of the program itself
            for plan in self._plans(1):
                if plan is None:
                    time.sleep(_PAUSE)
                else:
                    yield self._source.read(plan.ranks[0])
            return
        while self.stream.is_current(reading):
            plan = reading.next_to_read()
            if plan is None and reading.ended:
                return
            ranges = plan.ranks[self._rank] if plan is not None else []
            batch = self._source.read(ranges)
            reading.holes.append(plan is None)
            yield batch

    def _asked(
        self, numbers: tf.data.Dataset, collectives: Any, name: str
    ) -> tf.data.Dataset:
        def ask(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            text = _call(self._offer, tf.uint8, number)
            text.set_shape([None])
            if collectives is not None:
                text = collectives.all_gather(text, f"{name}/plans")
            return number, _call(self._accept, tf.int32, number, text)

        return (
            numbers.map(ask, synchronous=True)
            .filter(lambda _, told: told != _WAITING)
            .take_while(lambda _, told: told == _NEXT)
            .map(lambda number, _: number, synchronous=True)
        )

    def _whole(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        return (
            dataset.prefetch(_PREFETCH)
            .map(self._with_hole, synchronous=True)
            .filter(lambda hole, _: tf.logical_not(hole))
            .map(lambda _, b: b if len(b) > 1 else b[0], synchronous=True)
        )

    def _offer(self, number: np.int64) -> np.ndarray:
        try:
            offered: Any = self.stream.reading_of(number).offer()
        except Exception as error:  # raised on all ranks by `_accept`
            offered = f"{type(error).__name__}: {error}"
        return np.frombuffer(json.dumps(offered).encode() + b"\n", np.uint8)

    def _accept(self, number: np.int64, text: np.ndarray) -> np.int32:
        reading = self.stream.reading_of(number)
        for rank, line in enumerate(text.tobytes().splitlines()):
            offered = json.loads(line)
            if isinstance(offered, str):
                self.stream.invited()  # nobody is to read
                raise RuntimeError(f"rank {rank}: {offered}")
            for ranks in offered:
                if ranks is None:
                    reading.ended = True
                    continue
                plan = Plan([[tuple(each) for each in of] for of in ranks])
                reading.to_train.append(
                    lambda plan=plan: plan.move(self.stream.offsets)
                )
                reading.to_read.append(plan)
                reading.ahead += 1
        if reading.ahead:
            reading.ahead -= 1
            reading.granted = True
            return np.int32(_NEXT)
        if not reading.ended:
            return np.int32(_WAITING)
        self.stream.invited()  # nobody is to read, if there was no batch
        return np.int32(_ENDED)

    def _with_hole(self, *batch: Any) -> Any:
        return _call(self._is_hole, tf.bool), batch

    def _is_hole(self) -> np.bool_:
        reading = self.stream.current
        if not reading.granted:
            # `zip` reads on after an error, such as that of another rank.
            raise RuntimeError("no batch was planned for this step")
        hole = reading.holes.popleft()
        reading.granted = hole
        return np.bool_(hole)


def _call(
    function: Callable[..., Any], dtype: tf.DType, *arguments: tf.Tensor
) -> tf.Tensor:
    """Calls Python in each step; it returns a scalar, or an array of bytes."""
    found = tf.numpy_function(function, arguments, dtype)
    if dtype != tf.uint8:
        found.set_shape([])
    return found


class PlannedSource(Source):
    """Base class of the sources whose batches rank 0 plans."""

    def feed(self, stream: Any, batch_size: Any, **options: float) -> Feed:
        """The feed of a stream of this source.

        Args:
            stream: the `PositionedDataset`.
            batch_size: records of a batch.
            **options: other arguments of `batches`.
        """
        return PlannedFeed(stream, self, batch_size=batch_size, **options)
