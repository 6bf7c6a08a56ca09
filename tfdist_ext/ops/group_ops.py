# SPDX-License-Identifier: Apache-2.0
"""Life of a process group as ops, run eagerly from Python, and its GPUs."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import tensorflow as tf

from tfdist_ext.ops.library import library

_COUNTERS = (
    "bytes_sent",
    "bytes_received",
    "messages_sent",
    "messages_received",
    "calls",
    "writes",
)


def group_open(
    rank: int,
    addresses: Sequence[str],
    connections: Sequence[tuple[socket.socket, socket.socket] | None],
    shared: Sequence[tuple[int, int] | None],
    timeout: float,
    most_early: int,
    all_reduce: str = "",
) -> int:
    """Makes this rank's end of a group, which owns the connections.

    Args:
        rank: of this process.
        addresses: "host:port" of each rank, for errors.
        connections: two to each rank, for messages and for control.
        shared: file descriptors of the memory that this rank shares with
            another, and of its end of their bell; the group owns them too.
        timeout: seconds of every wait.
        most_early: bytes that another rank may send before this one asks for
            them.
        all_reduce: form of all of them; empty if each is chosen.

    Returns:
        The group's handle.
    """
    numbers = [
        (-1, -1) if pair is None else (pair[0].detach(), pair[1].detach())
        for pair in connections
    ]
    with tf.init_scope(), tf.device("CPU:0"):
        handle = library().tfdist_group_open(
            addresses=list(addresses),
            sockets=tf.constant(numbers, tf.int32),
            shared=tf.constant([each or (-1, -1) for each in shared], tf.int32),
            rank=rank,
            timeout=timeout,
            most_early=most_early,
            all_reduce=all_reduce,
        )
    return int(handle)


def group_close(handle: int, error: str = "") -> None:
    """Leaves the group; the handle is worth nothing afterwards.

    Args:
        handle: of the group.
        error: what the program has failed with, empty if it has not.
    """
    with tf.init_scope(), tf.device("CPU:0"):
        library().tfdist_group_close(
            group=tf.constant(handle, tf.int64), error=error
        )


def group_leave(handle: int, reason: str) -> None:
    """Ends this rank's part in what the ranks do now; they learn why."""
    with tf.init_scope(), tf.device("CPU:0"):
        library().tfdist_group_leave(
            group=tf.constant(handle, tf.int64), reason=reason
        )


def group_leaves(handle: int, leaves: bool) -> None:
    """Says whether this rank leaves if what it does now fails."""
    with tf.init_scope(), tf.device("CPU:0"):
        library().tfdist_group_leaves(
            group=tf.constant(handle, tf.int64), leaves=leaves
        )


def group_left(handle: int) -> tuple[str, bool]:
    """Why another rank has left, and whether an operation has said so."""
    with tf.init_scope(), tf.device("CPU:0"):
        reason, told = library().tfdist_group_left(
            group=tf.constant(handle, tf.int64)
        )
    return reason.numpy().decode(errors="replace"), bool(told)


def group_insert_key(handle: int, key: str, value: str) -> None:
    """Gives a key a value on all ranks, unless it has one."""
    with tf.init_scope(), tf.device("CPU:0"):
        library().tfdist_group_insert_key(
            group=tf.constant(handle, tf.int64), key=key, value=value
        )


def group_await_key(handle: int, key: str, timeout: float) -> str:
    """Waits for a key's value; 0 seconds are no limit."""
    with tf.init_scope(), tf.device("CPU:0"):
        value = library().tfdist_group_await_key(
            group=tf.constant(handle, tf.int64), key=key, timeout=timeout
        )
    return str(value.numpy().decode())


def group_stats(handle: int) -> dict[str, Any]:
    """Counters by name; `labels`, to (calls, bytes, seconds); `waited`."""
    with tf.init_scope(), tf.device("CPU:0"):
        result = library().tfdist_group_stats(
            group=tf.constant(handle, tf.int64)
        )
    counters = [int(count) for count in result.counters.numpy()]
    stats: dict[str, Any] = dict(zip(_COUNTERS, counters, strict=True))
    stats["labels"] = {
        label.decode(): (int(calls), int(sent), float(seconds))
        for label, calls, sent, seconds in zip(
            result.labels.numpy(),
            result.label_calls.numpy(),
            result.label_bytes.numpy(),
            result.label_seconds.numpy(),
            strict=True,
        )
    }
    stats["waited"] = tuple(result.waited.numpy().tolist())
    return stats


