# SPDX-License-Identifier: Apache-2.0
"""What ranks serve to each other while they run steps of their own.

In a collective all ranks take part at once. With `consistency.SSP` and `BAP`
no rank waits for the others: it sends requests to the owners of rows and of
dense variables, and each owner answers them. A TensorFlow function receives,
answers and replies in a loop, because each call of a function from Python
would take longer than most answers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
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
# Seconds between two attempts to serve, after a joint call or an answer has
# failed.
_PAUSE = 0.05
_MOST_TEXT = 2000  # of an error
_SHOWN = 9  # numbers of staleness in logs
_MOST_STALE = 1024  # the last number counts all above
_CLOCK = "consistency/clock"
# Tags of collectives are even and come from a hash; this one is taken once.
_CLOCK_TAG = 1

# Answers a message, in a TensorFlow function: the rank that sent it and the
# number sent with it, int64 scalars, and the message between them. Returns the
# reply.
Handler = Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Place:
    """A kind of request, the same on all ranks.

    Attributes:
        tag: tag of the messages.
        label: label in errors and statistics.
        dtype: dtype of the replies.
        bounded: whether a request waits for ranks that are too far behind.
    """

    tag: int
    label: str
    dtype: tf.DType = tf.uint8
    bounded: bool = False


@dataclasses.dataclass(frozen=True)
class _Server:
    """What answers the requests of a kind.

    Attributes:
        number: number of the handler.
        answer: answers the requests of a rank until there are no more; it is
            given the rank and the number. None once the handler is deleted.
    """

    number: int
    answer: Callable[[tf.Tensor, tf.Tensor], tf.Tensor] | None


class Requests:
    """Servers of this rank, and the clocks of all ranks.

    The clock of a rank is the number of steps that it has completed.

    Attributes:
        group: process group of the ranks.
        bound: steps that a rank may be ahead of the slowest; None for no
            bound.
        delay: steps for which gradients of rows with copies wait.
        steps: int64 variable, the clock of this rank.
        pushed: int64 variable that is written after the updates of a step.
        known_clocks: int64 variable `[world_size]`, the clocks of all ranks, as
            far as this rank has been told.
        staleness: int64 variable `[n]`, how often an update was computed from
            values that were so many steps old.
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
        self.owners = weakref.WeakValueDictionary[int, Any]()
        self._kept = weakref.WeakKeyDictionary[tf.Graph, list[object]]()
        self._numbers: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._next = itertools.count()
        self.assigned: dict[int, tf.Variable] = {}
        self.bound = bound
        self._servers: dict[int, _Server] = {}
        self._started: set[tuple[int, str]] = set()
        self._waiting: list[tuple[Place, Callable[[], Handler]]] = []
        self.steps = _zeros([])
        self.pushed = _zeros([])
        self.known_clocks = _zeros([group.world_size])
        self._samples = _zeros([group.world_size], tf.float32)
        self.staleness = _zeros([_MOST_STALE])
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

    def forget_with(self, value: object, tags: Iterable[int]) -> None:
        """Deletes handlers once an object is deleted.

        Args:
            value: the object, to which no reference is kept.
            tags: tags of requests that no rank sends any more then. They are
                read at that time.
        """

        def forget() -> None:
            with tf.init_scope():
                for tag in list(tags):
                    self._set_server(tag, None)

        finalizer: Any = weakref.finalize(value, forget)
        finalizer.atexit = False

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
        with tf.init_scope():
            self._set_server(place.tag, self._loop(place, handler, replies))
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

    def _set_server(
        self,
        tag: int,
        answer: Callable[[tf.Tensor, tf.Tensor], tf.Tensor] | None,
    ) -> None:
        before = self._servers.get(tag)
        number = before.number + 1 if before else 0
        self._servers[tag] = _Server(number, answer)
        # The group may be closed.
        with contextlib.suppress(tf.errors.FailedPreconditionError):
            request_ops.set_handler(self.group, number, tag=tag)

    def _loop(
        self, place: Place, handler: Handler, replies: bool
    ) -> tf.types.experimental.ConcreteFunction:
        """Returns a function that answers the requests of a rank in a loop."""
        group = self.group
        where: Keywords = {"tag": place.tag, "label": place.label}
        serve = _server_of(place, group, self.bound, replies)
        scalar = tf.TensorSpec([], tf.int64)
        # A function of its own: its results wait for all that it writes.
        handle = tf.function(handler, autograph=False).get_concrete_function(
            scalar, tf.TensorSpec([None], tf.uint8), scalar
        )

        def run(peer: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
            def answer(
                message: tf.Tensor, step: tf.Tensor
            ) -> tuple[tf.Tensor, tf.Tensor]:
                with tf.device(None):
                    values = handle(peer, message, step)
                done = values
                if replies:
                    done = request_ops.reply(group, peer, values, **where)
                with tf.control_dependencies([done]):
                    return serve(peer, number)

            _, step = tf.while_loop(
                lambda _, step: step >= 0,
                answer,
                serve(peer, number),
                parallel_iterations=1,
            )
            return step

        with tf.device("CPU:0"):
            traced = tf.function(run, autograph=False)
            return traced.get_concrete_function(scalar, scalar)

    def _run(self, place: Place, peer: int, replies: bool) -> None:
        """Answers the requests of a rank until the group ends."""
        with tf.device("CPU:0"):
            rank = tf.constant(peer, tf.int64)
        try:
            while self._answer(place, rank, replies):
                pass
        except tf.errors.FailedPreconditionError:
            pass  # The group has just been closed.

    def _answer(self, place: Place, rank: tf.Tensor, replies: bool) -> bool:
        """Answers requests of a rank; returns False once there are no more."""
        server = self._servers[place.tag]
        number = tf.constant(server.number, tf.int64)
        text = "the model or optimizer has been deleted"
        try:
            if server.answer is not None:
                step = server.answer(rank, number)
            else:
                serve = _server_of(place, self.group, self.bound, replies)
                _, step = serve(rank, number)
        except tf.errors.OpError as failure:  # The requesting rank raises it.
            if not replies:
                raise
            text = failure.message
            _LOG.debug("%s", place.label, exc_info=True)
            step = tf.constant(0, tf.int64)
        ended = int(step)
        if ended == request_ops.LEFT:
            time.sleep(_PAUSE)  # Another joint call may follow.
        if ended >= 0 and replies:  # The message was not answered.
            request_ops.reply(
                *(self.group, rank, tf.zeros([0], place.dtype)),
                tag=place.tag,
                label=place.label,
                error=f"rank {self.group.rank}: {text}"[:_MOST_TEXT],
            )
            time.sleep(_PAUSE)
        return ended != request_ops.ENDED

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

    def _note_clock(
        self, peer: tf.Tensor, message: tf.Tensor, step: tf.Tensor
    ) -> tf.Tensor:
        samples = tf.bitcast(message, tf.float32)
        tf.raw_ops.ResourceScatterUpdate(
            resource=self._samples.handle, indices=peer, updates=samples
        )
        done = self._set_clock(peer, step)
        with tf.control_dependencies(done):
            return tf.identity(step)

    def _set_clock(
        self, peer: tf.Tensor, step: tf.Tensor
    ) -> list[tf.Operation]:
        return [
            tf.raw_ops.ResourceScatterMax(
                resource=self.known_clocks.handle, indices=peer, updates=step
            ),
            request_ops.set_clock(self.group, peer, step),
        ]

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

    def count_update(self, steps: tf.Tensor) -> None:
        """Counts an update, in a handler.

        Args:
            steps: int64 scalar, how many steps old the values are that it was
                computed from.
        """
        tf.raw_ops.ResourceScatterAdd(
            resource=self.staleness.handle,
            indices=tf.minimum(steps, _MOST_STALE - 1),
            updates=tf.constant(1, tf.int64),
        )

    def updates_by_staleness(self) -> dict[int, int]:
        """Updates by how many steps old the values were they are of."""
        counts = self.staleness.numpy()
        return {int(i): int(counts[i]) for i in np.flatnonzero(counts)}

    def counts_of_staleness(self) -> tuple[int, ...]:
        """Updates by their staleness; the last number is that of all above."""
        counts = [0] * _SHOWN
        for steps, count in self.updates_by_staleness().items():
            counts[min(steps, _SHOWN - 1)] += count
        return tuple(counts)

    def clock(self) -> int:
        """Steps that this rank has completed."""
        return int(self.steps.numpy())

    def reset(self, step: int) -> None:
        """Sets all clocks; all ranks must call, and none is in a step.

        A rank that has begun another step may be ahead.

        Args:
            step: the same on all ranks.
        """
        self.steps.assign(step)
        for rank in range(self.group.world_size):
            self._set_clock(
                tf.constant(rank, tf.int64), tf.constant(step, tf.int64)
            )


class Updates:
    """Counts updates, and how many of them each rank knows.

    To be used in handlers, one of which runs at a time.
    """

    def __init__(self, world_size: int) -> None:
        self._count = _zeros([])
        self._known = _zeros([world_size])

    def add(self) -> None:
        """Counts an update."""
        self._count.assign_add(1)

    def set_known(self, peer: tf.Tensor) -> None:
        """A rank, an int64 scalar, is given values with all updates so far."""
        tf.raw_ops.ResourceScatterUpdate(
            resource=self._known.handle,
            indices=peer,
            updates=self._count.read_value(),
        )

    def unknown_to(self, peer: tf.Tensor) -> tf.Tensor:
        """Updates since values were given to a rank, int64 scalars."""
        known = tf.gather(self._known.read_value(), peer)
        return self._count.read_value() - known


def _zeros(shape: list[int], dtype: tf.DType = tf.int64) -> tf.Variable:
    """Creates a variable of this rank, in the memory of the host."""
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.Variable(
            tf.zeros(shape, dtype),
            trainable=False,
            synchronization=tf.VariableSynchronization.NONE,
        )


def _server_of(
    place: Place, group: ProcessGroup, bound: int | None, replies: bool
) -> Callable[[tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor]]:
    """Returns what receives the next message of a rank for a handler."""
    return functools.partial(
        request_ops.serve,
        group,
        tag=place.tag,
        label=place.label,
        replies=replies,
        bound=bound if place.bounded else None,
    )
