# SPDX-License-Identifier: Apache-2.0
"""What ranks serve to each other while they run steps of their own.

In a collective all ranks take part at once. With `consistency.SSP` and `BAP`
no rank waits for the others: it sends requests to the owners of rows and of
dense variables, and a thread of each owner answers them.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext.comm.process_group import ProcessGroup
from tfdist_ext.ops import request_ops
from tfdist_ext.type_names import Keywords

_LOG = logging.getLogger("tfdist_ext")
# Seconds between two attempts to serve, after a joint call has failed.
_PAUSE = 0.05
_MOST_TEXT = 2000  # of an error
_STALENESS = 9  # numbers that are shown
_CLOCK = "consistency/clock"
# Tags of collectives are even and come from a hash; this one is taken once.
_CLOCK_TAG = 1

# Answers a message: the rank that sent it, the message, the number sent with
# it, an int64 scalar. Returns the reply.
Handler = Callable[[int, tf.Tensor, tf.Tensor], tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Place:
    """A kind of request, the same on all ranks.

    Attributes:
        tag: tag of the messages.
        label: label in errors and statistics.
        dtype: dtype of the replies.
    """

    tag: int
    label: str
    dtype: tf.DType = tf.uint8


class Requests:
    """Servers of this rank, and the clocks of all ranks.

    The clock of a rank is the number of steps that it has completed.

    Attributes:
        group: process group of the ranks.
        bound: steps that a rank may be ahead of the slowest; None for no
            bound.
        delay: steps for which gradients of rows with copies wait.
        ranks: the number of each rank, int64 scalars.
        steps: int64 variable, the clock of this rank.
        pushed: int64 variable that is written after the updates of a step.
        updating: lock that a handler holds while it reads or writes rows. An
            update is atomic: nothing is read between a row and its slots.
        known_clocks: int64 variable `[world_size]`, the clocks of all ranks, as
            far as this rank has been told.
        staleness: how often an update was computed from values that were so
            many steps old.
        owners: what answers lookups, by the tag of their requests. Graphs of
            steps keep these objects alive, see `keep`.
        assigned: variables that steps of this rank have assigned, to be
            averaged when the ranks synchronize.

    Args:
        group: see the attributes.
        bound: see the attributes.
        delay: see the attributes.
    """

    def __init__(
        self, group: ProcessGroup, bound: int | None, delay: int = 0
    ) -> None:
        self.group = group
        self.delay = delay
        self.updating = threading.Lock()
        self.staleness: collections.Counter[int] = collections.Counter()
        self.owners = weakref.WeakValueDictionary[int, Any]()
        self._kept = weakref.WeakKeyDictionary[tf.Graph, list[object]]()
        self._numbers: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._next = itertools.count()
        self.assigned: dict[int, tf.Variable] = {}
        self.bound = bound
        self._clocks = np.zeros(group.world_size, np.int64)
        self._changed = threading.Condition()
        self._over = False
        self._handlers: dict[int, Handler] = {}
        self._started: set[tuple[int, str]] = set()
        self._waiting: list[tuple[Place, Callable[[], Handler]]] = []
        with tf.device("CPU:0"):
            # Made once: a constant costs as much as the operation that uses it.
            self.ranks = [
                tf.constant(rank, tf.int64) for rank in range(group.world_size)
            ]
            self._no_error = tf.constant("")
            self.steps = tf.Variable(0, trainable=False, dtype=tf.int64)
            self.pushed = tf.Variable(0, trainable=False, dtype=tf.int64)
            self.known_clocks = tf.Variable(
                tf.zeros([group.world_size], tf.int64), trainable=False
            )
            self._samples = tf.Variable(
                tf.zeros([group.world_size]), trainable=False
            )
        self._serve(Place(_CLOCK_TAG, _CLOCK), self._note_clock, False)

    def number_of(self, value: object) -> int:
        """The number of an object, to which no reference is kept.

        It is the same on all ranks if they ask in the same order.
        """
        key = id(value)
        if key not in self._numbers:

            def forget(_: object) -> None:
                self._numbers.pop(key, None)

            reference = weakref.ref(value, forget)
            self._numbers[key] = reference, next(self._next)
        return self._numbers[key][1]

    def keep(self, value: object) -> None:
        """Keeps an object alive as long as a function that is being traced."""
        graph: Any = tf.compat.v1.get_default_graph()
        while hasattr(graph, "outer_graph"):
            self._kept.setdefault(graph, []).append(value)
            graph = graph.outer_graph

    def forget(self, tags: Iterable[int]) -> None:
        """Deletes handlers of requests that no rank sends any more."""
        for tag in tags:
            self._handlers.pop(tag, None)

    def serve(self, place: Place, handler: Handler) -> None:
        """Answers the requests of all ranks from now on.

        Args:
            place: kind of the requests.
            handler: answers them. It replaces an earlier one.
        """
        self._serve(place, handler, True)

    def serve_later(self, place: Place, make: Callable[[], Handler]) -> None:
        """Like `serve`, once `start` is called after the traced step.

        Args:
            place: kind of the requests.
            make: returns the handler; called in the cross-replica context.
        """
        self._waiting.append((place, make))

    def start(self) -> None:
        """Starts to answer what `serve_later` has named."""
        waiting, self._waiting = self._waiting, []
        with tf.init_scope():
            for place, make in waiting:
                self.serve(place, make())

    def _serve(self, place: Place, handler: Handler, replies: bool) -> None:
        self._handlers[place.tag] = handler
        if (place.tag, place.label) in self._started:
            return
        self._started.add((place.tag, place.label))
        for peer in range(self.group.world_size):
            threading.Thread(
                target=self._run,
                args=(place, peer, replies),
                name=f"tfdist_ext {place.label} of rank {peer}",
                daemon=True,
            ).start()

    def _run(self, place: Place, peer: int, replies: bool) -> None:
        """Answers the requests of a rank until the group ends."""
        try:
            while self._answer_next(place, peer, replies):
                pass
        except tf.errors.FailedPreconditionError:
            pass  # The group has just been closed.
        finally:
            self._end()

    def _answer_next(self, place: Place, peer: int, replies: bool) -> bool:
        """Answers a request; returns False once there are no more."""
        where: Keywords = {"tag": place.tag, "label": place.label}
        message, step = request_ops.serve(
            self.group, peer, replies=replies, **where
        )
        number = int(step)
        if number == request_ops.ENDED:
            return False
        if number == request_ops.LEFT:
            time.sleep(_PAUSE)  # Another joint call may follow.
            return True
        error = self._no_error
        try:
            handler = self._handlers.get(place.tag)
            if handler is None:
                raise RuntimeError("the model or optimizer has been deleted")
            values = handler(peer, message, step)
        except Exception as failure:  # The requesting rank raises it.
            text = getattr(failure, "message", None) or str(failure)
            error = tf.constant(f"rank {self.group.rank}: {text}"[:_MOST_TEXT])
            values = tf.zeros([0], place.dtype)
            _LOG.debug("%s", place.label, exc_info=True)
        if replies:
            request_ops.reply(self.group, peer, values, error=error, **where)
        return True

    def _end(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def request(
        self,
        place: Place,
        payload: tf.Tensor,
        splits: tf.Tensor,
        number: tf.Tensor,
        **options: Any,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends messages to all ranks; see `request_ops.request`."""
        return request_ops.request(
            *(self.group, payload, splits, number),
            tag=place.tag,
            label=place.label,
            dtype=place.dtype,
            **options,
        )

    def await_step(self, step: int) -> None:
        """Waits until a rank may read in a step.

        Args:
            step: steps that the rank has completed.

        Raises:
            RuntimeError: the ranks do not exchange any more.
        """
        bound = self.bound
        if bound is None:
            return
        with self._changed:
            self._changed.wait_for(
                lambda: self._over or self._clocks.min() >= step - bound
            )
            if self._over:
                raise RuntimeError("The ranks have stopped exchanging.")

    def _note_clock(
        self, peer: int, message: tf.Tensor, step: tf.Tensor
    ) -> Any:
        with self._changed:
            self._put(self._samples, peer, tf.bitcast(message, tf.float32))
            if int(step) > self._clocks[peer]:
                self._clocks[peer] = int(step)
                self._put(self.known_clocks, peer, step)
                self._changed.notify_all()

    def _put(self, variable: tf.Variable, rank: int, value: tf.Tensor) -> None:
        """Assigns an element in one operation, as it is done in every step."""
        tf.raw_ops.ResourceScatterUpdate(
            resource=variable.handle, indices=self.ranks[rank], updates=value
        )

    def tick(self, samples: tf.Tensor) -> None:
        """Completes a step: after its updates, all ranks are told.

        Args:
            samples: float32 scalar, samples of this rank in the step.
        """
        with tf.control_dependencies([self.pushed.read_value()]):
            step = tf.convert_to_tensor(self.steps.assign_add(1))
        message = tf.bitcast(samples, tf.uint8)
        ranks = self.group.world_size
        self.request(
            Place(_CLOCK_TAG, _CLOCK),
            tf.tile(message, [ranks]),
            tf.fill([ranks], tf.size(message, tf.int64)),
            step,
            replies=False,
        )

    def oldest_clock(self) -> tf.Tensor:
        """Steps of every rank whose updates the owners have applied.

        This rank may not have been told of the last ones. int64 scalar.
        """
        own = tf.one_hot(
            self.group.rank, self.group.world_size, True, False, dtype=tf.bool
        )
        known = tf.where(
            own, self.steps.read_value(), self.known_clocks.read_value()
        )
        return tf.reduce_min(known)

    def share_of(self, samples: tf.Tensor) -> tf.Tensor:
        """This rank's share of a global batch.

        The other ranks' samples are those of the last step that this rank has
        been told of, or as many as its own.

        Args:
            samples: float32 scalar, samples of this rank in the step.
        """
        known = self._samples.read_value()
        others = tf.one_hot(
            self.group.rank, self.group.world_size, False, True, dtype=tf.bool
        )
        known = tf.where(others & (known > 0), known, samples)
        return tf.math.divide_no_nan(samples, tf.reduce_sum(known))

    def counts_of_staleness(self) -> tuple[int, ...]:
        """Updates by their staleness; the last number is that of all above."""
        counts = [0] * _STALENESS
        for steps, count in list(self.staleness.items()):
            counts[min(steps, _STALENESS - 1)] += count
        return tuple(counts)

    def clock(self) -> int:
        """Steps that this rank has completed."""
        return int(self.steps.numpy())

    def reset(self, step: int) -> None:
        """Sets all clocks; all ranks must call, and none is in a step.

        Args:
            step: the same on all ranks.
        """
        self.steps.assign(step)
        with self._changed:
            # A rank that has begun another step may be ahead.
            self._clocks = np.maximum(self._clocks, step)
            self.known_clocks.assign(self._clocks)
            self._changed.notify_all()
