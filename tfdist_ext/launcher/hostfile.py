# SPDX-License-Identifier: Apache-2.0
"""Reads a file of hosts, as Open MPI and Horovod have them.

# name or address, and how many ranks it takes (1 if not said)
node1 slots=4
me@node2 slots=2
[fd00::3] slots=2
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import pathlib
import re
from collections.abc import Sequence

# What ssh takes for a host, and never for an option of its own.
_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*")
_IPV6 = re.compile(r"[0-9A-Fa-f:.]+(?:%[\w.-]+)?")
_MOST_SLOTS = 4096


@dataclasses.dataclass(frozen=True)
class Host:
    """A line of the file.

    Attributes:
        login: what ssh is given: a host, or user@host. An address of IPv6
            has no brackets.
        slots: how many ranks it takes.
    """

    login: str
    slots: int

    @property
    def name(self) -> str:
        """Name or address by which other hosts reach it."""
        return self.login.rpartition("@")[2]


def read(path: pathlib.Path) -> list[Host]:
    """Reads a file of hosts.

    Args:
        path: of the file.

    Returns:
        The hosts, in the order in which the file first names them; slots of
        one that it names again are added up.

    Raises:
        ValueError: the file cannot be read, a line is none of a host, or
            there is none.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot be read: {error}") from error
    slots: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            login, count = _login(words[0]), _slots(words[1:])
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        slots[login] = slots.get(login, 0) + count
    if not slots:
        raise ValueError(f"{path} names no host")
    return [Host(login, count) for login, count in slots.items()]


def take(hosts: Sequence[Host], ranks: int) -> list[Host]:
    """The first hosts, with as many slots as there are ranks.

    Raises:
        ValueError: there are not that many slots.
    """
    total = sum(host.slots for host in hosts)
    if ranks > total:
        raise ValueError(f"{ranks} ranks do not fit into {total} slots")
    taken = []
    for host in hosts:
        if ranks > 0:
            taken.append(Host(host.login, min(host.slots, ranks)))
        ranks -= host.slots
    return taken


def _login(word: str) -> str:
    """What ssh is given for the first word of a line.

    Raises:
        ValueError: it is no host.
    """
    user, at, host = word.rpartition("@")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not at or _NAME.fullmatch(user):
        if _IPV6.fullmatch(bare):
            with contextlib.suppress(ValueError):
                return f"{user}{at}{ipaddress.IPv6Address(bare)}"
        if _NAME.fullmatch(host):
            return word
    raise ValueError(
        f"{word!r} is no name or address of a host, such as node1, 10.0.0.1, "
        "[fd00::1] or me@node1; slots=N follows it after a space"
    )


def _slots(words: Sequence[str]) -> int:
    """How many ranks a host takes, of the words after it.

    Raises:
        ValueError: one of them says something else.
    """
    slots = 1
    for word in words:
        name, _, value = word.partition("=")
        if name not in ("slots", "max_slots", "max-slots"):
            raise ValueError(f"{word!r} is not slots=N")
        if not value.isdecimal() or not 0 < int(value) <= _MOST_SLOTS:
            raise ValueError(
                f"slots must be from 1 to {_MOST_SLOTS}, not {value!r}"
            )
        if name == "slots":
            slots = int(value)
    return slots
