# SPDX-License-Identifier: Apache-2.0
"""Several ranks as threads of one process, for the fast tier."""

import socket
import threading

from tfdist_ext.comm import connection
from tfdist_ext.comm.connection import Connection
from tfdist_ext.comm.process_group import ProcessGroup


def run_on_ranks(
    world_size, function, timeout=20.0, *, all_reduce="", per_host=None
):
    """Runs `function(group)` once per rank, each in its own thread.

    Args:
        world_size: number of ranks.
        function: gets the rank's connected `ProcessGroup`.
        timeout: seconds, of the group.
        all_reduce: form of all sums; or a list of them, by rank.
        per_host: how many ranks a host has, by their addresses; all of them.

    Returns:
        The results in rank order. The first exception of a rank is raised.
    """
    sockets = [[None] * world_size for _ in range(world_size)]
    for rank in range(world_size):
        for peer in range(rank):
            messages, control = socket.socketpair(), socket.socketpair()
            # Some pairs are on one host, some are not.
            near = (rank + peer) % 2 == 1
            shared = connection.make_pair() if near else (None, None)
            sockets[peer][rank] = Connection(messages[0], control[0], shared[0])
            sockets[rank][peer] = Connection(messages[1], control[1], shared[1])
    forms = all_reduce or ""
    if isinstance(forms, str):
        forms = [forms] * world_size
    addresses = [
        f"127.0.0.{1 + peer // (per_host or world_size)}:{7000 + peer}"
        for peer in range(world_size)
    ]
    results = [None] * world_size
    errors = []

    def work(rank):
        try:
            with ProcessGroup(
                rank,
                world_size,
                addresses,
                lambda: sockets[rank],
                timeout=timeout,
                all_reduce=forms[rank],
            ) as group:
                results[rank] = function(group)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=work, args=(rank,), daemon=True)
        for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * timeout + 30)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results
