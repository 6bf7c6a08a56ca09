# SPDX-License-Identifier: Apache-2.0
"""The secret that processes of one job share, from the environment."""

from __future__ import annotations

import os
import pathlib
import stat
from collections.abc import Mapping

VARIABLE = "TFDIST_SECRET"
FILE_VARIABLE = "TFDIST_SECRET_FILE"
_LONGEST = 4096


def find(environment: Mapping[str, str]) -> bytes:
    """The secret of this job, empty if none is given.

    Args:
        environment: with TFDIST_SECRET, the secret itself, or
            TFDIST_SECRET_FILE, a file whose text without surrounding white
            space it is.

    Raises:
        ValueError: the file cannot be read, is empty or has more than 4096
            bytes; or it is this user's, and others may read or change it.
    """
    if text := environment.get(VARIABLE):
        return text.encode()
    name = environment.get(FILE_VARIABLE)
    if not name:
        return b""
    try:
        with pathlib.Path(name).open("rb") as file:
            status = os.fstat(file.fileno())
            secret = file.read(_LONGEST + 1)
    except OSError as error:
        raise ValueError(
            f"{FILE_VARIABLE} names a file that cannot be read: {error}"
        ) from error
    # As ssh does: the files of others are theirs to protect.
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid == os.geteuid() and mode & 0o077:
        raise ValueError(
            f"{FILE_VARIABLE} must name a file that only its user can read and "
            f"write. Received: {name!r} with mode {mode:04o}. Run: chmod 600 "
            f"{name} (in Kubernetes set defaultMode: 0400)"
        )
    if not secret.strip() or len(secret) > _LONGEST:
        raise ValueError(
            f"{FILE_VARIABLE} must name a file of 1 to {_LONGEST} bytes. "
            f"Received: {name!r} of {len(secret)} bytes or more"
        )
    return secret.strip()
