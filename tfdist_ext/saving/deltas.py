# SPDX-License-Identifier: Apache-2.0
"""What has changed in a model since it was last exported.

Each rank keeps a fingerprint of 8 bytes of every row that it has, and the keys
of a vocabulary that grows. So training does nothing for it, and whatever
changes a row is noticed.
"""

from __future__ import annotations

import dataclasses
import math
import os
import uuid
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.comm.exchanges import text_of_first_rank
from tfdist_ext.embedding.sharded_variable import fingerprints
from tfdist_ext.keras_internals import value_of
from tfdist_ext.saving import delta_files
from tfdist_ext.saving import shared_files
from tfdist_ext.saving.served_model import ServedModel
from tfdist_ext.saving.served_model import Table
from tfdist_ext.tables import placement
from tfdist_ext.tables.placement import ShardSpec


class Exported:
    """What a model was when it was last exported.

    Attributes:
        served: as it was exported.
        number: of the last delta, 0 for none.
        rows: where this rank's rows lay and their fingerprints, by table.
        keys: this rank's of every vocabulary that grows.
    """

    def __init__(
        self, served: ServedModel, collectives: Collectives | None
    ) -> None:
        self.served, self.number = served, 0
        self.rows = {
            name: _Rows.of(table, collectives)
            for name, table in served.tables.items()
        }
        self.keys = [each.known() for each in served.keys]


@dataclasses.dataclass(frozen=True)
class _Rows:
    """This rank's rows of a table, at one time.

    Attributes:
        spec: which ones, None for those of a table that all ranks have.
        fingerprints: uint64 `[local_rows]`.
    """

    spec: ShardSpec | None
    fingerprints: np.ndarray

    @classmethod
    def of(cls, table: Table, collectives: Collectives | None) -> _Rows:
        local = _local(table, collectives)
        return cls(marks.shard_spec(table.source()), fingerprints(local))

    def changed_since(self, before: _Rows) -> np.ndarray:
        """Local rows that are others than before; all if they have moved."""
        if self.spec != before.spec:
            return np.arange(len(self.fingerprints))
        return np.flatnonzero(self.fingerprints != before.fingerprints)


def new_export_id(collectives: Collectives | None) -> str:
    """A name for an export, the same on all ranks."""
    return text_of_first_rank(uuid.uuid4().hex, collectives, "export/id")


def export_delta(model: Any, path: str | os.PathLike[str]) -> int:
    """Writes what has changed since the last export; all ranks must call.

    The file has the rows of tables that are not what they were at the last
    `export(..., deltas=True)` or `export_delta`, and all other variables. Rank
    0 writes it, and puts it into place at once. `apply_delta` updates a model
    that is being served.

    Args:
        model: that was exported.
        path: of the file. That of rank 0 counts.

    Returns:
        The number of the delta. Deltas are numbered from 1 and applied in
        order.

    Raises:
        ValueError: if the model was not exported so.
        OSError: if rank 0 cannot write. The next delta has it all then.
    """
    exported = marks.exported(model)
    if exported is None:
        raise ValueError(
            f"Model '{model.name}' was not exported, so nothing is known to "
            "have changed. Call tfdist_ext.export(model, folder, deltas=True) "
            "before."
        )
    collectives = shared_files.collectives_of(model)
    path = os.fspath(path)
    if collectives is None:
        return _export_delta(exported, path, None)
    with collectives.together(f"export a delta to '{path}'", all_end=True):
        return _export_delta(exported, path, collectives)


def _export_delta(
    exported: Exported, path: str, collectives: Collectives | None
) -> int:
    served, first = exported.served, _is_first(collectives)
    tables = {}
    now = {}
    for index, (name, table) in enumerate(served.tables.items()):
        now[name] = _Rows.of(table, collectives)
        changed = now[name].changed_since(exported.rows[name])
        local, spec = _local(table, collectives), now[name].spec
        if spec is None or collectives is None:
            ids, rows = changed, tf.gather(local, changed).numpy()
        else:
            ids, rows = _to_first_rank(local, changed, spec, collectives)
        tables[name] = (index, ids, table.encoded(rows))
    keys = [each.known() for each in served.keys]
    changes = [
        each.changes(known, before, collectives)
        for each, known, before in zip(
            served.keys, keys, exported.keys, strict=True
        )
    ]
    dense = served.dense_values()
    number = exported.number + 1
    if first:
        delta_files.write(
            path, served.export_id, number, tables, dense, changes
        )
    if collectives is not None:
        collectives.barrier("export/delta")
    exported.number, exported.rows, exported.keys = number, now, keys
    return number