class Traced(NamedTuple):
    """An operation that has ended.

    Attributes:
        label: of the exchange.
        kind: all_to_all and so on.
        tag: of the exchange, the same on all ranks.
        call: how many of the tag were before, likewise.
        start: in nanoseconds of `time.monotonic_ns`.
        end: likewise.
        sent: bytes to each rank.
        received: bytes from each rank.
    """

    label: str
    kind: str
    tag: int
    call: int
    start: int
    end: int
    sent: list[int]
    received: list[int]


def group_trace(handle: int, on: bool) -> list[Traced]:
    """Notes every operation from now on, or no more, and takes the notes.

    Args:
        handle: of the group.
        on: whether to go on.

    Returns:
        The operations that have ended since.
    """
    with tf.init_scope(), tf.device("CPU:0"):
        found = library().tfdist_group_trace(
            group=tf.constant(handle, tf.int64), on=tf.constant(on)
        )
    labels, kinds = (
        [text.decode() for text in each.numpy().tolist()]
        for each in (found.labels, found.kinds)
    )
    calls, times, peers = (
        each.numpy().tolist()
        for each in (found.calls, found.times, found.bytes)
    )
    return [
        Traced(label, kind, *call, *when, *by_peer)
        for label, kind, call, when, by_peer in zip(
            labels, kinds, calls, times, peers, strict=True
        )
    ]


def check_same(handle: int, entries: Sequence[str]) -> None:
    """Fails on every rank unless all ranks give the same entries."""
    with tf.init_scope(), tf.device("CPU:0"):
        try:
            library().tfdist_check_plan(
                entries=tf.constant(list(entries), tf.string, [len(entries)]),
                group=handle,
                tag=0,
                label="plan",
            )
        except tf.errors.InvalidArgumentError as error:
            advice = (
                "Let all ranks build and call the same, with equal arguments"
            )
            text = f"{error.message.partition(' [Op:')[0]} {advice}."
            raise tf.errors.InvalidArgumentError(None, None, text) from None


@dataclasses.dataclass(frozen=True)
class Offer:
    """What a rank brings to an exchange between GPUs.

    Attributes:
        bus: where its GPU is plugged in, empty if it cannot be used.
        version: of NCCL's library, empty without one.
        id: 128 bytes that name a new communicator, if asked for.
        reason: why there is no GPU, or no library.
        memory: bytes that the GPU has.
    """

    bus: str
    version: str
    id: bytes
    reason: str
    memory: int


def built_for_gpus() -> bool:
    """Whether the library has these ops: the same on all ranks of a job."""
    return hasattr(library(), "tfdist_gpu_offer")


def gpu_offer(device: int, files: Sequence[str], make_id: bool) -> Offer:
    """Looks at this rank's GPU and for NCCL's library.

    Args:
        device: CUDA's number of the GPU.
        files: where the library may be, in the order they are tried.
        make_id: whether this rank makes the id of a communicator.
    """
    with tf.init_scope(), tf.device("CPU:0"):
        found = library().tfdist_gpu_offer(
            device=device, files=list(files), make_id=make_id
        )
    return Offer(
        found.bus.numpy().decode(),
        found.version.numpy().decode(),
        found.id.numpy(),
        found.reason.numpy().decode(errors="replace"),
        int(found.memory.numpy()),
    )


def group_gpus(
    handle: int, device: int, files: Sequence[str], name: bytes
) -> None:
    """Lets the collectives of a group run on this rank's GPU.

    Args:
        handle: of the group.
        device: CUDA's number of the GPU.
        files: see `gpu_offer`.
        name: id of the communicator, the same on all ranks; empty if
            exchanges go through the hosts.

    Raises:
        tf.errors.UnavailableError: CUDA or NCCL cannot be used.
    """
    with tf.init_scope(), tf.device("CPU:0"):
        library().tfdist_group_gpus(
            group=tf.constant(handle, tf.int64),
            id=tf.constant(name),
            device=device,
            files=list(files),
        )
