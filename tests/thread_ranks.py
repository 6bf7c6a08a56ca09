# SPDX-License-Identifier: Apache-2.0
"""Several ranks as threads of one process, for the fast tier."""

import threading

from tfdist_ext.collectives.process_group import ProcessGroup


def run_on_ranks(world_size, function, timeout=20.0):
    """Runs `function(group)` once per rank, each in its own thread.

    Args:
        world_size: number of ranks.
        function: gets the rank's connected `ProcessGroup`.
        timeout: seconds, of the group.

    Returns:
        The results in rank order. The first exception of a rank is raised.
    """
    blobs = [b""] * world_size
    everyone = threading.Barrier(world_size)
    results = [None] * world_size
    errors = []

    def exchange(rank, blob):
        blobs[rank] = blob
        everyone.wait(timeout)
        return list(blobs)

    def work(rank):
        try:
            with ProcessGroup(
                rank,
                world_size,
                [f"127.0.0.1:{7000 + peer}" for peer in range(world_size)],
                lambda blob: exchange(rank, blob),
                timeout=timeout,
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
