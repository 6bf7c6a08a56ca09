# SPDX-License-Identifier: Apache-2.0
"""What joins a rank to another one."""

from __future__ import annotations

import socket
from typing import NamedTuple

from tfdist_ext.rendezvous.same_host import SharedMemory


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
