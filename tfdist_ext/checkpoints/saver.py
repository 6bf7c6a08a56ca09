# SPDX-License-Identifier: Apache-2.0
"""TensorFlow's ways to save and restore checkpoints, as steps of all ranks.

Stock knows one writer. Here whatever holds a variable of the strategy is
saved and restored by all ranks together: the path given on rank 0 counts,
each rank writes its shards, rank 0 everything else, and an error of one rank
is an error of all. What holds no such variable is a rank's own affair and
stays as it is in stock.
"""

from __future__ import annotations

import collections as collections_lib
import contextlib
import copy
import json
import os
import threading
import warnings
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist_ext.checking import drift
from tfdist_ext.checkpoints import reading
from tfdist_ext.checkpoints import writing
from tfdist_ext.checkpoints.changed_rows import ChangedRows
from tfdist_ext.checkpoints.saved_objects import collectives_of
from tfdist_ext.checkpoints.saved_objects import variable_of
from tfdist_ext.collectives.collectives import Collectives
from tfdist_ext.collectives.first_rank import path_to_read
from tfdist_ext.collectives.first_rank import text_of_first_rank


class _Acting(threading.local):
    collectives: Collectives | None = None
    copies: list[writing.Parts] | None = None
    changed: ChangedRows | None = None
    full: str | None = None


_acting = _Acting()


@contextlib.contextmanager
def _of(collectives: Collectives | None) -> Iterator[None]:
    """Savers used inside act for these ranks; None as in stock."""
    before, _acting.collectives = _acting.collectives, collectives
    try:
        yield
    finally:
        _acting.collectives = before


@contextlib.contextmanager
def copying(
    changed: ChangedRows | None = None,
) -> Iterator[list[writing.Parts]]:
    """What is saved inside is copied into the list instead of written.

    Args:
        changed: what has changed since a full checkpoint, None for all.
    """
    copies: list[writing.Parts] = []
    _acting.copies, _acting.changed = copies, changed
    try:
        yield copies
    finally:
        _acting.copies = _acting.changed = None


@contextlib.contextmanager
def over(full: str | None) -> Iterator[None]:
    """What is restored inside has changed since another checkpoint.

    Args:
        full: path of that one; None if there is none.
    """
    _acting.full = full
    try:
        yield
    finally:
        _acting.full = None


def on_all_ranks(verb: str) -> Callable[..., Any]:
    """A call that all ranks make, and that ends for all or for none."""

    def call(original: Any, checkpoint: Any, *args: Any, **kwargs: Any) -> Any:
        collectives = collectives_of(_objects(checkpoint))
        with _of(collectives):
            if collectives is None:
                return original(checkpoint, *args, **kwargs)
            (path, *_) = [*args, *kwargs.values()]
            _check_eager(verb, path)
            args = tuple(map(_synchronous, args))
            kwargs = {name: _synchronous(arg) for name, arg in kwargs.items()}
            with collectives.together(f"{verb} '{path}'"):
                if verb == "restore":
                    args, kwargs = _from_first(args, kwargs, collectives)
                if verb == "save":
                    _compare_replicas(checkpoint, collectives)
                result = original(checkpoint, *args, **kwargs)
                collectives.barrier(f"checkpoint/{verb}")
            return result

    return call