def _is_first(collectives: Collectives | None) -> bool:
    return collectives is None or collectives.group.rank == 0


def _local(table: Table, collectives: Collectives | None) -> tf.Tensor:
    """The rows that this rank answers for: rank 0 for those that all have."""
    source = table.source()
    if marks.shard_spec(source) is not None:
        return value_of(source).read_value()
    rows = tf.convert_to_tensor(value_of(source))
    return rows if _is_first(collectives) else rows[:0]


def _to_first_rank(
    local: tf.Tensor,
    changed: np.ndarray,
    spec: ShardSpec,
    collectives: Collectives,
) -> tuple[np.ndarray, np.ndarray]:
    """Ids and whole rows that have changed on any rank; none on others."""
    if spec.column_parts > 1:
        changed = _changed_on_peers(changed, spec, collectives)
    ids = np.zeros([0], np.int64)
    if spec.cell is not None:
        ids = placement.ids_of_part(spec.cell[0], spec.row_parts, spec.rows)
    changed = changed[changed < len(ids)]  # without padding
    splits = np.zeros([spec.world_size], np.int64)
    splits[0] = len(changed)
    all_ids, counts = collectives.all_to_all(
        tf.constant(ids[changed]),
        tf.constant(splits),
        f"{spec.table}/delta ids",
    )
    flat, _ = collectives.all_to_all(
        tf.reshape(tf.gather(local, changed), [-1]),
        tf.constant(splits * spec.local_dim),
        f"{spec.table}/delta",
    )
    unique = np.unique(all_ids.numpy())
    rows = np.zeros([len(unique), spec.dim], flat.dtype.as_numpy_dtype)
    place = 0
    ends = np.cumsum(counts.numpy())
    for rank, mine in enumerate(np.split(all_ids.numpy(), ends[:-1])):
        part = spec.at(rank)
        shape = len(mine), part.local_dim
        piece = flat.numpy()[place : place + math.prod(shape)].reshape(shape)
        place += piece.size
        rows[np.searchsorted(unique, mine), slice(*part.columns)] = piece
    return unique, rows


def _changed_on_peers(
    changed: np.ndarray, spec: ShardSpec, collectives: Collectives
) -> np.ndarray:
    """Local rows of which any rank with other columns has changed some."""
    part = spec.cell[0] if spec.cell else -1
    mine = np.stack([np.full_like(changed, part), changed], 1)
    told = collectives.all_gather(
        tf.constant(mine, tf.int64), f"{spec.table}/delta rows"
    ).numpy()
    return np.unique(told[told[:, 0] == part, 1])


def apply_delta(served: Any, path: str | os.PathLike[str]) -> dict[str, int]:
    """Updates a served model in place by a delta, while it serves.

    The model does so itself, by TensorFlow's ops: where this package is not
    installed, `served.apply_delta(path)` is the same, and in other servers the
    signature `apply_delta`. Nothing changes if the file is damaged, of
    another model, or not the next one.

    Args:
        served: what `tf.saved_model.load` has returned, of a model that was
            exported with `deltas=True`.
        path: of the file.

    Returns:
        `number` of the delta, `rows` that it has changed, `microseconds`
        since 1970 when it was written.

    Raises:
        ValueError: for a model that takes no deltas.
        tf.errors.InvalidArgumentError: for a delta that is not the next one
            of this model.
        tf.errors.DataLossError: for a damaged file.
        tf.errors.NotFoundError: if there is none.
    """
    if not hasattr(served, "apply_delta"):
        raise ValueError(
            "The model takes no deltas. Export it with "
            "tfdist_ext.export(model, folder, deltas=True)."
        )
    found = served.apply_delta(tf.constant(os.fspath(path)))
    return {name: int(value) for name, value in found.items()}
