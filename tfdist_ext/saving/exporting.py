# SPDX-License-Identifier: Apache-2.0
"""Models as SavedModels that any TensorFlow loads and serves."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Literal

import numpy as np
import tensorflow as tf

from tfdist_ext import keras_internals
from tfdist_ext import marks
from tfdist_ext import thread_context
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.comm.exchanges import text_of_first_rank
from tfdist_ext.embedding.whole_tables import row_blocks
from tfdist_ext.saving import shared_files
from tfdist_ext.saving import warm_up as warm_up_files
from tfdist_ext.saving.deltas import Exported
from tfdist_ext.saving.deltas import new_export_id
from tfdist_ext.saving.served_model import ServedModel
from tfdist_ext.saving.served_model import Table
from tfdist_ext.saving.served_model import our_ops
from tfdist_ext.saving.served_table import TABLE_DTYPES
from tfdist_ext.saving.served_table import MappedTable
from tfdist_ext.saving.served_table import ServedTable
from tfdist_ext.tables import checks
from tfdist_ext.thread_context import current
from tfdist_ext.type_names import Layer
from tfdist_ext.type_names import Model
from tfdist_ext.type_names import Nest
from tfdist_ext.type_names import Nested
from tfdist_ext.type_names import Original
from tfdist_ext.type_names import Path
from tfdist_ext.type_names import T
from tfdist_ext.type_names import Trackable

keras = tf.keras
gfile = tf.io.gfile
_PARTS = "parts"
_VALUE = ".ATTRIBUTES/VARIABLE_VALUE"


def write_model(
    served: ServedModel,
    signatures: Mapping[str, Callable[..., object]],
    path: str,
    collectives: Collectives | None,
    requests: Sequence[Mapping[str, tf.Tensor]] = (),
) -> None:
    """Writes a SavedModel; all ranks must call.

    Args:
        served: served model of this rank.
        signatures: functions, by name.
        path: path of the folder, the same on all ranks.
        collectives: collectives of the strategy; None in one process.
        requests: warm-up requests, see `tfdist_ext.saving.warm_up`.
    """
    rank = 0 if collectives is None else collectives.group.rank
    folder = _hidden_path(path, "writing")
    parts = f"{folder}/{_PARTS}"
    try:
        if rank == 0:
            _check_target(path, is_new=bool(mapped_tables(served)))
            _remove(folder)
            gfile.makedirs(parts)
            tf.saved_model.save(served, folder, signatures)
            if requests:
                warm_up_files.write(folder, requests)
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


def _hidden_path(path: str, what: str) -> str:
    folder, name = os.path.split(path.rstrip("/"))
    return os.path.join(folder, f".{what}-{name}")


def _check_target(path: str, is_new: bool) -> None:
    if not gfile.exists(path):
        return
    if is_new:
        raise FileExistsError(
            f"'{path}' exists, and a model whose tables are files is not "
            "replaced, because servers may be using these files. Export to a "
            "new folder."
        )
    if not gfile.isdir(path) or (
        gfile.listdir(path) and not gfile.exists(f"{path}/saved_model.pb")
    ):
        raise FileExistsError(
            f"'{path}' exists and is not a SavedModel, so it is not replaced. "
            "Export to a new folder."
        )


def _remove(folder: str) -> None:
    if gfile.exists(folder):
        gfile.rmtree(folder)


def _clean(folder: str, rank: int) -> None:
    """Removes what a rank has left; the last rank removes the folder.

    It leaves what other ranks may still be writing: they learn of the failure
    by themselves.
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
        pass  # removed already, or unreachable


