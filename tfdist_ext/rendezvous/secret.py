# SPDX-License-Identifier: Apache-2.0
"""The secret that processes of one job share, from the environment."""

from __future__ import annotations

import pathlib
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
            bytes.
    """
    if text := environment.get(VARIABLE):
        return text.encode()
    name = environment.get(FILE_VARIABLE)
    if not name:
        return b""
    try:
        with pathlib.Path(name).open("rb") as file:
            secret = file.read(_LONGEST + 1)
    except OSError as error:
        raise ValueError(
            f"{FILE_VARIABLE} names a file that cannot be read: {error}"
        ) from error
    if not secret.strip() or len(secret) > _LONGEST:
        raise ValueError(
            f"{FILE_VARIABLE} must name a file of 1 to {_LONGEST} bytes. "
            f"Received: {name!r} of {len(secret)} bytes or more"
        )
    return secret.strip()