def _from_first(
    args: tuple[Any, ...], kwargs: dict[str, Any], collectives: Collectives
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with the path of rank 0, which comes first."""
    (path, *_) = [*args, *kwargs.values()]
    path = path_to_read(path, collectives)
    if args:
        return (path, *args[1:]), kwargs
    (name, *_) = kwargs
    return args, {**kwargs, name: path}


def _compare_replicas(checkpoint: Any, collectives: Collectives) -> None:
    drift.compare_replicas(
        map(variable_of, _objects(checkpoint)),
        collectives,
        "before a checkpoint is saved",
    )


def _objects(checkpoint: Any) -> list[Any]:
    objects: list[Any] = checkpoint._saver._graph_view.descendants()
    return objects


def _check_eager(verb: str, path: Any) -> None:
    if not tf.executing_eagerly():
        raise ValueError(
            f"A checkpoint of several ranks cannot {verb} inside of a "
            f"tf.function. Received: path={path}. Call it outside, or from a "
            "callback."
        )


def _synchronous(argument: Any) -> Any:
    """Checkpoint options without what cannot be done with several ranks."""
    if not getattr(argument, "experimental_enable_async_checkpoint", False):
        return argument
    # A copy of all shards, and exchanges of the writing thread between those
    # of the steps, would be needed to go on training meanwhile.
    warnings.warn(
        "experimental_enable_async_checkpoint has no effect with several "
        "ranks: the checkpoint is written before the call returns.",
        stacklevel=2,
    )
    options = copy.copy(argument)
    options.experimental_enable_async_checkpoint = False
    return options


def save_parts(
    original: Any, saver: Any, file_prefix: Any, options: Any = None
) -> Any:
    collectives = _acting.collectives
    if _acting.copies is not None:
        parts = writing.gather(
            saver, file_prefix, options, collectives, _acting.changed
        )
        return _acting.copies.append(writing.copied(parts))
    if collectives is None:
        return original(saver, file_prefix, options)
    return writing.save(saver, file_prefix, options, collectives)


def restore_parts(
    original: Any, saver: Any, file_prefix: Any, options: Any = None
) -> Any:
    collectives = _acting.collectives
    full = _acting.full
    if (collectives is None and full is None) or not tf.executing_eagerly():
        return original(saver, file_prefix, options)
    return reading.restore(
        original, saver, file_prefix, options, collectives, full
    )


def save_managed(original: Any, manager: Any, *args: Any, **kwargs: Any) -> Any:
    collectives = collectives_of(_objects(manager.checkpoint))
    if collectives is None:
        return original(manager, *args, **kwargs)
    with collectives.together(f"save into '{manager.directory}'"):
        first = _state_of_first_rank(manager, collectives)
        if _is_first(collectives) or not _same_folder(manager, first):
            saved = original(manager, *args, **kwargs)
            _state_of_first_rank(manager, collectives)
            return saved
        # Rank 0 alone removes old checkpoints and writes the state file; by
        # its clock, since with others each would keep another selection.
        with _without_files(manager):
            saved = original(manager, *args, **kwargs)
        first = _state_of_first_rank(manager, collectives)
        kept = collections_lib.OrderedDict(first["kept"])
        manager._maybe_delete = kept
        manager._last_preserved_timestamp = first["preserved"]
    return saved


def _is_first(collectives: Collectives) -> bool:
    return collectives.group.rank == 0


def _same_folder(manager: Any, first: dict[str, Any]) -> bool:
    return os.path.abspath(manager.directory) == first["folder"]


def _state_of_first_rank(
    manager: Any, collectives: Collectives
) -> dict[str, Any]:
    state = json.dumps(
        {
            "folder": os.path.abspath(manager.directory),
            "kept": list(manager._maybe_delete.items()),
            "preserved": manager._last_preserved_timestamp,
        }
    )
    told = text_of_first_rank(state, collectives, "checkpoint/manager")
    found: dict[str, Any] = json.loads(told)
    return found


@contextlib.contextmanager
def _without_files(manager: Any) -> Iterator[None]:
    manager._sweep = manager._record_state = lambda: None
    try:
        yield
    finally:
        del manager._sweep, manager._record_state


def refuse_by_name(original: Any, saver: Any, *args: Any, **kwargs: Any) -> Any:
    if collectives_of(tf.nest.flatten(saver._var_list or [])) is not None:
        raise ValueError(
            "tf.compat.v1.train.Saver knows neither ranks nor parts of a "
            "table. Use tf.train.Checkpoint."
        )
    return original(saver, *args, **kwargs)
