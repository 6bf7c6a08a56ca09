# SPDX-License-Identifier: Apache-2.0
"""Life of a process group as ops, run eagerly from Python.

`tfdist_ext.collectives.process_group.ProcessGroup` is how to use them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext.ops.library import library

_COUNTERS = (
    "bytes_sent",
    "bytes_received",
    "messages_sent",
    "messages_received",
    "calls",
)


def group_open(
    rank: int, addresses: Sequence[str], bind_address: str, timeout: float
) -> tuple[int, bytes]:
    """Opens this rank's end of a group.

    Args:
        rank: of this process.
        addresses: "host:port" of each rank, for errors.
        bind_address: numeric address to listen on.
        timeout: seconds of every wait.

    Returns:
        The group's handle, and bytes that the other ranks need to connect.
    """
    with tf.init_scope(), tf.device("CPU:0"):
        handle, blob = library().tfdist_group_open(
            addresses=list(addresses),
            rank=rank,
            bind_address=bind_address,
            timeout=timeout,
        )
    return int(handle), bytes(blob.numpy())


def group_connect(handle: int, blobs: Sequence[bytes]) -> None:
    """Connects to all ranks, `blobs[r]` being the bytes of rank r."""
    with tf.init_scope(), tf.device("CPU:0"):
        library().tfdist_group_connect(
            group=tf.constant(handle, tf.int64), blobs=list(blobs)
        )


def group_close(handle: int) -> None:
    """Leaves the group; the handle is worth nothing afterwards."""
    with tf.init_scope(), tf.device("CPU:0"):
        library().tfdist_group_close(group=tf.constant(handle, tf.int64))


def group_leave(handle: int, reason: str) -> None:
    """Ends this rank's part in what the ranks do now; they learn why."""
    with tf.init_scope(), tf.device("CPU:0"):
        library().tfdist_group_leave(
            group=tf.constant(handle, tf.int64), reason=reason
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
    """Counters by name, and `labels`: label to (calls, bytes, seconds)."""
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
    return stats


def check_same(handle: int, entries: Sequence[str]) -> None:
    """Fails on every rank unless all ranks give the same entries."""
    with tf.init_scope(), tf.device("CPU:0"):
        library().tfdist_check_plan(
            entries=tf.constant(list(entries), tf.string, [len(entries)]),
            group=handle,
            tag=0,
            label="plan",
        )
