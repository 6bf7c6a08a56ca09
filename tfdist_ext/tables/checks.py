# SPDX-License-Identifier: Apache-2.0
"""Refuses values that a field cannot have, by the name of the field."""

from __future__ import annotations

import collections
import dataclasses
import numbers
import operator
import reprlib
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from tfdist_ext.tables.choices import STORAGES

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
