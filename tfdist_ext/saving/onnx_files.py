# SPDX-License-Identifier: Apache-2.0
"""Models as ONNX files, also in a folder for the Triton Inference Server."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shutil
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.comm.exchanges import text_of_first_rank
from tfdist_ext.saving import onnx_conversion
from tfdist_ext.saving import shared_files
from tfdist_ext.saving import triton
from tfdist_ext.saving.exporting import Place
from tfdist_ext.saving.exporting import TableDtype
from tfdist_ext.saving.exporting import as_model
from tfdist_ext.saving.exporting import check_model
from tfdist_ext.saving.exporting import mapped_tables
from tfdist_ext.saving.exporting import write_model
from tfdist_ext.saving.served_model import ServedModel
from tfdist_ext.saving.served_model import out_of_scopes
from tfdist_ext.tables import checks
from tfdist_ext.type_names import Model
from tfdist_ext.type_names import Nest

# Bytes of weights that an ONNX file, and a TensorFlow graph, may contain: a
# message of protobuf has less than 2 GiB, and nodes need some of them.
LARGEST = 2**31 - 2**24
# Numbers of dtypes in ONNX's TensorProto, and of data in another file.
_NUMBERS = {tf.float32: 1, tf.int8: 3, tf.bfloat16: 16}
_EXTERNAL = 1
_FILE = "model.onnx"
_INSTEAD = (
    "tfdist_ext.export(model, path) writes the model for TensorFlow Serving."
)


def export_onnx(
    model: Model,
    path: str | os.PathLike[str],
    table_dtype: TableDtype = "float32",
    tables: Place = "inside",
    *,
    inputs: Nest = None,
    triton_max_batch_size: int | None = None,
) -> None:
    """Writes a model as an ONNX file; all ranks must call.

    onnxruntime and other programs run it without TensorFlow and without this
    package. Inputs and outputs have the names of the signature
    `serving_default`: see docs/serving.md. Lookups of ids in dense tensors
    become `Gather` and `ReduceSum`. Every rank writes its part of the tables,
    and rank 0 converts the model, which needs the packages tf2onnx and onnx:
    `pip install tf2onnx onnx`.

    Args:
        model: Keras model, built; its call in inference is exported.
        path: path of the file, as "model.onnx", that all ranks can write. An
            existing file is replaced. With `triton_max_batch_size`, path of a
            new folder.
        table_dtype: dtype of the tables in the file: "float32", "bfloat16", or
            "int8" with a float32 scale per row.
        tables: where tables are stored. "inside": in the file, for models of
            less than 2 GiB. "files": in files beside it, one per table or two
            with int8, as ONNX's external data. Rank 0 then needs no memory for
            them. They must stay together, and are not replaced.
        inputs: a nest of specs, or a batch: see `tfdist_ext.export`.
        triton_max_batch_size: if not None, the folder of a model for the
            Triton Inference Server is written: `path/config.pbtxt` and
            `path/1/model.onnx`. The server makes batches of up to so many
            samples. 0 if requests are whole batches.

    Raises:
        ImportError: a package is not installed on rank 0.
        ValueError: an argument is invalid, or ONNX cannot express the model:
            it has ops that ONNX lacks, dynamic vocabularies, strings, hash
            tables, or computes in bfloat16.
        FileExistsError: there is something else at the path; with
            `tables="files"` or for Triton, if there is anything.
        OSError: a rank cannot write. Nothing is changed then.
    """
    path = os.fspath(path)
    model, inputs = as_model(model, inputs)
    _check_arguments(model, path, table_dtype, tables, triton_max_batch_size)
    collectives = shared_files.end_round(model)
    with (
        contextlib.nullcontext()
        if collectives is None
        else collectives.joint_call(f"export ONNX to '{path}'", True)
    ):
        own = os.path.abspath(path)
        path = text_of_first_rank(own, collectives, "onnx/path")
        target = _Target(path, tables == "files", triton_max_batch_size)
        served = ServedModel(
            model, inputs, table_dtype, target.saved, for_onnx=True
        )
        _export(model, served, target, collectives)


def _export(
    model: Model,
    served: ServedModel,
    target: _Target,
    collectives: Collectives | None,
) -> None:
    """Writes a served model as ONNX; all ranks must call."""
    rank = 0 if collectives is None else collectives.group.rank
    signatures = served.signatures()
    signature = signatures["serving_default"]
    _check_model(model, served, signature, target.with_files)
    if collectives is not None:
        collectives.group.check_same(
            [f"{name} {each.rows}" for name, each in served.tables.items()]
        )
    if rank == 0:
        onnx_conversion.require_packages()
        target.check()
    with target.cleaned(rank):
        write_model(served, signatures, target.saved, collectives)
        if rank == 0:
            out_of_scopes(lambda: _convert(served, signature, target))


def _check_arguments(
    model: Model,
    path: str,
    table_dtype: str,
    tables: str,
    max_batch_size: int | None,
) -> None:
    check_model(model, table_dtype, "export_onnx")
    checks.one_of("tables", tables, ("inside", "files"), "export_onnx")
    if "://" in path or not os.path.basename(path):
        raise ValueError(
            "Argument `path` of export_onnx must be the path of a file in a "
            "local or mounted file system, which ends with the file's name. "
            f"Received: '{path}'. Export to such a path, and copy the files."
        )
    if max_batch_size is not None and (
        not isinstance(max_batch_size, int)
        or isinstance(max_batch_size, bool)
        or max_batch_size < 0
    ):
        raise ValueError(
            "Argument `triton_max_batch_size` of export_onnx must be None, 0 "
            f"or a positive integer. Received: {max_batch_size!r}."
        )


@dataclasses.dataclass(frozen=True)
class _Target:
    """The files of an export, and the folder that they are made in.

    Attributes:
        path: absolute path of the file, or of the folder for Triton.
        with_files: whether tables are files.
        max_batch_size: for Triton; None for a single model.
    """

    path: str
    with_files: bool
    max_batch_size: int | None

    @property
    def hidden(self) -> str:
        """The folder that files are made in."""
        folder, name = os.path.split(self.path)
        return os.path.join(folder, f".exporting-{name}")

    @property
    def saved(self) -> str:
        """The folder of the SavedModel that is converted."""
        return os.path.join(self.hidden, "saved")

    @property
    def made(self) -> str:
        """The folder of the finished files, before they are placed."""
        return os.path.join(self.hidden, "made")

    @property
    def name(self) -> str:
        """The name of the ONNX file."""
        is_file = self.max_batch_size is None
        return os.path.basename(self.path) if is_file else _FILE

    def check(self) -> None:
        """Refuses to replace what is not an earlier export."""
        if self.max_batch_size is not None and os.path.exists(self.path):
            raise FileExistsError(
                f"'{self.path}' exists, and a model for Triton is not "
                "replaced, because servers may be using it. Export to a new "
                "folder."
            )
        if os.path.isdir(self.path):
            raise FileExistsError(
                f"'{self.path}' is a folder. Pass the path of a file, as "
                f"'{os.path.join(self.path, _FILE)}'."
            )
        if self.with_files and os.path.exists(self.path):
            raise FileExistsError(
                f"'{self.path}' exists, and a model whose tables are files is "
                "not replaced, because servers may be using these files. "
                "Export to a new path."
            )

    @contextlib.contextmanager
    def cleaned(self, rank: int) -> Iterator[None]:
        """Removes the hidden folder on rank 0, before and afterwards."""
        if rank > 0:
            yield
            return
        shutil.rmtree(self.hidden, ignore_errors=True)
        try:
            os.makedirs(self.made)
            yield
        finally:
            shutil.rmtree(self.hidden, ignore_errors=True)

    def place(self) -> None:
        """Moves the finished files to the path."""
        if self.max_batch_size is not None:
            os.rename(self.made, self.path)
            return
        folder = os.path.dirname(self.path)
        names = sorted(os.listdir(self.made), key=self.name.__eq__)
        existing = [
            name
            for name in names
            if name != self.name and os.path.exists(os.path.join(folder, name))
        ]
        if existing:
            raise FileExistsError(
                f"{existing} exist in '{folder}', and files of tables are not "
                "replaced, because servers may be using them. Export to a new "
                "path."
            )
        for name in names:  # the ONNX file is the last one
            os.replace(
                os.path.join(self.made, name), os.path.join(folder, name)
            )


def _check_model(
    model: Model, served: ServedModel, signature: Any, with_files: bool
) -> None:
    """Refuses what ONNX cannot have, before anything is written."""
    if served.keys:
        names = sorted(keys.table_name for keys in served.keys)
        raise ValueError(
            f"Model '{model.name}' cannot be exported to ONNX, which has no "
            f"tables of keys: {names} have dynamic vocabularies. Use tables "
            f"with a `vocabulary_size`, and ids below it. {_INSTEAD}"
        )
    given = signature.structured_input_signature[1]
    texts = [name for name, spec in given.items() if spec.dtype == tf.string]
    if texts or served.resources:
        kinds = {type(each).__name__ for each in served.resources}
        what = f"takes strings ({texts})" if texts else f"has {sorted(kinds)}"
        raise ValueError(
            f"Model '{model.name}' cannot be exported to ONNX, because it "
            f"{what}. Give the model integer ids, and look up strings before "
            f"it. {_INSTEAD}"
        )
    both = sorted(given.keys() & signature.structured_outputs.keys())
    if both:
        raise ValueError(
            f"Model '{model.name}' cannot be exported to ONNX, in which all "
            f"names are different: {both} are inputs and outputs. Give the "
            "outputs other names, the keys of the model's dict."
        )
    _check_dtypes(model, signature.graph)
    _check_size(model, served, with_files)


def _check_dtypes(model: Model, graph: tf.Graph) -> None:
    """Refuses bfloat16 other than that of tables; tf2onnx takes float16."""
    definition = graph.as_graph_def()
    nodes = list(definition.node)
    for function in definition.library.function:
        nodes += function.node_def
    lookup = {"PlaceholderWithDefault", "Const", "Fill", "GatherV2"}
    found = {
        node.op
        for node in nodes
        for key, value in node.attr.items()
        if value.type == tf.bfloat16.as_datatype_enum
        and node.op not in lookup
        and (node.op, key) != ("Cast", "SrcT")
    }
    if found:
        raise ValueError(
            f"Model '{model.name}' cannot be exported to ONNX, because it "
            f"computes in bfloat16 ({', '.join(sorted(found))}), which "
            "tf2onnx converts to float16. Make the model with the dtype "
            f"policy 'float32' and the same weights. {_INSTEAD}"
        )


def _check_size(model: Model, served: ServedModel, with_files: bool) -> None:
    dense = sum(
        int(tf.size(each.read_value(), tf.int64)) * each.dtype.size
        for each in served.dense
    )
    rows = sum(
        math.prod(map(int, shape)) * dtype.size
        for table in mapped_tables(served)
        for dtype, shape in table.kinds().values()
    )
    if dense > LARGEST:
        raise ValueError(
            f"Model '{model.name}' cannot be exported to ONNX: its weights "
            f"without tables have {dense} bytes, and the conversion allows "
            f"{LARGEST}. Replace large layers by tables of this package. "
            f"{_INSTEAD}"
        )
    if not with_files and dense + rows > LARGEST:
        raise ValueError(
            f"Model '{model.name}' has {dense + rows} bytes of weights, and "
            f"one ONNX file may have {LARGEST}. Pass tables='files', or a "
            "smaller `table_dtype`."
        )


def _convert(served: ServedModel, signature: Any, target: _Target) -> None:
    """Converts the SavedModel, and places the result; rank 0 calls."""
    import onnx

    given = signature.structured_input_signature[1]
    results = {
        name: tf.TensorSpec(tensor.shape, tensor.dtype)
        for name, tensor in signature.structured_outputs.items()
    }
    model, arrays = onnx_conversion.converted(
        target.saved, list(given), list(results)
    )
    folder = target.made
    if target.max_batch_size is not None:
        text = triton.config_of(
            os.path.basename(target.path), target.max_batch_size, given, results
        )
        with open(os.path.join(folder, "config.pbtxt"), "w") as file:
            file.write(text)
        folder = os.path.join(folder, "1")
        os.makedirs(folder)
    _add_tables(model, served, arrays, target, folder)
    path = os.path.join(folder, target.name)
    onnx.save_model(model, path)
    onnx.checker.check_model(path, full_check=True)
    target.place()


def _add_tables(
    model: Any,
    served: ServedModel,
    arrays: Sequence[tuple[str, str]],
    target: _Target,
    folder: str,
) -> None:
    """Adds the arrays of tables to an ONNX model.

    Args:
        model: the `onnx.ModelProto`.
        served: the model, with its tables.
        arrays: tables and arrays that it reads.
        target: where it is exported to.
        folder: folder of the ONNX file.
    """
    tables = {table.table_name: table for table in mapped_tables(served)}
    for name, part in arrays:
        table = tables[name]
        dtype, shape = table.kinds()[part]
        tensor = model.graph.initializer.add(
            name=onnx_conversion.name_of_array(name, part),
            data_type=_NUMBERS[dtype],
            dims=shape,
        )
        source = table.file(part)
        if not target.with_files:
            with open(source, "rb") as file:
                tensor.raw_data = file.read()
            continue
        own = f"{target.name}.{os.path.basename(source)}"
        os.rename(source, os.path.join(folder, own))
        tensor.data_location = _EXTERNAL
        tensor.external_data.add(key="location", value=own)
