# SPDX-License-Identifier: Apache-2.0
"""Models as SavedModels that any TensorFlow loads and serves."""

from __future__ import annotations

import contextlib
import os
from typing import Any
from typing import Literal

import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext.collectives.collectives import Collectives
from tfdist_ext.collectives.first_rank import text_of_first_rank
from tfdist_ext.saving import model_shards
from tfdist_ext.serving import writing
from tfdist_ext.serving.deltas import Exported
from tfdist_ext.serving.deltas import new_export_id
from tfdist_ext.serving.row_codes import TABLE_DTYPES
from tfdist_ext.serving.served_model import ServedModel
from tfdist_ext.tables import checks

TableDtype = Literal["float32", "bfloat16", "int8"]
Place = Literal["inside", "files"]


def export(
    model: Any,
    path: str | os.PathLike[str],
    table_dtype: TableDtype = "float32",
    tables: Place = "inside",
    *,
    inputs: Any = None,
    deltas: bool = False,
) -> None:
    """Writes a SavedModel of plain TensorFlow ops; all ranks must call.

    TensorFlow Serving, `tf.saved_model.load`, `saved_model_cli` and the C API
    load it without this package. Every rank writes its part of the tables,
    and needs memory for a few blocks of 64 MiB. With float32 the model predicts
    what `predict` does, but for the order in which a sample's rows are summed.

    What is loaded is called as the model is, or by its name `serve`; the
    signature `serving_default` takes tensors by name: see docs/serving.md.

    Args:
        model: of Keras, built, or a `ShardedTopK`: its call in inference.
        path: of the folder. A SavedModel that is there is replaced when the
            new one is complete.
        table_dtype: in which tables are served: "float32", "bfloat16", or
            "int8" with a float32 scale for every row, which is 4 bytes more.
        tables: where they are: "inside", among the variables, which a server
            reads when it starts; or "files", which it maps into memory: it
            starts at once, reads the rows that it looks up, and shares them
            with other servers of its host. Such a model stays in its folder.
        inputs: what the model takes: a nest of `tf.TensorSpec`,
            `tf.RaggedTensorSpec` and `tf.SparseTensorSpec`, or a batch. Known
            of Functional and Sequential models, and of those of tf_keras and
            indexes that have been called.
        deltas: whether the model takes deltas (`export_delta`). Each rank
            then remembers 8 bytes for every row that it has, and for every
            key of a vocabulary that grows, 16 of a string's.

    Raises:
        ValueError: for arguments outside of these, a model whose inputs are
            not known, or whose call does what plain ops cannot.
        FileExistsError: if something else lies at the path; with
            `tables="files"` if anything does.
        OSError: if a rank cannot write, or rank 0 does not see what others
            have written. Nothing is changed then.
    """
    path = os.fspath(path)
    model, inputs = _as_model(model, inputs)
    _check(model, path, table_dtype, tables, deltas)
    collectives = model_shards.collectives_of(model)
    with (
        contextlib.nullcontext()
        if collectives is None
        else collectives.together(f"export to '{path}'", all_end=True)
    ):
        place = None
        if tables == "files":
            place = os.path.abspath(path)
            place = text_of_first_rank(place, collectives, "export/place")
        served = ServedModel(model, inputs, table_dtype, place)
        _write(model, served, path, collectives, deltas)


def _as_model(model: Any, inputs: Any) -> tuple[Any, Any]:
    """A model, and what is known of its inputs, also of an index by itself."""
    if not hasattr(model, "as_model"):
        return model, inputs
    model, asked = model.as_model()
    return model, asked if inputs is None else inputs


def _check(
    model: Any, path: str, table_dtype: str, tables: str, deltas: bool
) -> None:
    checks.one_of("table_dtype", table_dtype, TABLE_DTYPES, "export")
    if not isinstance(model, tf.keras.Model):
        raise ValueError(
            "Argument `model` must be a model of Keras. Received: "
            f"{type(model).__name__}. Put the layer into a keras.Sequential."
        )
    checks.one_of("tables", tables, ("inside", "files"), "export")
    if tables == "files" and (deltas or "://" in path):
        raise ValueError(
            "Argument `tables` must be 'inside' for a model that takes deltas, "
            "and in file systems that cannot map files. Received: 'files' "
            f"with deltas={deltas}, path='{path}'."
        )


def _write(
    model: Any,
    served: ServedModel,
    path: str,
    collectives: Collectives | None,
    deltas: bool,
) -> None:
    if collectives is not None:
        collectives.group.check_same(
            [f"{name} {table.rows}" for name, table in served.tables.items()]
        )
    path = text_of_first_rank(path, collectives, "export/path")
    exported = None
    if deltas:
        served.take_deltas(new_export_id(collectives))
        exported = Exported(served, collectives)
    with served.keys_filled(collectives):
        writing.write(served, served.signatures(), path, collectives)
    if deltas:
        marks.set_exported(model, exported)
