# SPDX-License-Identifier: Apache-2.0
"""What joins a rank to another one."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from collections.abc import Sequence
from typing import NamedTuple

from tfdist_ext.rendezvous.same_host import SharedMemory

BUSY_POLL_VARIABLE = "TFDIST_BUSY_POLL"
_SO_BUSY_POLL = 46  # of Linux; Python has no name for it


class Connection(NamedTuple):
    """This rank's ends of all that joins it to another.

    Attributes:
        messages: socket for the messages of collectives.
        control: socket for all else.
        shared: memory that carries the messages instead; None on two hosts.
    """

    messages: socket.socket
    control: socket.socket
    shared: SharedMemory | None = None


def poll_busily(
    connections: Sequence[Connection | None], environment: Mapping[str, str]
) -> None:
    """Lets the system look for messages for a while before it waits for them.

    Args:
        connections: by rank.
        environment: in which `TFDIST_BUSY_POLL` may say for how long, in
            microseconds; not at all by default.

    Raises:
        ValueError: that is no number, or the system does not allow it.
    """
    text = environment.get(BUSY_POLL_VARIABLE) or "0"
    if not text.isdecimal():
        raise ValueError(
            f"{BUSY_POLL_VARIABLE} must be a number of microseconds. "
            f"Received: {BUSY_POLL_VARIABLE}={text}"
        )
    for each in connections if int(text) else ():
        if each is None:
            continue
        try:
            each.messages.setsockopt(
                socket.SOL_SOCKET, _SO_BUSY_POLL, int(text)
            )
        except (OSError, OverflowError) as error:
            raise ValueError(
                f"{BUSY_POLL_VARIABLE}={text}: the system does not allow it "
                f"({error}); it takes the capability CAP_NET_ADMIN, or no more "
                "than `sysctl net.core.busy_read`."
            ) from error
