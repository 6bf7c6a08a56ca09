# SPDX-License-Identifier: Apache-2.0
"""File descriptors that this process may open."""

from __future__ import annotations

import errno
import os
import resource

_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def allow(count: int) -> int:
    """Raises the soft limit for new descriptors, up to the hard limit.

    Args:
        count: of descriptors that are about to be opened.

    Returns:
        How many may be opened now, which can be fewer.
    """
    used = _used()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = used + count
    if soft < wanted:
        soft = min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft - used


def shortage(count: int) -> str:
    """Says how many descriptors are needed and allowed, and what to do.

    Args:
        count: of descriptors that are needed beside those that are open.
    """
    used = _used()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"it has {used} open files and needs {count} more, {used + count} in "
        f"all, but may have {hard}. Raise the hard limit: `ulimit -Hn "
        f"{used + count}`, LimitNOFILE= of systemd, or --ulimit nofile= of "
        "the container"
    )


def are_exhausted(error: OSError) -> bool:
    """Whether a call failed because no descriptor or memory is left."""
    return error.errno in _ERRORS


def _used() -> int:
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # without that of the list
    except OSError:  # none is left for the list
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
