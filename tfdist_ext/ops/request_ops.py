# SPDX-License-Identifier: Apache-2.0
"""Requests of one rank to all ranks, which answer them at any time."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist_ext.ops.collective_ops import Group
from tfdist_ext.ops.library import library

# Steps that `serve` returns without a message.
LEFT, ENDED, STOPPED = -1, -2, -3


def request(
    group: Group,
    payload: tf.Tensor,
    splits: tf.Tensor,
    step: tf.Tensor,
    *,
    tag: int,
    label: str,
    dtype: tf.DType = tf.uint8,
    replies: bool = True,
    tables: Sequence[tf.Variable] = (),
    shards: Sequence[str] = (),
) -> tuple[tf.Tensor, tf.Tensor]:
    """Sends a message to every rank, and returns what they reply.

    Ranks may run different numbers of requests. Those of a rank are served
    in order.

    Args:
        group: the process group.
        payload: uint8 `[bytes]`, the message to rank 0, then that to rank 1,
            and so on.
        splits: int64 `[world_size]`, bytes of each message.
        step: int64 scalar, sent with the messages.
        tag: a number that identifies the request; equal on all ranks.
        label: the label for errors and statistics.
        dtype: dtype of the replies.
        replies: whether to wait for replies.
        tables: variables that replies are computed from. Who calls this
            registers the gradient of the op.
        shards: the shards of the tables, as JSON.

    Returns:
        The replies of rank 0, rank 1, and so on, `[n]`, and the number of
        values of each, int64 `[world_size]`.

    Raises:
        tf.errors.InvalidArgumentError: a rank has replied with an error.
    """
    values, value_splits = library().tfdist_request(
        [variable.handle for variable in tables],
        payload,
        splits,
        step,
        group=group.handle,
        tag=tag,
        label=label,
        table_shapes=[variable.shape for variable in tables],
        shards=list(shards),
        replies=replies,
        T=dtype,
    )
    return values, value_splits


def serve(
    group: Group,
    peer: tf.Tensor,
    handler: tf.Tensor,
    *,
    tag: int,
    label: str,
    replies: bool = True,
    bound: int | None = None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Waits, without a limit, for the next request of a rank.

    With `replies`, it also takes the lock of this rank's rows and variables,
    which `reply` releases.

    Args:
        group: the process group.
        peer: int64 scalar, the rank, which may be this one.
        handler: int64 scalar, the number that `set_handler` was given.
        tag: see `request`.
        label: the label for errors and statistics.
        replies: whether a `reply` follows.
        bound: if not None, it also waits until no clock is more than so many
            steps behind the step of the request; see `set_clock`.

    Returns:
        The message, uint8 `[bytes]`, and the step, an int64 scalar. Without a
        message the step is `LEFT` if a rank has left the current joint call,
        `STOPPED` if another handler was set, and `ENDED` if the group has
        failed or is closed. The message is then the reason.
    """
    payload, step = library().tfdist_serve(
        peer,
        handler,
        group=group.handle,
        tag=tag,
        label=label,
        replies=replies,
        bound=-1 if bound is None else bound,
    )
    return payload, step


def reply(
    group: Group,
    peer: tf.Tensor,
    values: tf.Tensor,
    *,
    tag: int,
    label: str,
    error: str = "",
) -> tf.Operation:
    """Replies to the message that `serve` has returned.

    Args:
        group: the process group.
        peer: int64 scalar, the rank that has sent the message.
        values: `[n]`, in the dtype of the request.
        tag: see `request`.
        label: the label for errors and statistics.
        error: if not empty, the request fails with this text.
    """
    return library().tfdist_reply(
        peer, values, error, group=group.handle, tag=tag, label=label
    )


def set_handler(group: Group, handler: int, *, tag: int) -> None:
    """Sets which `serve` gets the messages with a tag. All others end.

    Args:
        group: the process group.
        handler: a number.
        tag: see `request`.
    """
    library().tfdist_set_handler(
        tf.constant(handler, tf.int64), group=group.handle, tag=tag
    )


def set_clock(group: Group, peer: tf.Tensor, step: tf.Tensor) -> tf.Operation:
    """Sets the clock of a rank, unless it is lower than the current one.

    Args:
        group: the process group.
        peer: int64 scalar, the rank.
        step: int64 scalar, the number of steps that it has completed.
    """
    return library().tfdist_set_clock(peer, step, group=group.handle, tag=0)
