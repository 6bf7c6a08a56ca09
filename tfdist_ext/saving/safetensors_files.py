# SPDX-License-Identifier: Apache-2.0
"""Weights of a model as safetensors files: one file per rank, and an index.

The format is a JSON header and raw numbers, so that every rank writes its rows
block by block. Source: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import IO
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.comm.exchanges import text_of_first_rank
from tfdist_ext.embedding import whole_tables
from tfdist_ext.keras_internals import value_of
from tfdist_ext.saving import shared_files
from tfdist_ext.saving.safetensors_reading import CODES
from tfdist_ext.saving.safetensors_reading import INDEX
from tfdist_ext.saving.safetensors_reading import Stored
from tfdist_ext.saving.safetensors_reading import file_name
from tfdist_ext.saving.safetensors_reading import part_name
from tfdist_ext.saving.safetensors_reading import read_folder
from tfdist_ext.type_names import Model
from tfdist_ext.type_names import Variable

_VERSION = "1"
_VOCABULARY = "vocabulary"


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """A tensor of this rank's file.

    Attributes:
        name: its name in the file.
        dtype: its NumPy dtype.
        shape: its shape.
        blocks: its numbers in order; every rank must iterate to the end.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    blocks: Iterable[np.ndarray]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def export_safetensors(model: Model, folder: str | os.PathLike[str]) -> None:
    """Writes a model's weights as safetensors files; all ranks must call.

    Rank r of n writes `model-0000(r+1)-of-0000n.safetensors`, with an equal
    number of consecutive rows of every partitioned table, and rank 0 also
    writes all other weights and `model.safetensors.index.json`. Ranks exchange
    rows in blocks of 16 MiB, so none needs memory for a second copy of its
    part. No further package is needed.

    A weight has its path in the model as its name (`layer/weight`), and
    the rows of a partitioned table from row f on have `NAME.rows.f`. The keys
    of a dynamic vocabulary are in `NAME.keys`, int64 `[n]`, or `[n, 2]`
    fingerprints of strings, and their rows in `NAME.key_rows`, int64 `[n]`.

    Args:
        model: a Keras model, built.
        folder: path of the folder, which all ranks share. It is created if
            necessary. Files of an earlier export in it are replaced when all
            ranks have written theirs.

    Raises:
        ValueError: the model is not built, or two weights have one name.
        OSError: a rank cannot write, on all ranks. An earlier export in the
            folder is then unchanged.
    """
    names = named_weights(model)
    collectives = shared_files.end_round(model)
    folder = os.fspath(folder)
    with _joint(collectives, f"export safetensors to '{folder}'"):
        folder = text_of_first_rank(folder, collectives, "safetensors/folder")
        rank, ranks = 0, 1
        if collectives is not None:
            rank = collectives.group.rank
            ranks = collectives.group.world_size
            collectives.group.check_same(list(names))
        tensors, tables = _tensors(names, collectives)
        path = os.path.join(folder, file_name(rank, ranks))
        try:
            os.makedirs(folder, exist_ok=True)
            _write(f"{path}.part", tensors)
            _barrier(collectives, "written")
            if rank == 0:
                _remove(os.path.join(folder, INDEX))
            _barrier(collectives, "index removed")
            os.replace(f"{path}.part", path)
        finally:
            with contextlib.suppress(OSError):
                os.remove(f"{path}.part")
        _barrier(collectives, "placed")
        if rank == 0:
            _write_index(folder, ranks, tables)


def load_safetensors(model: Model, folder: str | os.PathLike[str]) -> None:
    """Reads weights that `export_safetensors` has written; all ranks call.

    Each rank reads its part of every table, at any number of ranks and under
    any placement. Nothing is assigned if a rank finds an error. Other files in
    this format are read too, if tensors are named after weights: a folder with
    an index, or with one file `model.safetensors`.

    Args:
        model: a Keras model, built, with weights of the same names, shapes and
            dtypes.
        folder: path of the folder.

    Raises:
        FileNotFoundError: the folder has no safetensors files.
        ValueError: weights are missing, unknown, or differ in shape or dtype,
            or a file is damaged. The error names them.
    """
    names = named_weights(model)
    collectives = shared_files.end_round(model)
    folder = os.fspath(folder)
    with _joint(collectives, f"load safetensors from '{folder}'"):
        stored = read_folder(folder)
        vocabularies = _taken(stored, names)
        _check(stored, names, folder)
        _barrier(collectives, "read")
        for name, variable in names.items():
            if name in vocabularies:
                marks.keys_of(variable).take(vocabularies[name])
            if marks.shard_spec(variable) is not None:
                whole_tables.assign_part(variable, stored[name])
            else:
                variable.assign(stored[name].array())


