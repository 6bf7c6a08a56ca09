# SPDX-License-Identifier: Apache-2.0
"""The ranks of a job, connected to each other."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import pathlib
import sys
from collections.abc import Callable
from collections.abc import Sequence

from tfdist_ext.comm.calls import brief_error
from tfdist_ext.comm.connection import Connection
from tfdist_ext.ops import group_ops

_LIMIT_OF_CONTAINER = pathlib.Path("/sys/fs/cgroup/memory.max")


def default_early_bytes(
    rank: int,
    addresses: Sequence[str],
    container: pathlib.Path = _LIMIT_OF_CONTAINER,
) -> int:
    """Half of a rank's share of its host's memory, in bytes.

    Args:
        rank: number of this process.
        addresses: "host:port" of each rank.
        container: file with the memory limit of this container.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # no container, or "max"
        memory = min(memory, int(container.read_text(encoding="ascii")))
    hosts = [address.rpartition(":")[0] for address in addresses]
    return max(1, memory // (2 * hosts.count(hosts[rank])))


# Variable that sets the form of all sums over ranks, to compare forms.
ALL_REDUCE_VARIABLE = "TFDIST_ALL_REDUCE"
ALL_REDUCE_FORMS = ("direct", "ring", "tree")

Connect = Callable[[], Sequence[Connection | None]]


@dataclasses.dataclass(frozen=True)
class GroupStats:
    """What a process group has done so far.

    Attributes:
        bytes_sent: bytes sent to all ranks, headers and payloads.
        bytes_received: bytes received from all ranks.
        messages_sent: messages sent to all ranks.
        messages_received: messages received from all ranks.
        calls: finished operations.
        writes: system calls, or copies into shared memory, that sent messages;
            one may send many messages that are ready at the same time.
        labels: (calls, bytes sent, seconds from start to end) by label of an
            operation; the seconds of concurrent operations overlap.
        waited: seconds that operations waited for other ranks, by the rank that
            came last; concurrent waits count once.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    calls: int = 0
    writes: int = 0
    labels: dict[str, tuple[int, int, float]] = dataclasses.field(
        default_factory=dict
    )
    waited: tuple[float, ...] = ()


class ProcessGroup:
    """The ranks that take part in exchanges, seen from one of them.

    A group of one rank needs no network and no compiled library.

    Attributes:
        rank: number of this process.
        world_size: number of ranks.
        addresses: "host:port" of each rank, for errors.
        timeout: seconds that an operation may take before it fails on all
            ranks; five times as many while the missing rank is alive and in no
            operation.
        handle: number by which the ops find the group.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        addresses: Sequence[str] = (),
        connect: Connect | None = None,
        timeout: float = 60.0,
        all_reduce: str = "",
        most_early: int = 0,
    ) -> None:
        """Creates a group of connections to all ranks.

        Args:
            rank: number of this process.
            world_size: number of ranks.
            addresses: "host:port" of each rank.
            connect: returns the connections by rank, None for this rank; every
                rank must call it at the same time. Not needed with one rank.
            timeout: seconds that an operation may take.
            all_reduce: "direct", "ring" or "tree" for every `all_reduce`, the
                same on all ranks; by default the size of each decides.
            most_early: bytes that another rank may send before this one
                requests them; by default `default_early_bytes`.

        Raises:
            ValueError: an argument is invalid.
        """
        _check(rank, world_size, addresses, timeout, all_reduce)
        self.rank = rank
        self.world_size = world_size
        self.addresses = tuple(addresses)
        self.timeout = timeout
        self.handle = -1
        if world_size == 1:
            return
        if connect is None:
            raise ValueError(f"{world_size} ranks need a `connect` function.")
        self._process = os.getpid()
        connections = connect()
        self.handle = group_ops.group_open(
            rank,
            self.addresses,
            [each and (each.messages, each.control) for each in connections],
            [
                dataclasses.astuple(each.shared)
                if each and each.shared
                else None
                for each in connections
            ],
            timeout,
            most_early or default_early_bytes(rank, self.addresses),
            all_reduce,
        )
        atexit.register(self._close_at_exit)

    def check_same(self, entries: Sequence[str]) -> None:
        """Compares what the ranks are about to run; all must call this.

        Args:
            entries: one line per operation, the same on all ranks.

        Raises:
            tf.errors.InvalidArgumentError: on every rank, naming the ranks that
                differ from rank 0 and the first differing entry of each.
        """
        if self.world_size > 1:
            group_ops.check_same(self.handle, entries)

    def leave(self, reason: str) -> None:
        """Leaves the current joint call, and sends the reason to all ranks.

        Operations that need this rank end at once on all ranks, with
        `tf.errors.AbortedError` and the reason. The group remains usable for
        operations after each rank has left. No operation of this rank may be
        running, except those of one generation, which end.

        Args:
            reason: what failed on this rank; if another rank has left already,
                its reason is used.
        """
        if self.handle >= 0:
            group_ops.group_leave(self.handle, reason)

    def will_leave(self, leaves: bool) -> None:
        """Announces whether a failure here is followed by `leave`.

        Args:
            leaves: if False, the group ends when a step fails while one of its
                exchanges waits, because the ranks are then at different points
                and must not go on.
        """
        if self.handle >= 0:
            group_ops.group_leaves(self.handle, leaves)

    def left(self) -> tuple[str, bool]:
        """Why another rank has left a joint call that this one has not.

        Returns:
            The reason, empty if no rank has left; and whether an operation of
            this rank has failed with it.
        """
        if self.handle < 0:
            return "", False
        reason, reported, _ = group_ops.group_left(self.handle)
        return reason, reported

    @property
    def generation(self) -> int:
        """How often this rank has left a joint call, see `leave`."""
        if self.handle < 0:
            return 0
        return group_ops.group_left(self.handle)[2]

    def insert_key(self, key: str, value: str) -> None:
        """Sets the value of a key in the key-value store of all ranks.

        Args:
            key: not empty; key and value have at most 998 bytes in sum.
            value: text.

        Raises:
            tf.errors.AlreadyExistsError: the key has a value.
            tf.errors.UnavailableError: rank 0 does not answer.
        """
        group_ops.group_insert_key(self.handle, key, value)

    def await_key(self, key: str, timeout: float = 0.0) -> str:
        """The value of a key, once a rank has inserted it.

        Args:
            key: key to wait for.
            timeout: seconds, 0 for no limit.

        Raises:
            tf.errors.DeadlineExceededError: no rank has inserted it in time.
            tf.errors.UnavailableError: the group has failed.
            tf.errors.CancelledError: the group was closed.
        """
        return group_ops.group_await_key(self.handle, key, timeout)

    @property
    def is_open(self) -> bool:
        """Whether the ranks can still exchange."""
        return self.handle >= 0

    def stats(self) -> GroupStats:
        """Bytes, messages and time of the operations so far."""
        if self.handle < 0:
            return GroupStats()
        return GroupStats(**group_ops.group_stats(self.handle))

    def trace(self, on: bool) -> list[group_ops.Traced]:
        """Starts or stops to record operations; returns those recorded.

        Args:
            on: whether to record from now on.

        Returns:
            See `group_ops.group_trace`; empty for a group of one rank.
        """
        return (
            group_ops.group_trace(self.handle, on) if self.handle >= 0 else []
        )

    def close(self) -> None:
        """Leaves the group; the other ranks see no failure.

        Runs when Python exits, too. A closed group has no statistics.
        """
        self._close("")

    def _close_at_exit(self) -> None:
        # The other ranks are told the error that ended the program. An
        # interactive session continues after an error.
        error = getattr(sys, "last_value", None)
        if error is None or hasattr(sys, "ps1"):
            return self._close("")
        self._close(brief_error(error))

    def _close(self, error: str) -> None:
        if self.handle < 0 or os.getpid() != self._process:
            return  # a forked process is not in the group
        atexit.unregister(self._close_at_exit)
        handle, self.handle = self.handle, -1
        group_ops.group_close(handle, error)

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"ProcessGroup(rank={self.rank}, world_size={self.world_size}, "
            f"addresses={list(self.addresses)}, timeout={self.timeout})"
        )


def _check(
    rank: int,
    world_size: int,
    addresses: Sequence[str],
    timeout: float,
    all_reduce: str,
) -> None:
    if not 0 <= rank < world_size:
        raise ValueError(
            f"rank must be in [0, {world_size}). Received: rank={rank}"
        )
    if world_size > 1 and len(addresses) != world_size:
        raise ValueError(
            f"addresses must name all {world_size} ranks. Received: "
            f"addresses={list(addresses)}"
        )
    if not 0 < timeout < float("inf"):
        raise ValueError(
            f"timeout must be a positive number of seconds. Received: "
            f"timeout={timeout}"
        )
    if all_reduce and all_reduce not in ALL_REDUCE_FORMS:
        raise ValueError(
            f"{ALL_REDUCE_VARIABLE} must be one of "
            f"{', '.join(ALL_REDUCE_FORMS)}, or not set. Received: "
            f"{ALL_REDUCE_VARIABLE}={all_reduce}"
        )
