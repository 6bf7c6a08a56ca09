# SPDX-License-Identifier: Apache-2.0
"""What each rank writes of a checkpoint: names, slices and values, by file."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from tfdist_ext.checkpoints import changed_rows
from tfdist_ext.checkpoints import saved_objects
from tfdist_ext.checkpoints.changed_rows import ChangedRows
from tfdist_ext.checkpoints.changed_rows import Entry
from tfdist_ext.collectives.collectives import Collectives


def files_of(
    saver: Any,
    options: Any,
    collectives: Collectives | None,
    changed: ChangedRows | None,
) -> list[list[Entry]]:
    """What this rank writes, by file; all ranks must call.

    Args:
        saver: `MultiDeviceSaver` of this rank's objects.
        options: `tf.train.CheckpointOptions`.
        collectives: of the strategy; None in one process.
        changed: notes what the rows are, and says which have changed.
    """
    rank = collectives.group.rank if collectives else 0
    if changed is not None and changed.since_full:
        return _changed_files(saver, rank, changed, collectives)
    return _files(saver, options, rank, changed)


def _files(
    saver: Any, options: Any, rank: int, changed: ChangedRows | None
) -> list[list[Entry]]:
    """What this rank writes, by file; exchanges rows with the others."""
    shards, others = _shards_and_others(saver, rank)
    files = _split(saver, shards, None)
    callback = options.experimental_sharding_callback if rank == 0 else None
    files += _others(saver, others, rank, callback)
    if changed is not None:
        tables = list(filter(changed_rows.is_table, _flat(shards.values())))
        noted = {tensor.checkpoint_key for tensor in tables}
        entries = [each for each in _flat(files) if each[0] not in noted]
        changed.note(tables, entries)
    if callback is not None:
        return files
    return [_flat(files)] if files else []


def _changed_files(
    saver: Any,
    rank: int,
    changed: ChangedRows,
    collectives: Collectives | None,
) -> list[list[Entry]]:
    """What this rank writes where a full checkpoint has the rest, as a file."""
    shards, others = _shards_and_others(saver, rank)
    tables = list(filter(changed_rows.is_table, _flat(shards.values())))
    keys = {tensor.checkpoint_key for tensor in tables}
    rest = {
        task: [each for each in tensors if each.checkpoint_key not in keys]
        for task, tensors in shards.items()
    }
    entries = _flat(_split(saver, rest, None))
    entries += _flat(_others(saver, others, rank, None))
    rows = changed.note(tables, entries)
    shared = {
        changed_rows.object_of(each.checkpoint_key)
        for each in _flat(shards.values())
    }
    by_row = changed.objects_by_row(rows, shared, collectives)
    fit = {each.key for each in rows}
    by_row -= {
        changed_rows.object_of(name) for name, *_ in entries if name not in fit
    }
    whole = {
        task: [
            each
            for each in tensors
            if each.checkpoint_key in keys
            and changed_rows.object_of(each.checkpoint_key) not in by_row
        ]
        for task, tensors in shards.items()
    }
    written = _flat(_split(saver, whole, None))
    written += [
        e for e in entries if changed_rows.object_of(e[0]) not in by_row
    ]
    for each in rows:
        if each.object in by_row:
            written += each.entries(rank)
    return [written] if written else []


def _others(
    saver: Any, others: dict[Any, list[Any]], rank: int, callback: Any
) -> list[list[Entry]]:
    """What is no shard, by file: rank 0's, and states of each rank's own."""
    files = _split(saver, others, callback)
    if rank == 0:
        return files
    return [
        [
            (saved_objects.name_of_rank(name, rank), spec, value)
            for name, spec, value in file
        ]
        for file in files
    ]


def _flat(lists: Iterable[Iterable[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


def _shards_and_others(
    saver: Any, rank: int
) -> tuple[dict[Any, list[Any]], dict[Any, list[Any]]]:
    """This rank's tensors by device, shards and what else it writes."""
    shards: dict[Any, list[Any]] = {}
    others: dict[Any, list[Any]] = {}
    for task, tensors in saver._shardable_tensors_by_task.items():
        for tensor in tensors:
            found = changed_rows.trackable_of(tensor)
            if saved_objects.is_sum(found):
                # Read by an exchange, which needs all ranks.
                tensor = _evaluated(tensor)
            if saved_objects.is_shard(found):
                shards.setdefault(task, []).append(tensor)
            elif rank == 0 or saved_objects.is_of_one_rank(found):
                others.setdefault(task, []).append(tensor)
    return shards, others


def _evaluated(tensor: Any) -> Any:
    spec = tensor._tensor_save_spec
    value = spec.tensor
    spec._tensor = value
    return tensor


def _split(
    saver: Any, by_task: dict[Any, list[Any]], callback: Any
) -> list[list[Entry]]:
    """Values and names of tensors, by file."""
    saver._shardable_tensors_by_task = by_task
    files = []
    for _, shards in saver._get_shards_by_task(callback):
        for shard in shards:
            entries = [
                (name, spec, value)
                for name, slices in shard.items()
                for spec, value in slices.items()
                if value is not None
            ]
            if entries:
                files.append(entries)
    return files