def named_weights(model: Model) -> dict[str, Any]:
    """Returns the weights of a model by the names that files have.

    Args:
        model: a Keras model, built.

    Raises:
        ValueError: the model is not built, or two weights have one name.
    """
    if not model.weights:
        raise ValueError(
            f"Model '{model.name}' has no weights. Build it first: give it a "
            "keras.Input, or call it once."
        )
    found: dict[str, Any] = {}
    owners = {
        id(each): layer.name for layer in model.layers for each in layer.weights
    }
    for variable in model.weights:
        name = getattr(variable, "path", None) or variable.name
        # Keras numbers models, and puts the name of some before the layer's.
        name = name.removesuffix(":0").removeprefix(f"{model.name}/")
        if "/" not in name:
            name = f"{owners.get(id(variable), model.name)}/{name}"
        if name in found:
            raise ValueError(
                f"Model '{model.name}' has two weights of the name '{name}', "
                "which safetensors files cannot tell apart. Give their layers "
                "different names (argument `name`)."
            )
        found[name] = variable
    return found


def _joint(
    collectives: Collectives | None, what: str
) -> contextlib.AbstractContextManager[None]:
    if collectives is None:
        return contextlib.nullcontext()
    return collectives.joint_call(what, end_barrier=True)


def _barrier(collectives: Collectives | None, label: str) -> None:
    if collectives is not None:
        collectives.barrier(f"safetensors/{label}")


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.remove(path)


def _tensors(
    names: Mapping[str, Variable], collectives: Collectives | None
) -> tuple[list[_Tensor], dict[str, list[int]]]:
    """Tensors of this rank's file, and the shapes of partitioned tables."""
    first = collectives is None or collectives.group.rank == 0
    tensors: list[_Tensor] = []
    tables: dict[str, list[int]] = {}
    for name, variable in names.items():
        spec = marks.shard_spec(variable)
        if spec is not None and spec.world_size > 1 and collectives is not None:
            tables[name] = [spec.rows, spec.dim]
            start, end = whole_tables.rows_of_rank(spec)
            tensors.append(
                _Tensor(
                    part_name(name, start),
                    _dtype(variable),
                    (end - start, spec.dim),
                    whole_tables.even_blocks(variable, collectives),
                )
            )
        elif first:
            array = np.asarray(tf.convert_to_tensor(value_of(variable)))
            tensors.append(_of_array(name, array))
        keys = marks.keys_of(variable)
        if keys is not None:
            entire = _vocabulary(keys)  # a joint call
            if first:
                tensors += [
                    _of_array(f"{name}.{what}", array)
                    for what, array in entire.items()
                ]
    # Readers that map a file expect aligned numbers. Ranks agree on the order.
    tensors.sort(key=lambda each: -each.dtype.itemsize)
    return tensors, tables


def _vocabulary(keys: Any) -> dict[str, np.ndarray]:
    by_row = keys.all_keys()
    found = {"keys": by_row["keys"], "key_rows": by_row["rows"]}
    for what, array in keys.gathered().items():
        found[f"{_VOCABULARY}.{what}"] = array
    return found


def _of_array(name: str, array: np.ndarray) -> _Tensor:
    array = np.ascontiguousarray(array).reshape(array.shape)
    return _Tensor(name, array.dtype, array.shape, [array])


def _dtype(variable: Variable) -> np.dtype[Any]:
    return np.dtype(tf.as_dtype(variable.dtype).as_numpy_dtype)


