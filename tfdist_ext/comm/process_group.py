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
from typing import Any

from tfdist_ext.comm.calls import brief_error
from tfdist_ext.comm.connection import Connection
from tfdist_ext.ops import group_ops

_LIMIT_OF_CONTAINER = pathlib.Path("/sys/fs/cgroup/memory.max")


def default_early_bytes(
    rank: int,
    addresses: Sequence[str],
    container: pathlib.Path = _LIMIT_OF_CONTAINER,
) -> int:
    """Returns half of a rank's share of the memory of its host.

    Args:
        rank: of this process.
        addresses: "host:port" of each rank.
        container: file with the memory that this container may use.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # no container, or "max"
        memory = min(memory, int(container.read_text(encoding="ascii")))
    hosts = [address.rpartition(":")[0] for address in addresses]
    return max(1, memory // (2 * hosts.count(hosts[rank])))


# Which form all sums over ranks take, for comparing them.
ALL_REDUCE_VARIABLE = "TFDIST_ALL_REDUCE"
ALL_REDUCE_FORMS = ("direct", "ring", "tree")

Connect = Callable[[], Sequence[Connection | None]]


@dataclasses.dataclass(frozen=True)
class GroupStats:
    """What a process group has done so far.

    Attributes:
        bytes_sent: to all ranks together, headers and payloads.
        bytes_received: likewise.
        messages_sent: to all ranks together.
        messages_received: likewise.
        calls: operations finished.
        writes: calls of the system, or copies into memory that ranks share,
            by which messages left; many of them together where they were
            ready together.
        labels: by label of an operation (calls, bytes sent, seconds from its
            start to its end; those of operations at once overlap).
        waited: seconds that operations waited for ranks to come, by the rank
            that came last; those that wait at once wait once.
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
    """The ranks that take part in collectives, seen from one of them.

    A group of one rank needs no network and no compiled library.

    Attributes:
        rank: of this process.
        world_size: number of ranks.
        addresses: "host:port" of each rank, which errors name.
        timeout: seconds an operation may take before it fails everywhere;
            five times that while a rank is alive and in no operation.
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
        """Makes a group of connections to all ranks.

        Args:
            rank: of this process.
            world_size: number of ranks.
            addresses: "host:port" of each rank.
            connect: returns by rank what joins this one to it, None for this
                rank; every rank must call it at the same time. Not needed
                with one rank.
            timeout: seconds, of every operation.
            all_reduce: "direct", "ring" or "tree" for every `all_reduce`, the
                same on all ranks; by default each is chosen by its bytes.
            most_early: bytes that another rank may send before this one asks
                for them; by default as many as `default_early_bytes`.

        Raises:
            ValueError: a bad argument.
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
            tf.errors.InvalidArgumentError: on every rank, naming those that
                differ from rank 0 and the first differing entry of each.
        """
        if self.world_size > 1:
            group_ops.check_same(self.handle, entries)

    def leave(self, reason: str) -> None:
        """Gives up what the ranks do together now, and tells them why.

        Operations that need this rank end at once on all of them, with
        `tf.errors.AbortedError` and the reason. The group stays usable:
        the ranks meet again in the operations after each has left. None of
        this rank's may run.

        Args:
            reason: what failed here; if another rank has left already, its
                reason counts.
        """
        if self.handle >= 0:
            group_ops.group_leave(self.handle, reason)

    def will_leave(self, leaves: bool) -> None:
        """Says whether `leave` is called if what this rank does now fails.

        Args:
            leaves: if not, the group ends with a step that fails while an
                exchange of it waits: ranks out of step must not go on.
        """
        if self.handle >= 0:
            group_ops.group_leaves(self.handle, leaves)

    def left(self) -> tuple[str, bool]:
        """Why another rank has left what this one still takes part in.

        Returns:
            The reason, empty if none has left; and whether an operation of
            this rank has failed with it.
        """
        return (
            group_ops.group_left(self.handle)
            if self.handle >= 0
            else ("", False)
        )

    def insert_key(self, key: str, value: str) -> None:
        """Gives a key a value, which then comes to all ranks.

        Args:
            key: not empty; with the value at most 998 bytes.
            value: text.

        Raises:
            tf.errors.AlreadyExistsError: the key has a value.
            tf.errors.UnavailableError: rank 0 does not answer.
        """
        group_ops.group_insert_key(self.handle, key, value)

    def await_key(self, key: str, timeout: float = 0.0) -> str:
        """The value of a key, once some rank has inserted it.

        Args:
            key: to wait for.
            timeout: seconds, 0 for no limit.

        Raises:
            tf.errors.DeadlineExceededError: nobody has in time.
            tf.errors.UnavailableError: the group has failed.
            tf.errors.CancelledError: the group was closed.
        """
        return group_ops.group_await_key(self.handle, key, timeout)

    @property
    def is_open(self) -> bool:
        """Whether the ranks may still exchange."""
        return self.handle >= 0

    def stats(self) -> GroupStats:
        """Bytes, messages and time of the operations so far."""
        if self.handle < 0:
            return GroupStats()
        return GroupStats(**group_ops.group_stats(self.handle))

    def trace(self, on: bool) -> list[group_ops.Traced]:
        """Notes every operation from now on, or no more, and takes the notes.

        Args:
            on: whether to go on.

        Returns:
            See `group_ops.group_trace`; nothing of a group of one rank.
        """
        return (
            group_ops.group_trace(self.handle, on) if self.handle >= 0 else []
        )

    def close(self) -> None:
        """Leaves in good order; the other ranks see no failure in it.

        Runs by itself when Python exits. A closed group has no statistics.
        """
        self._close("")

    def _close_at_exit(self) -> None:
        # What has ended the program: the others shall know it. A person at a
        # prompt goes on after an error.
        error = getattr(sys, "last_value", None)
        if error is None or hasattr(sys, "ps1"):
            return self._close("")
        self._close(brief_error(error))

    def _close(self, error: str) -> None:
        if self.handle < 0 or os.getpid() != self._process:
            return  # a forked process has no part in the group
        atexit.unregister(self._close_at_exit)
        handle, self.handle = self.handle, -1
        group_ops.group_close(handle, error)

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, *_: Any) -> None:
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
