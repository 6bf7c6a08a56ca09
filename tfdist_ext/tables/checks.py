# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments: their kinds, ranges, choices and removed names."""

from __future__ import annotations

import collections
import dataclasses
import numbers
import operator
import reprlib
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Literal
from typing import get_args

# More than anything that is counted; products of a few stay finite.
LARGEST = 1e18
# The least that a limit of norms may be, far above what float32 cannot square.
SHORTEST_ROW = 1e-12

_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = 200


def brief(value: Any) -> str:
    """`repr` of a value that may be long or deeply nested."""
    return _BRIEF.repr(value)


def integer(
    field: str, value: Any, least: int, where: str, most: int | None = None
) -> int:
    """`value` as an int; NumPy's integers are accepted too.

    Raises:
        ValueError: it is none, or out of bounds.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    high = most is not None and number > most
    if isinstance(value, bool) or number < least or high:
        bounds = f"of at least {least}" + (
            f" and at most {most}" if most else ""
        )
        raise ValueError(
            f"Argument `{field}` must be an integer {bounds}. Received: "
            f"{field}={brief(value)} ({where})."
        )
    return number


def number(
    field: str,
    value: Any,
    where: str,
    least: float = 0.0,
    most: float = LARGEST,
) -> None:
    """Refuses what is no number, NaN and what is out of bounds.

    Raises:
        ValueError: then.
    """
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not least <= value <= most:
        kind = (
            "positive number" if least > 0 else f"number of at least {least:g}"
        )
        raise ValueError(
            f"Argument `{field}` must be a {kind}, at most {most:g}. Received: "
            f"{field}={brief(value)} ({where})."
        )


def max_norm(value: Any, where: str) -> None:
    """Refuses what no row can have as its norm.

    Raises:
        ValueError: then.
    """
    if value is not None:
        number("max_norm", value, where, least=SHORTEST_ROW)


def storage(value: Any, where: str) -> None:
    """Refuses what is no place for a table; None lets others choose it.

    Raises:
        ValueError: then.
    """
    if value is not None:
        one_of("storage", value, STORAGES, where)


def name(what: str, value: Any) -> None:
    """Refuses what is no name.

    Raises:
        ValueError: then.
    """
    if not isinstance(value, str) or not value:
        raise ValueError(
            f"Argument `name` of {what} must be a non-empty string. "
            f"Received: name={brief(value)}."
        )


def one_of(
    field: str, value: Any, choices: tuple[str, ...], where: str
) -> None:
    """Refuses what is none of the names in `choices`.

    Raises:
        ValueError: then.
    """
    if not isinstance(value, str) or value not in choices:
        raise ValueError(
            f"Argument `{field}` must be one of {choices}. Received: "
            f"{field}={brief(value)} ({where})."
        )


def boolean(field: str, value: Any, where: str, optional: bool = True) -> None:
    """Refuses what is neither True nor False, nor None where that may be.

    Raises:
        ValueError: then.
    """
    if not isinstance(value, bool) and not (optional and value is None):
        kind = "True, False or None" if optional else "True or False"
        raise ValueError(
            f"Argument `{field}` must be {kind}. Received: {field}="
            f"{brief(value)} ({where})."
        )


def mapping(value: Any, where: str) -> Mapping[str, Any]:
    """`value`, if it is what JSON calls an object.

    Raises:
        ValueError: otherwise.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"`{where}` must be an object, not {brief(value)}")
    return value


def entries(value: Any, where: str) -> list[Any]:
    """`value` as a list, if it is what JSON calls an array.

    Raises:
        ValueError: otherwise.
    """
    if not isinstance(value, list | tuple):
        raise ValueError(f"`{where}` must be an array, not {brief(value)}")
    return list(value)


