# SPDX-License-Identifier: Apache-2.0
"""A SavedModel whose tables all ranks write.

Rank 0 saves the graph with empty tables. Then every rank writes blocks of
rows as slices of them, each to files of its own, and rank 0 merges the
indexes of all. That happens in a folder beside the path, which is renamed
when it is complete.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext.collectives.collectives import Collectives
from tfdist_ext.serving.mapped_table import MappedTable
from tfdist_ext.serving.served_model import ServedModel
from tfdist_ext.serving.served_model import Table
from tfdist_ext.serving.served_table import ServedTable
from tfdist_ext.sharding.row_blocks import row_blocks

gfile = tf.io.gfile
_PARTS = "parts"
_VALUE = ".ATTRIBUTES/VARIABLE_VALUE"


def write(
    served: ServedModel,
    signatures: Any,
    path: str,
    collectives: Collectives | None,
) -> None:
    """Writes a SavedModel; all ranks must call.

    Args:
        served: of this rank.
        signatures: functions, by name.
        path: of the folder, the same on all ranks.
        collectives: of the strategy; None in one process.
    """
    rank = 0 if collectives is None else collectives.group.rank
    folder = _beside(path, "writing")
    parts = f"{folder}/{_PARTS}"
    try:
        if rank == 0:
            _check_target(path, is_new=bool(mapped_tables(served)))
            _remove(folder)
            gfile.makedirs(parts)
            tf.saved_model.save(served, folder, signatures)
            for table in mapped_tables(served):
                table.make_files(folder)
        _barrier(collectives, "saved")
        written = _write_tables(served, folder, rank, collectives)
        dense = served.dense_values()
        if rank == 0:
            _merge(served, dense, folder, written)
            _place(folder, path)
        _barrier(collectives, "placed")
    finally:
        _clean(folder, rank)


def _barrier(collectives: Collectives | None, label: str) -> None:
    if collectives is not None:
        collectives.barrier(f"export/{label}")


def _beside(path: str, what: str) -> str:
    folder, name = os.path.split(path.rstrip("/"))
    return os.path.join(folder, f".{what}-{name}")


def _check_target(path: str, is_new: bool) -> None:
    if not gfile.exists(path):
        return
    if is_new:
        raise FileExistsError(
            f"'{path}' is there, and a model whose tables are files is not "
            "replaced: a server would find others than it has read. Export "
            "to a new folder."
        )
    if not gfile.isdir(path) or (
        gfile.listdir(path) and not gfile.exists(f"{path}/saved_model.pb")
    ):
        raise FileExistsError(
            f"'{path}' is there and is no SavedModel, so it is not replaced. "
            "Export to a new folder."
        )


def _remove(folder: str) -> None:
    if gfile.exists(folder):
        gfile.rmtree(folder)


def _clean(folder: str, rank: int) -> None:
    """Removes what a rank has left of a failure, the last one the folder.

    Not what others may still be writing: they are to learn of the failure.
    """
    try:
        for name in gfile.listdir(folder):
            if rank == 0 and name.rstrip("/") != _PARTS:
                path = f"{folder}/{name}"
                (gfile.rmtree if gfile.isdir(path) else gfile.remove)(path)
        mine = (f"{rank}-", "rest") if rank == 0 else f"{rank}-"
        for name in gfile.listdir(f"{folder}/{_PARTS}"):
            if name.startswith(mine):
                gfile.remove(f"{folder}/{_PARTS}/{name}")
        left = gfile.listdir(folder), gfile.listdir(f"{folder}/{_PARTS}")
        if list(map(len, left)) == [1, 0]:
            gfile.rmtree(folder)
    except tf.errors.OpError:
        pass  # There is none any more, or it cannot be reached.


def _write_tables(
    served: ServedModel,
    folder: str,
    rank: int,
    collectives: Collectives | None,
) -> list[str]:
    """Writes this rank's blocks of all tables; the parts of all ranks."""
    count = 0
    parts = f"{folder}/{_PARTS}"
    for table in served.tables.values():
        for first, block in row_blocks(table.source(), collectives):
            if count < 0:
                continue  # the others need this rank's rows
            encoded = table.encoded(block)
            try:
                if isinstance(table, MappedTable):
                    table.write_rows(folder, first, encoded)
                else:
                    path = f"{parts}/{rank}-{count}"
                    _write_slices(path, table, first, encoded)
                    count += 1
            except (tf.errors.NotFoundError, FileNotFoundError):
                count = -1  # not shared, or rank 0 has failed and will say so
    counts = [count]
    if collectives is not None:
        mine = tf.constant([count], tf.int64)
        counts = collectives.all_gather(mine, "export/parts").numpy().tolist()
    if min(counts) < 0:
        raise OSError(
            f"Rank {counts.index(-1)} does not see the folder '{folder}' that "
            "rank 0 has made. All ranks must share the folder that a model "
            "is exported to."
        )
    return [
        f"{parts}/{rank}-{number}"
        for rank, count in enumerate(counts)
        for number in range(count)
    ]


