# SPDX-License-Identifier: Apache-2.0
"""Free ports that stay free until a rank binds them."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator

# Says to a rank that the port of its address is held for it.
HELD_VARIABLE = "TFDIST_PORT_IS_HELD"


# In place of a range: one that the system chooses.
ANY = range(1)


@contextlib.contextmanager
def reserve(count: int, host: str, first: range = ANY) -> Iterator[list[int]]:
    """Holds `count` distinct free TCP ports of `host`.

    The sockets are bound, but do not listen, and allow reuse: a process of the
    same user that allows reuse too (a rank with `HELD_VARIABLE`) binds the same
    port and receives all connections, while the system gives it to nobody else.

    Args:
        count: how many ports.
        host: address to bind, "" for all of IPv4 and IPv6.
        first: of which the first port is.

    Yields:
        The port numbers.

    Raises:
        OSError: no port is free.
    """
    with contextlib.ExitStack() as stack:
        held = [
            stack.enter_context(_hold(host, first if number == 0 else ANY))
            for number in range(count)
        ]
        yield [each.getsockname()[1] for each in held]


def _hold(host: str, candidates: range) -> socket.socket:
    both = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    for port in candidates:
        held = socket.socket(family, socket.SOCK_STREAM)
        try:
            if both:
                held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            held.bind((host, port))
        except OSError as error:
            held.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            # Not before: a port that another launcher holds would seem free.
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            return held
    raise OSError(
        errno.EADDRINUSE,
        f"ports {candidates[0]} to {candidates[-1]} are all taken",
    )