def _write(path: str, tensors: Iterable[_Tensor]) -> None:
    """Writes a file; a joint call if a tensor is of a partitioned table."""
    tensors = list(tensors)
    header: dict[str, Any] = {"__metadata__": {"format": "tf"}}
    end = 0
    for tensor in tensors:
        if tensor.size or not isinstance(tensor.blocks, Iterator):
            header[tensor.name] = {
                "dtype": _code(tensor),
                "shape": list(tensor.shape),
                "data_offsets": [end, end + tensor.size],
            }
            end += tensor.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            _write_blocks(file, tensor)
        file.flush()
        os.fsync(file.fileno())


def _code(tensor: _Tensor) -> str:
    if tensor.dtype not in CODES:
        raise ValueError(
            f"Weight '{tensor.name}' has dtype {tensor.dtype}, which "
            "safetensors files cannot have."
        )
    return CODES[tensor.dtype]


def _write_blocks(file: IO[bytes], tensor: _Tensor) -> None:
    written = 0
    for block in tensor.blocks:
        block = np.ascontiguousarray(block, tensor.dtype)
        file.write(block.view(np.uint8).data if block.ndim else block.tobytes())
        written += block.nbytes
    if written != tensor.size:
        raise ValueError(
            f"Tensor '{tensor.name}' has {tensor.size} bytes, and {written} "
            "were written."
        )


def _write_index(
    folder: str, ranks: int, tables: Mapping[str, list[int]]
) -> None:
    files = [file_name(rank, ranks) for rank in range(ranks)]
    places: dict[str, str] = {}
    total = 0
    for file in files:
        for name, size in Stored.sizes_in(os.path.join(folder, file)).items():
            places[name] = file
            total += size
    index = {
        "metadata": {
            "total_size": total,
            "tfdist_ext": _VERSION,
            "tables": dict(tables),
        },
        "weight_map": dict(sorted(places.items())),
    }
    path = os.path.join(folder, INDEX)
    with open(f"{path}.part", "w", encoding="utf-8") as output:
        json.dump(index, output, indent=2)
    os.replace(f"{path}.part", path)
    for name in os.listdir(folder):
        if (
            name.startswith("model-")
            and name.endswith(".safetensors")
            and name not in files
        ):
            _remove(os.path.join(folder, name))


def _taken(
    stored: dict[str, Stored], names: Mapping[str, Variable]
) -> dict[str, dict[str, np.ndarray]]:
    """Removes keys of dynamic vocabularies; returns what `take` needs."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, variable in names.items():
        if marks.keys_of(variable) is None:
            continue
        start = f"{name}.{_VOCABULARY}."
        arrays = {
            each.removeprefix(start): stored.pop(each).array()
            for each in list(stored)
            if each.startswith(start)
        }
        stored.pop(f"{name}.keys", None)
        stored.pop(f"{name}.key_rows", None)
        if not arrays:
            raise ValueError(
                f"Table '{name}' has a dynamic vocabulary, and the files have "
                f"no keys for it ('{start}...'). Load files that "
                "export_safetensors wrote of a model with this vocabulary."
            )
        found[name] = arrays
    return found


def _check(
    stored: Mapping[str, Stored], names: Mapping[str, Variable], folder: str
) -> None:
    missing = sorted(names.keys() - stored.keys())
    unknown = sorted(stored.keys() - names.keys())
    if missing or unknown:
        raise ValueError(
            f"The files in '{folder}' are not of this model. Weights that they "
            f"do not have: {missing[:5]} ({len(missing)}). Tensors that the "
            f"model does not have: {unknown[:5]} ({len(unknown)}). Give the "
            "layers of both models the same names (argument `name`)."
        )
    for name, variable in names.items():
        spec = marks.shard_spec(variable)
        shape = tuple(variable.shape)
        if spec is not None:
            shape = (spec.rows, spec.dim)
        there = stored[name]
        if there.shape != shape or there.dtype != _dtype(variable):
            raise ValueError(
                f"Weight '{name}' is {_dtype(variable)} {shape}, and "
                f"{there.dtype} {there.shape} in '{folder}'. Make the model "
                "with the same shapes and dtypes."
            )