def _write_slices(
    path: str, table: ServedTable, first: int, encoded: dict[str, np.ndarray]
) -> None:
    sizes = (table.rows, table.dim)
    slices = [f"{first},{len(encoded['values'])}", f"0,{table.dim}"]
    with tf.device("CPU:0"):
        tf.raw_ops.SaveV2(
            prefix=path,
            tensor_names=[key_of(table, name) for name in encoded],
            shape_and_slices=[
                " ".join(map(str, sizes[: value.ndim]))
                + " "
                + ":".join(slices[: value.ndim])
                for value in encoded.values()
            ],
            tensors=list(encoded.values()),
        )


def mapped_tables(served: ServedModel) -> list[MappedTable]:
    """The tables that are files."""
    tables = served.tables.values()
    return [table for table in tables if isinstance(table, MappedTable)]


def key_of(table: Table, name: str) -> str:
    """The name of a table's variable in the files of the SavedModel."""
    # As TensorFlow escapes names of attributes.
    escaped = table.table_name.replace(".", "..").replace("/", ".S")
    return f"tables/{escaped}/{name}/{_VALUE}"


def _merge(
    served: ServedModel,
    dense: Sequence[tf.Tensor],
    folder: str,
    parts: Sequence[str],
) -> None:
    """Puts the tables among the variables in place of the empty ones."""
    missing = [part for part in parts if not gfile.exists(f"{part}.index")]
    if missing:
        raise OSError(
            f"Rank 0 does not see what other ranks have written: {missing}. "
            "All ranks must share the folder that a model is exported to."
        )
    variables = f"{folder}/variables/variables"
    others = {
        **_values_beside_tables(served, variables),
        **{f"dense/{i}/{_VALUE}": value for i, value in enumerate(dense)},
    }
    with tf.device("CPU:0"):
        tf.raw_ops.SaveV2(
            prefix=f"{folder}/{_PARTS}/rest",
            tensor_names=list(others),
            shape_and_slices=[""] * len(others),
            tensors=list(others.values()),
        )
    for old in gfile.glob(f"{variables}*"):
        gfile.remove(old)
    tf.raw_ops.MergeV2Checkpoints(
        checkpoint_prefixes=[f"{folder}/{_PARTS}/rest", *parts],
        destination_prefix=variables,
        delete_old_dirs=False,
    )
    _remove(f"{folder}/{_PARTS}")


def _values_beside_tables(
    served: ServedModel, variables: str
) -> dict[str, tf.Tensor]:
    """What is saved beside the tables, by name."""
    written = {
        key_of(table, name)
        for table in served.tables.values()
        for name in ("values", "scales")
    }
    reader = tf.train.load_checkpoint(variables)
    names = set(reader.get_variable_to_shape_map()) - written
    return {name: tf.constant(reader.get_tensor(name)) for name in names}


def _place(folder: str, path: str) -> None:
    """Gives the folder its name; what is there gives way at once."""
    if not gfile.exists(path):
        gfile.rename(folder, path)
        return
    old = _beside(path, "replaced")
    _remove(old)
    gfile.rename(path, old)
    gfile.rename(folder, path)
    gfile.rmtree(old)