def _write_tables(
    served: ServedModel,
    folder: str,
    rank: int,
    collectives: Collectives | None,
) -> list[str]:
    """Writes this rank's blocks of all tables; returns all ranks' parts."""
    count = 0
    parts = f"{folder}/{_PARTS}"
    for table in served.tables.values():
        for first, block in row_blocks(table.source(), collectives):
            if count < 0:
                continue  # but other ranks need this rank's rows
            encoded = table.encoded(block)
            try:
                if isinstance(table, MappedTable):
                    table.write_rows(folder, first, encoded)
                else:
                    path = f"{parts}/{rank}-{count}"
                    _write_slices(path, table, first, encoded)
                    count += 1
            except (tf.errors.NotFoundError, FileNotFoundError):
                count = -1  # not shared, or rank 0 has failed
    counts = [count]
    if collectives is not None:
        mine = tf.constant([count], tf.int64)
        counts = collectives.all_gather(mine, "export/parts").numpy().tolist()
    if min(counts) < 0:
        raise OSError(
            f"Rank {counts.index(-1)} does not see the folder '{folder}' that "
            "rank 0 has created. All ranks must share the folder that a model "
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
    # TensorFlow escapes names of attributes in this way.
    escaped = table.table_name.replace(".", "..").replace("/", ".S")
    return f"tables/{escaped}/{name}/{_VALUE}"


def _merge(
    served: ServedModel,
    dense: Sequence[tf.Tensor],
    folder: str,
    parts: Sequence[str],
) -> None:
    """Replaces the empty tables among the variables by the written ones."""
    missing = [part for part in parts if not gfile.exists(f"{part}.index")]
    if missing:
        raise OSError(
            f"Rank 0 does not see what other ranks have written: {missing}. "
            "All ranks must share the folder that a model is exported to."
        )
    variables = f"{folder}/variables/variables"
    others = {
        **_values_without_tables(served, variables),
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


def _values_without_tables(
    served: ServedModel, variables: str
) -> dict[str, tf.Tensor]:
    """The saved values of everything but the tables, by name."""
    written = {
        key_of(table, name)
        for table in served.tables.values()
        for name in ("values", "scales")
    }
    reader = tf.train.load_checkpoint(variables)
    names = set(reader.get_variable_to_shape_map()) - written
    return {name: tf.constant(reader.get_tensor(name)) for name in names}


def _place(folder: str, path: str) -> None:
    """Renames the folder; one that is there is replaced."""
    if not gfile.exists(path):
        gfile.rename(folder, path)
        return
    old = _hidden_path(path, "replaced")
    _remove(old)
    gfile.rename(path, old)
    gfile.rename(folder, path)
    gfile.rmtree(old)


TableDtype = Literal["float32", "bfloat16", "int8"]
Place = Literal["inside", "files"]


def export(
    model: Model,
    path: str | os.PathLike[str],
    table_dtype: TableDtype = "float32",
    tables: Place = "inside",
    *,
    inputs: Nest = None,
    deltas: bool = False,
    warm_up: Sequence[Nest] = (),
) -> None:
    """Writes a SavedModel of plain TensorFlow ops; all ranks must call.

    TensorFlow Serving, `tf.saved_model.load`, `saved_model_cli` and the C API
    load it without this package. Every rank writes its part of the tables, and
    needs memory for a few blocks of 64 MiB. With float32 tables, predictions
    equal those of `predict`, up to the order in which a sample's rows are
    summed. A loaded model is called as the model is, or by its name `serve`.
    The signature `serving_default` takes tensors by name: see docs/serving.md.

    Args:
        model: Keras model, built, or a `ShardedTopK`; its call in inference is
            exported.
        path: path of the folder. A complete SavedModel replaces an older one.
        table_dtype: dtype of the served tables: "float32", "bfloat16", or
            "int8" with a float32 scale per row, which takes 4 more bytes.
        tables: where tables are stored. "inside": among the variables, which a
            server reads at its start. "files": in files, which a server maps
            into memory. It then starts at once, reads only rows that it looks
            up, and shares them with other servers of the host. The model must
            not be moved.
        inputs: a nest of specs of TensorFlow, or a batch. Not needed for
            Functional and Sequential models, called tf_keras models, indexes.
        deltas: whether the model takes deltas (`export_delta`). Each rank then
            stores 8 bytes for each of its rows and for each key of a dynamic
            vocabulary, 16 for a string key.
        warm_up: batches as for `predict`, at most 1,000. TensorFlow Serving
            computes them before it serves the model.

    Raises:
        ValueError: an argument is invalid, the inputs of the model are not
            known, or its call needs other than plain ops.
        FileExistsError: there is something else at the path; with
            `tables="files"`, if there is anything.
        OSError: a rank cannot write, or rank 0 does not see the files of other
            ranks. Nothing is changed then.
    """
    path = os.fspath(path)
    model, inputs = as_model(model, inputs)
    _check(model, path, table_dtype, tables, deltas)
    collectives = shared_files.end_round(model)
    with (
        contextlib.nullcontext()
        if collectives is None
        else collectives.joint_call(f"export to '{path}'", end_barrier=True)
    ):
        place = os.path.abspath(path) if tables == "files" else None
        if place is not None:
            place = text_of_first_rank(place, collectives, "export/place")
        served = ServedModel(model, inputs, table_dtype, place)
        _write(model, served, path, collectives, deltas, warm_up)


def as_model(model: Model, inputs: Nest) -> tuple[Model, Nest]:
    """A model or index as a model, and its inputs if they are known."""
    if not hasattr(model, "as_model"):
        return model, inputs
    model, asked = model.as_model()
    return model, asked if inputs is None else inputs


def check_model(model: Model, table_dtype: str, where: str) -> None:
    """Refuses what cannot be exported.

    Args:
        model: argument of the user.
        table_dtype: argument of the user.
        where: name of the function, for errors.

    Raises:
        ValueError: an argument is invalid.
    """
    checks.one_of("table_dtype", table_dtype, TABLE_DTYPES, where)
    if not isinstance(model, tf.keras.Model):
        raise ValueError(
            "Argument `model` must be a model of Keras. Received: "
            f"{type(model).__name__}. Put the layer into a keras.Sequential."
        )
    layers = _layers_with_tables(model)
    unbuilt = [layer.name for layer in layers if not layer.built]
    if unbuilt:
        raise ValueError(
            f"Model '{model.name}' cannot be exported: its layers {unbuilt} "
            "have no tables yet. Call the model with a batch first, or train "
            "it."
        )


def _check(
    model: Model, path: str, table_dtype: str, tables: str, deltas: bool
) -> None:
    check_model(model, table_dtype, "export")
    checks.one_of("tables", tables, ("inside", "files"), "export")
    if tables == "files" and (deltas or "://" in path):
        raise ValueError(
            "Argument `tables` must be 'inside' for a model that takes deltas, "
            "and in file systems that cannot map files. Received: 'files' "
            f"with deltas={deltas}, path='{path}'."
        )


def _write(
    model: Model,
    served: ServedModel,
    path: str,
    collectives: Collectives | None,
    deltas: bool,
    warm_up: Sequence[Nest],
) -> None:
    requests = served.requests(warm_up)
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
        write_model(served, served.signatures(), path, collectives, requests)
    if deltas:
        marks.set_exported(model, exported)


def _has_tables(model: Model) -> bool:
    if hasattr(model, "as_model"):
        return True
    return isinstance(model, keras.Model) and bool(_layers_with_tables(model))


def _layers_with_tables(model: Model) -> list[Layer]:
    return [
        layer
        for layer in keras_internals.layers_of(model)
        if getattr(layer, "looks_up_tables", False)
    ]


def export_archive(
    original: Original[None],
    model: Model,
    filepath: Path,
    *args: Any,
    **kwargs: Any,
) -> None:
    if not _has_tables(model):
        return original(model, filepath, *args, **kwargs)
    bound = inspect.signature(original).bind(model, filepath, *args, **kwargs)
    form = bound.arguments.get("format", "tf_saved_model")
    if form != "tf_saved_model":
        instead = (
            "Call tfdist_ext.export_onnx(model, path)."
            if form == "onnx"
            else "Convert what tfdist_ext.export(model, path) writes: its ops "
            "are TensorFlow's."
        )
        raise ValueError(
            f"Model '{model.name}' has sparse layers of tfdist_ext and can "
            f"only be exported as a SavedModel. Received: format='{form}' for "
            f"'{filepath}'. {instead}"
        )
    signature = bound.arguments.get("input_signature")
    return export(model, filepath, inputs=_one_input(signature))


def _one_input(
    signature: Nested[tf.TypeSpec] | None,
) -> Nested[tf.TypeSpec] | None:
    """The spec of a model's one input, from the arguments of its call."""
    if isinstance(signature, Sequence):
        if len(signature) != 1:
            raise ValueError(
                "Argument `input_signature` must have one element, the "
                f"structure of the model's input. Received: {signature}."
            )
        return signature[0]
    return signature


def save_model(
    original: Original[None],
    obj: Trackable,
    export_dir: Path,
    signatures: object = None,
    options: tf.saved_model.SaveOptions | None = None,
) -> None:
    if _has_tables(obj):
        if signatures is not None or options is not None:
            given = "options" if signatures is None else "signatures"
            raise ValueError(
                f"tf.saved_model.save of model '{obj.name}', which has sparse "
                f"layers of tfdist_ext, takes no `{given}`. Received: "
                f"'{export_dir}'. Call tfdist_ext.export(model, path, "
                "inputs=...), which makes the signature `serving_default`."
            )
        return export(obj, export_dir)
    with thread_context.setting(public_save=True):
        return original(obj, export_dir, signatures, options)


def verify_ops(
    original: Original[T],
    graph_def: tf.compat.v1.GraphDef,
    allowed: Sequence[str] | None,
) -> T:
    """Refuses our ops, unless they are allowed by name."""
    if current.public_save and "Tfdist" not in (allowed or ()):
        ours = our_ops(graph_def)
        if ours:
            raise ValueError(
                "The saved object looks up in tables of tfdist_ext "
                f"({', '.join(ours)}), so it could only be loaded with this "
                "package. Make it a keras.Model and call "
                "tfdist_ext.export(model, path). To save it anyway, pass "
                "options=tf.saved_model.SaveOptions("
                "namespace_whitelist=['Tfdist'])."
            )
    return original(graph_def, allowed)
