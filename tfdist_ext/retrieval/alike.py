# SPDX-License-Identifier: Apache-2.0
"""What all ranks do with an index: alike, or all learn whose is different."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any
from typing import TypeVar

import numpy as np
import tensorflow as tf

from tfdist_ext.collectives import collectives as collectives_lib
from tfdist_ext.collectives.agreeing import agree
from tfdist_ext.collectives.collectives import Collectives

Method = TypeVar("Method", bound=Callable[..., Any])


def on_all_ranks(method: Method) -> Method:
    """Lets a method of a layer with `_collectives` fail on all ranks, or none.

    An error that one rank meets before an exchange would leave the others
    waiting in theirs.
    """

    @functools.wraps(method)
    def together(layer: Any, *args: Any, **kwargs: Any) -> Any:
        collectives = layer._collectives or collectives_lib.active()
        if collectives is None:
            return method(layer, *args, **kwargs)
        what = f"{method.__name__} of '{layer.name}'"
        with collectives.together(what, own_first=True):
            return method(layer, *args, **kwargs)

    return together  # type: ignore[return-value]


def check_index(
    collectives: Collectives | None,
    name: str,
    candidates: Any,
    **given: Any,
) -> None:
    """Compares what the ranks index, but for the numbers in the rows.

    Args:
        collectives: of the strategy; all ranks must call.
        name: of the layer.
        candidates: a layer, a variable or rows.
        **given: identifiers and the like, compared by their bytes.

    Raises:
        tf.errors.InvalidArgumentError: on every rank, naming who differs.
    """
    if collectives is None:
        return
    kind = type(candidates).__name__
    if isinstance(candidates, tf.Tensor):
        kind = f"rows {candidates.dtype.name} {candidates.shape}"
    lines = [f"{key}: {_brief(value)}" for key, value in given.items()]
    agree(collectives, [f"index '{name}' of {kind}", *lines])


def _brief(given: Any) -> str:
    """What tells values from others: their number, dtype and bytes."""
    if given is None or isinstance(given, str):
        return str(given)
    given = tf.convert_to_tensor(given)
    values = np.asarray(given)
    digest = hashlib.blake2b(digest_size=6)
    parts = values.flat if values.dtype == object else [values.tobytes()]
    for part in parts:
        digest.update(b"%d " % len(part) + part)
    return f"{given.dtype.name} {list(values.shape)} {digest.hexdigest()}"
