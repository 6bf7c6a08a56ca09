# SPDX-License-Identifier: Apache-2.0
"""Kernels of partitioned tables, read as tensors.

A kernel is an ordinary variable that holds this rank's part. An op that took
it for the whole table would find other rows than those that the ids ask for,
and say nothing. So it does not become a tensor by itself, except for what
treats every row alike: updates, averages, histograms. `numpy()`, which says
that it gives this rank's part, and `read_value()` go on.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.marks import shard_spec

# What conversions, operators and slices, and gathers call.
_READS = ("value", "sparse_read", "gather_nd")


class _Allowed(threading.local):
    by: int = 0


_allowed = _Allowed()


@contextlib.contextmanager
def allowed() -> Iterator[None]:
    """Kernels read inside, by this thread, give this rank's part."""
    _allowed.by += 1
    try:
        yield
    finally:
        _allowed.by -= 1


def read_parts(original: Any, *args: Any, **kwargs: Any) -> Any:
    with allowed():
        return original(*args, **kwargs)


def refuse(variable: tf.Variable) -> None:
    """Makes a kernel refuse to become a tensor where its part is no use."""
    for name in _READS:
        setattr(variable, name, _checked(getattr(variable, name), variable))


def _checked(
    read: Callable[..., Any], variable: tf.Variable
) -> Callable[..., Any]:
    @functools.wraps(read)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not _allowed.by and not internals.is_updating():
            spec = shard_spec(variable)
            assert spec is not None
            raise ValueError(
                f"Table '{spec.table}' is partitioned: of {spec.rows} x "
                f"{spec.dim} numbers its kernel holds rank {spec.rank}'s "
                f"{spec.local_shape[0]} x {spec.local_shape[1]}, by local row "
                "numbers, and cannot stand for the table in an op, an index "
                "or a loss. Read the whole table, on all ranks: "
                "strategy.gather_table(layer), or get_embedding_tables() of a "
                "DistributedEmbedding. kernel.numpy() is this rank's part."
            )
        return read(*args, **kwargs)

    return checked
