# SPDX-License-Identifier: Apache-2.0
"""How many bytes another rank may send before this one asks for them."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Sequence

_LIMIT_OF_CONTAINER = pathlib.Path("/sys/fs/cgroup/memory.max")


def default_limit(
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