def fields_of(
    kind: Any, value: Any, where: str, needed: Sequence[str] = ()
) -> dict[str, Any]:
    """The arguments of a dataclass, if they are all there and no others.

    Args:
        kind: the dataclass.
        value: a mapping.
        where: what it is of, for messages.
        needed: fields with defaults that must be there all the same.

    Raises:
        ValueError: otherwise.
    """
    given = dict(mapping(value, where))
    known = dataclasses.fields(kind)
    unknown = sorted(set(given) - {field.name for field in known})
    missing = [
        field.name
        for field in known
        if field.name not in given
        and (field.default is dataclasses.MISSING or field.name in needed)
    ]
    if unknown or missing:
        what = "does not know" if unknown else "lacks"
        raise ValueError(f"`{where}` {what} {brief(unknown or missing)}")
    return given


def distinct(what: str, names: Sequence[str]) -> None:
    """Refuses names that occur twice.

    Raises:
        ValueError: then.
    """
    counts = collections.Counter(names)
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        raise ValueError(
            f"Names of {what} must be distinct. Received more than once: "
            f"{listed(twice)}."
        )


def listed(names: Sequence[str]) -> str:
    """The first names, for messages."""
    more = f", ... ({len(names)} in all)" if len(names) > 10 else ""
    return ", ".join(map(repr, names[:10])) + more


Placement = Literal[
    "auto",
    "data_parallel",
    "table_wise",
    "row_wise",
    "column_wise",
    "grid",
    "sparsecore",
    "default_device",
]
# Of the rows of a sample; where a table has none, they are kept one by one.
Combiner = Literal["mean", "sum", "sqrtn"]
OutOfRange = Literal["error", "ignore"]
TableDtype = Literal["float32", "bfloat16"]
# Of a table and its slots: the rank's GPU, or the memory of its host.
Storage = Literal["device", "host"]
# Of vocabularies that grow.
Evict = Literal["lru", "lfu"]
KeyDtype = Literal["int64", "string"]
Full = Literal["error", "shared_row"]
Unadmitted = Literal["zeros", "shared_row"]
# Of numbers between ranks, and how they are rounded to 16 bits.
WireDtype = Literal["float32", "bfloat16", "float16"]
Rounding = Literal["nearest", "stochastic"]
# Between ranks of one host: through memory that they share, where they can.
Transport = Literal["auto", "tcp"]
# Who carries what ranks exchange: this package, or the user's Horovod.
Engine = Literal["tfdist", "horovod"]
# When a step is compared with one of one process, see `checking`.
Check = Literal["auto", "always", "error", "off"]

# The last two of them are the names of keras-rs: partitioned in whatever way,
# and an ordinary variable on every rank.
PLACEMENTS: tuple[str, ...] = get_args(Placement)
COMBINERS: tuple[str, ...] = get_args(Combiner)
POLICIES: tuple[str, ...] = get_args(OutOfRange)
TABLE_DTYPES: tuple[str, ...] = get_args(TableDtype)
STORAGES: tuple[str, ...] = get_args(Storage)
EVICTIONS: tuple[str, ...] = get_args(Evict)
KEY_DTYPES: tuple[str, ...] = get_args(KeyDtype)
FULL: tuple[str, ...] = get_args(Full)
UNADMITTED: tuple[str, ...] = get_args(Unadmitted)
WIRE_DTYPES: tuple[str, ...] = get_args(WireDtype)
ROUNDINGS: tuple[str, ...] = get_args(Rounding)
TRANSPORTS: tuple[str, ...] = get_args(Transport)
ENGINES: tuple[str, ...] = get_args(Engine)
CHECKS: tuple[str, ...] = get_args(Check)

# Shorter names of placements, accepted wherever a placement is named.
_SHORT = {
    "column": "column_wise",
    "replicated": "data_parallel",
    "row": "row_wise",
    "table": "table_wise",
}


def full_placement(name: Any) -> Any:
    """The name of a placement in the field's words; all else as it is."""
    return _SHORT.get(name, name) if isinstance(name, str) else name


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
            f"{brief(value)} ({where}). {_REMOVED[option]}"
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
