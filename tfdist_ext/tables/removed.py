# SPDX-License-Identifier: Apache-2.0
"""Options that were removed: a clear error where one is still named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfdist_ext.tables import checks

# Option -> since when, why, and what to do now.
_REMOVED = {
    option: (
        "Rows of a partitioned table are no longer kept on every rank, since "
        "November 2026: in every setting measured, a placement without them "
        "sent less and took less time (docs/decisions.md). Leave "
        f"`{option}` out and let placement='auto' choose."
    )
    for option in ("hot_rows", "hot_ids")
} | {
    "learn_frequent_ids": (
        "Shorter codes for frequent ids are no longer learnt, since November "
        "2026: they gained too little time and bytes (docs/decisions.md). "
        "Leave it out; wire_dtype='bfloat16' and wire_packing=True save more."
    )
}


def refuse_removed(option: str, value: Any, where: str) -> None:
    """Refuses an option that was removed, unless it is off.

    Args:
        option: its name.
        value: what it is set to; 0, False, None and what is empty are off.
        where: what it is of, for the message.

    Raises:
        ValueError: for any other value.
    """
    on = len(value) > 0 if hasattr(value, "__len__") else bool(value)
    if on:
        raise ValueError(
            f"Argument `{option}` was removed. Received: {option}="
            f"{checks.brief(value)} ({where}). {_REMOVED[option]}"
        )


def without_removed(value: Any, option: str, where: str) -> Any:
    """What a file holds, less an option that was removed and is off there.

    Raises:
        ValueError: the option is on.
    """
    if not isinstance(value, Mapping) or option not in value:
        return value
    refuse_removed(option, value[option], where)
    return {name: kept for name, kept in value.items() if name != option}
