# SPDX-License-Identifier: Apache-2.0
"""The changes of a model since its last export.

Each rank stores a fingerprint of 8 bytes for each of its rows, and the keys of
dynamic vocabularies. Training therefore does no extra work, and every change of
a row is noticed, whatever made it.
"""

from __future__ import annotations

import dataclasses
import math
import os
import uuid

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
from tfdist_ext.type_names import Model


class Exported:
    """The state of a model at its last export.

    Attributes:
        served: the served model that was exported.
        number: number of the last delta, 0 for none.
        rows: placement and fingerprints of this rank's rows, by table.
        keys: this rank's keys of every dynamic vocabulary.
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
        spec: placement of the table, None if all ranks have the table.
        fingerprints: uint64 `[local_rows]`.
    """

    spec: ShardSpec | None
    fingerprints: np.ndarray

    @classmethod
    def of(cls, table: Table, collectives: Collectives | None) -> _Rows:
        local = _local(table, collectives)
        return cls(marks.shard_spec(table.source()), fingerprints(local))

    def changed_since(self, before: _Rows) -> np.ndarray:
        """Local rows that have changed; all if the placement has."""
        if self.spec != before.spec:
            return np.arange(len(self.fingerprints))
        return np.flatnonzero(self.fingerprints != before.fingerprints)


def new_export_id(collectives: Collectives | None) -> str:
    """A new id of an export, the same on all ranks."""
    return text_of_first_rank(uuid.uuid4().hex, collectives, "export/id")


def export_delta(model: Model, path: str | os.PathLike[str]) -> int:
    """Writes the changes since the last export; all ranks must call.

    The file has the rows of tables that have changed since the last
    `export(..., deltas=True)` or `export_delta`, and all other variables. Rank
    0 writes it to a temporary file, then renames it. `apply_delta` updates a
    model that is being served.

    Args:
        model: model that was exported.
        path: path of the file. The value of rank 0 is used.

    Returns:
        The number of the delta. Deltas are numbered from 1 and applied in
        order.

    Raises:
        ValueError: the model was not exported with `deltas=True`.
        OSError: rank 0 cannot write. The next delta then has these changes too.
    """
    exported = marks.exported(model)
    if exported is None:
        raise ValueError(
            f"Model '{model.name}' was not exported, so its changes are not "
            "known. Call tfdist_ext.export(model, folder, deltas=True) first."
        )
    collectives = shared_files.end_round(model)
    path = os.fspath(path)
    if collectives is None:
        return _export_delta(exported, path, None)
    with collectives.joint_call(
        f"export a delta to '{path}'", end_barrier=True
    ):
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
    """The rows that this rank exports: rank 0 exports unpartitioned ones."""
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
    """Ids and entire rows that any rank has changed, on rank 0 only."""
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
    """Local rows that have changed in any column part."""
    part = spec.cell[0] if spec.cell else -1
    mine = np.stack([np.full_like(changed, part), changed], 1)
    gathered = collectives.all_gather(
        tf.constant(mine, tf.int64), f"{spec.table}/delta rows"
    ).numpy()
    return np.unique(gathered[gathered[:, 0] == part, 1])


def apply_delta(served: object, path: str | os.PathLike[str]) -> dict[str, int]:
    """Updates a served model in place from a delta, while it serves.

    The model updates itself by TensorFlow's ops. Without this package,
    `served.apply_delta(path)` does the same, and in other servers the signature
    `apply_delta`. Nothing changes if the file is damaged, of another model, or
    not the next delta.

    Args:
        served: result of `tf.saved_model.load`, for a model that was exported
            with `deltas=True`.
        path: path of the file.

    Returns:
        `number` of the delta, `rows` that it changed, and `microseconds`, its
        time of writing since 1970.

    Raises:
        ValueError: the model takes no deltas.
        tf.errors.InvalidArgumentError: the delta is not the next one of this
            model.
        tf.errors.DataLossError: the file is damaged.
        tf.errors.NotFoundError: there is no such file.
    """
    if not hasattr(served, "apply_delta"):
        raise ValueError(
            "The model was exported without deltas. Export it with "
            "tfdist_ext.export(model, folder, deltas=True)."
        )
    found = served.apply_delta(tf.constant(os.fspath(path)))
    return {name: int(value) for name, value in found.items()}
