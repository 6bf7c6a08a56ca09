# SPDX-License-Identifier: Apache-2.0
"""Puts files on the disk, so that they survive a loss of power."""

from __future__ import annotations

import errno
import os

# Of file systems that cannot sync a folder, for example.
_CANNOT = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


def sync(*paths: str) -> None:
    """Waits until files and folders are on the disk.

    Args:
        *paths: of files and folders. What only TensorFlow's file systems
            know, as "gs://...", is left out.

    Raises:
        OSError: the disk is full or broken.
    """
    for path in paths:
        if not os.path.exists(path):
            continue
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _CANNOT:
                raise
        finally:
            os.close(descriptor)
