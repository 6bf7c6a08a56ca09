# SPDX-License-Identifier: Apache-2.0
"""What `check=` of the strategy and `tfdist-run --check` say."""

from __future__ import annotations

from collections.abc import Mapping

from tfdist_ext.launcher.variables import CHECK_VARIABLE
from tfdist_ext.tables import checks
from tfdist_ext.tables import choices


def mode_of(check: str, environment: Mapping[str, str]) -> str:
    """When steps are checked.

    Args:
        check: of the strategy; "auto" leaves it to the launcher.
        environment: of the process.

    Raises:
        ValueError: for another word in the environment.
    """
    if check != "auto":
        return check
    found = environment.get(CHECK_VARIABLE) or check
    checks.one_of(CHECK_VARIABLE, found, choices.CHECKS, "the environment")
    return found
