# SPDX-License-Identifier: Apache-2.0
"""The ranks of a job, connected to each other."""

from __future__ import annotations

import atexit
import dataclasses
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

from tfdist_ext.ops import group_ops
from tfdist_ext.rendezvous.addresses import bind_address

Exchange = Callable[[bytes], Sequence[bytes]]


@dataclasses.dataclass(frozen=True)
class GroupStats:
    """What a process group has done so far.

    Attributes:
        bytes_sent: to all ranks together, without the transport's framing.
        bytes_received: likewise.
        messages_sent: to all ranks together.
        messages_received: likewise.
        calls: operations finished.
        labels: by label of an operation (calls, bytes sent, seconds from its
            start to its end; those of operations at once overlap).
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    calls: int = 0
    labels: dict[str, tuple[int, int, float]] = dataclasses.field(
        default_factory=dict
    )


class ProcessGroup:
    """The ranks that take part in collectives, seen from one of them.

    A group of one rank needs no network and no compiled library.

    Attributes:
        rank: of this process.
        world_size: number of ranks.
        addresses: "host:port" of each rank. The host of this rank's own is
            the one it listens on; all are named in errors.
        timeout: seconds an operation may take before it fails everywhere;
            five times that while a rank is alive and in no operation.
        handle: number by which the ops find the group.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        addresses: Sequence[str] = (),
        exchange: Exchange | None = None,
        timeout: float = 60.0,
        transport: str = "gloo",
    ) -> None:
        """Connects to all ranks; every rank must do so at the same time.

        Args:
            rank: of this process.
            world_size: number of ranks.
            addresses: "host:port" of each rank.
            exchange: gets this rank's few bytes of network addresses and
                returns those of all ranks in rank order. Called once; not
                needed with one rank.
            timeout: seconds, of connecting and of every operation.
            transport: "gloo", the only one so far.

        Raises:
            ValueError: a bad argument.
            tf.errors.UnavailableError: a rank cannot be reached.
        """
        _check(rank, world_size, addresses, timeout, transport)
        self.rank = rank
        self.world_size = world_size
        self.addresses = tuple(addresses)
        self.timeout = timeout
        self.handle = -1
        if world_size == 1:
            return
        if exchange is None:
            raise ValueError(f"{world_size} ranks need an `exchange` function.")
        self.handle, blob = group_ops.group_open(
            rank, self.addresses, bind_address(addresses[rank]), timeout
        )
        atexit.register(self.close)
        try:
            group_ops.group_connect(self.handle, exchange(blob))
        except BaseException:
            self.close()
            raise

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

    def stats(self) -> GroupStats:
        """Bytes, messages and time of the operations so far."""
        if self.handle < 0:
            return GroupStats()
        return GroupStats(**group_ops.group_stats(self.handle))

    def close(self) -> None:
        """Leaves in good order; the other ranks see no failure in it.

        Runs by itself when Python exits. A closed group has no statistics.
        """
        if self.handle < 0:
            return
        atexit.unregister(self.close)
        handle, self.handle = self.handle, -1
        group_ops.group_close(handle)

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
    transport: str,
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
    if transport != "gloo":
        raise ValueError(
            f"transport must be 'gloo'. Received: transport={transport!r}"
        )
