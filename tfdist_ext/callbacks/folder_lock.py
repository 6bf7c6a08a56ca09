# SPDX-License-Identifier: Apache-2.0
"""A lock of a folder, so that two jobs do not save into it at the same time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import time

NAME = "resume.lock"
# That a job which ends just now is waited for.
SECONDS = 5.0
_HELD = {errno.EACCES, errno.EAGAIN}
_LOG = logging.getLogger("tfdist_ext")


class FolderLock:
    """Holds a lock until `close`, or until the process ends.

    A POSIX record lock: child processes do not inherit it, and NFS knows it.

    Args:
        folder: of this host's file system; it is created. Others, as
            "gs://...", cannot be locked.

    Raises:
        OSError: another process holds the lock; its host, number and start
            are named. A file system without locks is a warning.
    """

    def __init__(self, folder: str) -> None:
        self._file = -1
        if "://" in folder:
            return
        try:
            os.makedirs(folder, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._file = os.open(os.path.join(folder, NAME), flags, 0o666)
            held = not self._take()
        except OSError as error:
            _LOG.warning(
                "Resume: '%s' cannot be locked (%s). Make sure that no other "
                "job saves there.",
                *(folder, error),
            )
            self.close()
            return
        if held:
            text = os.pread(self._file, 1000, 0).decode(errors="replace")
            self.close()
            raise OSError(
                f"Resume: '{folder}' is in use by {text or 'another process'}."
                " Two jobs would overwrite each other's checkpoints. End the "
                "other job, or give this one another directory."
            )
        started = time.strftime("%Y-%m-%d %H:%M:%S %z")
        text = f"process {os.getpid()} on host {socket.gethostname()}"
        with contextlib.suppress(OSError):  # of a full disk
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"{text} since {started}".encode(), 0)

    def _take(self) -> bool:
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except OSError as error:
                if error.errno not in _HELD:
                    raise
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.1)

    def close(self) -> None:
        """Releases the lock."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
