# SPDX-License-Identifier: Apache-2.0
"""Ops that open, query and close a process group; they run eagerly."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tfdist_ext.ops.library import library
from tfdist_ext.type_names import JsonObject

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
    """Opens a process group on this rank; the group owns the connections.

    Args:
        rank: the rank of this process.
        addresses: "host:port" of each rank, for errors.
        connections: two sockets to each rank, for messages and for control.
        shared: two file descriptors per rank: of the memory shared with that
            rank, and of this rank's end of the notification channel. The group
            owns them too.
        timeout: the limit of every wait, in seconds.
        most_early: bytes that another rank may send before this rank requests
            them.
        all_reduce: the algorithm of every all_reduce; empty chooses one for
            each.

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
    """Closes the group; its handle is invalid afterwards.

    Args:
        handle: the group's handle.
        error: the error that the program failed with, or empty.
    """
    with tf.init_scope(), tf.device("CPU:0"):
        library().tfdist_group_close(
            group=tf.constant(handle, tf.int64), error=error
        )


def group_leave(handle: int, reason: str) -> None:
    """Ends this rank's part in current operations; others get the reason."""
    with tf.init_scope(), tf.device("CPU:0"):
        library().tfdist_group_leave(
            group=tf.constant(handle, tf.int64), reason=reason
        )


def group_leaves(handle: int, leaves: bool) -> None:
    """Sets whether `group_leave` is called if what this rank does now fails."""
    with tf.init_scope(), tf.device("CPU:0"):
        library().tfdist_group_leaves(
            group=tf.constant(handle, tf.int64), leaves=leaves
        )


def group_left(handle: int) -> tuple[str, bool, int]:
    """Returns why another rank left the current generation.

    Also returns whether an operation reported it, and the generation's number.
    """
    with tf.init_scope(), tf.device("CPU:0"):
        reason, reported, generation = library().tfdist_group_left(
            group=tf.constant(handle, tf.int64)
        )
    text = reason.numpy().decode(errors="replace")
    return text, bool(reported), int(generation)


def group_insert_key(handle: int, key: str, value: str) -> None:
    """Sets the value of a key on all ranks, unless the key has a value."""
    with tf.init_scope(), tf.device("CPU:0"):
        library().tfdist_group_insert_key(
            group=tf.constant(handle, tf.int64), key=key, value=value
        )


def group_await_key(handle: int, key: str, timeout: float) -> str:
    """Waits `timeout` seconds for a key's value; 0 waits without limit."""
    with tf.init_scope(), tf.device("CPU:0"):
        value = library().tfdist_group_await_key(
            group=tf.constant(handle, tf.int64), key=key, timeout=timeout
        )
    return str(value.numpy().decode())


def group_stats(handle: int) -> JsonObject:
    """Returns the group's statistics by name.

    Counters are ints. "labels" has (calls, bytes, seconds) of each label, and
    "waited" the seconds that operations waited for each rank.
    """
    with tf.init_scope(), tf.device("CPU:0"):
        result = library().tfdist_group_stats(
            group=tf.constant(handle, tf.int64)
        )
    counters = [int(count) for count in result.counters.numpy()]
    stats: JsonObject = dict(zip(_COUNTERS, counters, strict=True))
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


def waited(handle: int) -> tf.Tensor:
    """Seconds that operations have waited for other ranks, float64 scalar.

    Concurrent waits count once. The value is that of the moment when the op
    runs.
    """
    with tf.device("CPU:0"):
        result = library().tfdist_group_stats(
            group=tf.constant(handle, tf.int64)
        )
    return tf.reduce_sum(result.waited)


class Traced(NamedTuple):
    """An operation that has ended.

    Attributes:
        label: the label of the exchange.
        kind: the kind of the exchange, for example "all_to_all".
        tag: the tag of the exchange, equal on all ranks.
        call: how many operations with that tag came before, equal on all ranks.
        start: start time in nanoseconds of `time.monotonic_ns`.
        end: end time in nanoseconds of `time.monotonic_ns`.
        sent: bytes sent to each rank.
        received: bytes received from each rank.
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
    """Starts or stops the recording of operations, and returns the records.

    Args:
        handle: the group's handle.
        on: whether operations are recorded from now on.

    Returns:
        The operations that have ended since the last call.
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
    """Raises an error on every rank unless all ranks give equal entries."""
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
    """A rank's GPU and NCCL library, for exchanges between GPUs.

    Attributes:
        bus: the PCI bus id of the GPU; empty if it cannot be used.
        version: the version of the NCCL library; empty if there is none.
        id: 128 bytes that identify a new communicator, if requested.
        reason: why there is no GPU or no library.
        memory: bytes of the GPU's memory.
    """

    bus: str
    version: str
    id: bytes
    reason: str
    memory: int


def built_for_gpus() -> bool:
    """Whether the library has GPU ops, which is equal on all ranks of a job."""
    return hasattr(library(), "tfdist_gpu_offer")


def gpu_offer(device: int, files: Sequence[str], make_id: bool) -> Offer:
    """Queries this rank's GPU, and searches for the NCCL library.

    Args:
        device: CUDA's index of the GPU.
        files: paths where the library may be, in the order to try them.
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
        handle: the group's handle.
        device: CUDA's index of the GPU.
        files: see `gpu_offer`.
        name: the id of the communicator, equal on all ranks; empty if
            exchanges use the hosts' memory.

    Raises:
        tf.errors.UnavailableError: if CUDA or NCCL cannot be used.
    """
    with tf.init_scope(), tf.device("CPU:0"):
        library().tfdist_group_gpus(
            group=tf.constant(handle, tf.int64),
            id=tf.constant(name),
            device=device,
            files=list(files),
        )
