# SPDX-License-Identifier: Apache-2.0
"""Addresses of ranks that share a folder: a port that is free for rank 0."""

import pathlib
import socket
import time


def addresses(
    folder: pathlib.Path, rank: int, hosts: list[str], limit: float = 60.0
) -> list[str]:
    """Addresses of all ranks, of which the first is one to listen at.

    Args:
        folder: that all ranks see.
        rank: of this process.
        hosts: of each rank.
        limit: seconds to wait for rank 0.
    """
    path = folder / "port"
    if rank == 0:
        with socket.create_server((hosts[0], 0)) as free:
            port = free.getsockname()[1]
        (folder / "partial.port").write_text(f"{port}")
        (folder / "partial.port").rename(path)
    deadline = time.monotonic() + limit
    while not path.exists():
        assert time.monotonic() < deadline, "rank 0 does not come"
        time.sleep(0.02)
    rest = [f"{host}:{9000 + peer}" for peer, host in enumerate(hosts)]
    return [f"{hosts[0]}:{path.read_text()}", *rest[1:]]
