# SPDX-License-Identifier: Apache-2.0
"""Reads a file of hosts, as Open MPI and Horovod have them.

# name or address, and how many ranks it takes (1 if not said)
node1 slots=4
me@node2 slots=2
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Sequence

# What ssh takes for a host, and never for an option of its own.
_HOST = re.compile(r"(?:[A-Za-z0-9_][\w.-]*@)?[A-Za-z0-9_][\w.-]*")
_MOST_SLOTS = 4096


@dataclasses.dataclass(frozen=True)
class Host:
    """A line of the file.

    Attributes:
        login: what ssh is given: a host, or user@host.
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
        if problem := _problem(words):
            raise ValueError(f"{path}, line {number}: {problem}")
        slots[words[0]] = slots.get(words[0], 0) + _slots(words)
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


def _problem(words: Sequence[str]) -> str:
    """What is wrong with the words of a line; empty if nothing is."""
    if not _HOST.fullmatch(words[0]):
        return f"{words[0]!r} is no name or IPv4 address of a host"
    for word in words[1:]:
        name, _, value = word.partition("=")
        if name not in ("slots", "max_slots", "max-slots"):
            return f"{word!r} is not slots=N"
        if not value.isdecimal() or not 0 < int(value) <= _MOST_SLOTS:
            return f"slots must be from 1 to {_MOST_SLOTS}, not {value!r}"
    return ""


def _slots(words: Sequence[str]) -> int:
    values = [w.partition("=")[2] for w in words if w.startswith("slots=")]
    return int(values[-1]) if values else 1
