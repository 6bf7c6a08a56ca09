# SPDX-License-Identifier: Apache-2.0
"""Names of the values in a nest, for messages."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

Nest = Any


def names_of(nest: Nest) -> list[str]:
    """A name such as `0/user` for each value, in the order of `tf.nest`.

    Args:
        nest: of dicts, tuples and lists. Values of other containers have
            their number only.
    """
    names = list(_names(nest, ""))
    count = len(tf.nest.flatten(nest))
    return names if len(names) == count else [str(i) for i in range(count)]


def _names(nest: Nest, name: str) -> Iterator[str]:
    items: Any = None
    if isinstance(nest, Mapping):
        items = sorted(nest.items())
    elif isinstance(nest, tuple | list):
        items = enumerate(nest)
    if items is None:
        yield name or "the batch"
        return
    for key, part in items:
        yield from _names(part, f"{name}/{key}".removeprefix("/"))
