# SPDX-License-Identifier: Apache-2.0
"""Free ports that stay free until a rank binds them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

# Says to a rank that the port of its address is held for it.
HELD_VARIABLE = "TFDIST_PORT_IS_HELD"


@contextlib.contextmanager
def reserve(count: int, host: str) -> Iterator[list[int]]:
    """Holds `count` distinct free TCP ports of `host`.

    The sockets are bound, but do not listen, and allow reuse: a process of the
    same user that allows reuse too (a rank with `HELD_VARIABLE`) binds the same
    port and receives all connections, while the system gives it to nobody else.

    Args:
        count: how many ports.
        host: address to bind, "" for all.

    Yields:
        The port numbers.
    """
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(count):
            held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            stack.enter_context(held)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held.bind((host, 0))
            ports.append(held.getsockname()[1])
        yield ports
