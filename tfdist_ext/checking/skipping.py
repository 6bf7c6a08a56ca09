# SPDX-License-Identifier: Apache-2.0
"""Why a step is not checked."""


class CannotCheck(Exception):
    """Ends a check of what cannot be checked; its text says why."""
