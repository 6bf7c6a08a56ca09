# SPDX-License-Identifier: Apache-2.0
"""What Keras's readers and writers need to know of a model's variables."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

from tfdist_ext.collectives.collectives import Collectives
from tfdist_ext.sharding import sharded_variable


def collectives_of(model: Any) -> Collectives | None:
    """Those of the strategy of a model.

    None with a single process, and after `close`: the model is then that of
    this rank alone.
    """
    strategy = getattr(model, "distribute_strategy", None)
    return while_open(getattr(strategy, "collectives", None))


def while_open(collectives: Collectives | None) -> Collectives | None:
    """None instead of what has been closed."""
    if collectives is None or not collectives.group.is_open:
        return None
    return collectives


def shards_of(model: Any) -> list[Any]:
    """Partitioned variables of a model and of its optimizers."""
    variables = list(model.variables)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        variables += list(optimizer.variables)
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        for own in getattr(inner, "table_optimizers", ()):
            variables += list(own.variables)
    return only_shards(variables)


def only_shards(variables: Sequence[Any]) -> list[Any]:
    """Those of some variables that are partitioned."""
    return [v for v in variables if sharded_variable.is_shard(v)]


@contextlib.contextmanager
def methods(variables: Sequence[Any], **methods: Any) -> Iterator[None]:
    """Gives variables other methods of these names for a while.

    Layers of ours write and read whole tables by themselves; an optimizer
    writes its variables with `numpy()` and reads them with `assign()`.
    """
    before = [
        {name: vars(v)[name] for name in methods if name in vars(v)}
        for v in variables
    ]
    for variable in variables:
        for name, method in methods.items():
            setattr(variable, name, functools.partial(method, variable))
    try:
        yield
    finally:
        for variable, own in zip(variables, before, strict=True):
            for name in methods:
                delattr(variable, name)
            for name, method in own.items():
                setattr(variable, name, method)
