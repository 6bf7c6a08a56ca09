# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments: types, ranges, choices and removed names."""

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
from typing import SupportsIndex
from typing import TypeAlias
from typing import get_args

# Arguments of a dataclass by their names, as JSON has them.
Fields: TypeAlias = dict[str, Any]
# Exceeds all counts; products of a few such numbers stay finite.
LARGEST = 1e18
# Smallest limit of norms; float32 can represent its square.
SHORTEST_ROW = 1e-12

_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = 200


def brief(value: object) -> str:
    """`repr` of a value, shortened if it is long or deeply nested."""
    return _BRIEF.repr(value)


def integer(
    field: str,
    value: SupportsIndex,
    least: int,
    where: str,
    most: int | None = None,
) -> int:
    """`value` as an int; NumPy's integers are accepted too.

    Raises:
        ValueError: the value is no integer, or out of bounds.
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
    """Rejects a value that is no number, NaN or out of bounds.

    Raises:
        ValueError: the value is invalid.
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


def max_norm(value: float | None, where: str) -> None:
    """Rejects a value that cannot be the norm of a row.

    Raises:
        ValueError: the value is invalid.
    """
    if value is not None:
        number("max_norm", value, where, least=SHORTEST_ROW)


def storage(value: object, where: str) -> None:
    """Rejects an invalid storage; None means that others choose it.

    Raises:
        ValueError: the value is invalid.
    """
    if value is not None:
        one_of("storage", value, STORAGES, where)


def name(what: str, value: object) -> None:
    """Rejects a value that is no name.

    Raises:
        ValueError: the value is no string, or empty.
    """
    if not isinstance(value, str) or not value:
        raise ValueError(
            f"Argument `name` of {what} must be a non-empty string. "
            f"Received: name={brief(value)}."
        )


def one_of(
    field: str, value: object, choices: tuple[str, ...], where: str
) -> None:
    """Rejects a value that is not one of `choices`.

    Raises:
        ValueError: the value is not one of them.
    """
    if not isinstance(value, str) or value not in choices:
        raise ValueError(
            f"Argument `{field}` must be one of {choices}. Received: "
            f"{field}={brief(value)} ({where})."
        )


def boolean(
    field: str, value: object, where: str, optional: bool = True
) -> None:
    """Rejects a value that is no bool; None is accepted if `optional`.

    Raises:
        ValueError: the value is invalid.
    """
    if not isinstance(value, bool) and not (optional and value is None):
        kind = "True, False or None" if optional else "True or False"
        raise ValueError(
            f"Argument `{field}` must be {kind}. Received: {field}="
            f"{brief(value)} ({where})."
        )


def mapping(value: object, where: str) -> Mapping[str, Any]:
    """`value`, if it is a mapping, which JSON calls an object.

    Raises:
        ValueError: the value is no mapping.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"`{where}` must be an object, not {brief(value)}")
    return value


def entries(value: object, where: str) -> list[Any]:
    """`value` as a list, if it is what JSON calls an array.

    Raises:
        ValueError: the value is no list or tuple.
    """
    if not isinstance(value, list | tuple):
        raise ValueError(f"`{where}` must be an array, not {brief(value)}")
    return list(value)


def fields_of(
    kind: Any, value: object, where: str, needed: Sequence[str] = ()
) -> Fields:
    """The arguments of a dataclass, after a check that they are complete.

    Args:
        kind: the dataclass.
        value: a mapping.
        where: name of the object, for error messages.
        needed: fields that must be present although they have defaults.

    Raises:
        ValueError: fields are missing or unknown.
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
    """Rejects names that occur twice.

    Raises:
        ValueError: a name occurs twice.
    """
    counts = collections.Counter(names)
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        raise ValueError(
            f"Names of {what} must be distinct. Received more than once: "
            f"{listed(twice)}."
        )


def listed(names: Sequence[str]) -> str:
    """The first ten names, for error messages."""
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
# Combiners of a sample's rows; a table without one returns each row.
Combiner = Literal["mean", "sum", "sqrtn"]
OutOfRange = Literal["error", "ignore"]
TableDtype = Literal["float32", "bfloat16"]
# Memory of a table and its slots: the rank's GPU, or its host's memory.
Storage = Literal["device", "host"]
# Options of dynamic vocabularies.
Evict = Literal["lru", "lfu"]
KeyDtype = Literal["int64", "string"]
Full = Literal["error", "shared_row"]
Unadmitted = Literal["zeros", "shared_row"]
# Dtypes of rows, and of dense gradients, between ranks, and how they are
# rounded.
WireDtype = Literal["float32", "bfloat16", "float16", "int8"]
GradientDtype = Literal["float32", "bfloat16", "float16"]
Rounding = Literal["nearest", "stochastic"]
# Transport between ranks of one host: "auto" uses shared memory if possible.
Transport = Literal["auto", "tcp"]
# Engine of exchanges between ranks: this package, or the user's Horovod.
Engine = Literal["tfdist", "horovod"]
# When a step is compared with the step of one process, see `checking`.
Check = Literal["auto", "always", "error", "off"]
Balance = Literal["equal", "measured", "ids"]

# The last two are names of keras-rs: partitioned in any way, and an ordinary
# variable on every rank.
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
GRADIENT_DTYPES: tuple[str, ...] = get_args(GradientDtype)
ROUNDINGS: tuple[str, ...] = get_args(Rounding)
TRANSPORTS: tuple[str, ...] = get_args(Transport)
ENGINES: tuple[str, ...] = get_args(Engine)
CHECKS: tuple[str, ...] = get_args(Check)
BALANCES: tuple[str, ...] = get_args(Balance)

# Short names of placements, accepted wherever a placement is named.
_SHORT = {
    "column": "column_wise",
    "replicated": "data_parallel",
    "row": "row_wise",
    "table": "table_wise",
}


def full_placement(name: object) -> Any:
    """The full name of a placement; other values unchanged."""
    return _SHORT.get(name, name) if isinstance(name, str) else name


# For each removed option: since when, why, and what to use instead.
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


def refuse_removed(option: str, value: object, where: str) -> None:
    """Rejects a removed option, unless it is off.

    Args:
        option: name of the option.
        value: value of the option; 0, False, None and empty values are off.
        where: name of the object, for the error message.

    Raises:
        ValueError: the option is on.
    """
    on = len(value) > 0 if hasattr(value, "__len__") else bool(value)
    if on:
        raise ValueError(
            f"Argument `{option}` was removed. Received: {option}="
            f"{brief(value)} ({where}). {_REMOVED[option]}"
        )


def without_removed(value: object, option: str, where: str) -> Any:
    """The contents of a file, without a removed option that is off.

    Raises:
        ValueError: the option is on.
    """
    if not isinstance(value, Mapping) or option not in value:
        return value
    refuse_removed(option, value[option], where)
    return {name: kept for name, kept in value.items() if name != option}
