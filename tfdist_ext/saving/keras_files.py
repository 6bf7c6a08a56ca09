# SPDX-License-Identifier: Apache-2.0
"""Files of Keras, written and read by several ranks, and copies of models."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist_ext import thread_context
from tfdist_ext.comm import collectives as collectives_lib
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.comm.exchanges import path_to_read
from tfdist_ext.embedding import whole_tables
from tfdist_ext.marks import shard_spec
from tfdist_ext.numbers import model_state
from tfdist_ext.saving import shared_files
from tfdist_ext.saving.shared_files import write_once
from tfdist_ext.thread_context import current
from tfdist_ext.type_names import Keywords
from tfdist_ext.type_names import Layer
from tfdist_ext.type_names import Model
from tfdist_ext.type_names import Optimizer
from tfdist_ext.type_names import Original
from tfdist_ext.type_names import PathOrFile
from tfdist_ext.type_names import StageFunction
from tfdist_ext.type_names import Store
from tfdist_ext.type_names import T

keras = tf.keras


@dataclasses.dataclass(frozen=True)
class _Save:
    """A call of a Keras function that writes a model.

    Attributes:
        collectives: collectives of the model's strategy.
        model: model that is written.
        filepath: destination, as the caller passed it.
        arguments: all arguments of the call, by name, without defaults.
        write: makes the call with another path.
    """

    collectives: Collectives
    model: Model
    filepath: Any
    arguments: Keywords
    write: Callable[[PathOrFile], Any]


def _with_ranks(function: Callable[[_Save], Any]) -> StageFunction:
    """A stage around a function whose first arguments are model and path."""

    @functools.wraps(function)
    def around(
        original: Original[T], model: Model, *args: Any, **kwargs: Any
    ) -> T:
        collectives = shared_files.collectives_of(model)
        if collectives is None:
            return original(model, *args, **kwargs)
        signature = inspect.signature(original)
        _, path_argument, *_ = signature.parameters
        bound = signature.bind(model, *args, **kwargs)

        def write(path: PathOrFile) -> T:
            bound.arguments[path_argument] = path
            return original(*bound.args, **bound.kwargs)

        filepath = bound.arguments[path_argument]
        given = dict(bound.arguments)
        model_state.compare_replicas(
            model_state.variables_of(model),
            collectives,
            f"before '{filepath}' is saved",
        )
        return function(_Save(collectives, model, filepath, given, write))

    return around


def ask_user(original: Callable[[str], str], question: str) -> str:
    """Asks the user as Keras does, but not for a model of several ranks."""
    frame = inspect.currentframe()
    while frame is not None:
        # The caller is the Keras function that saves, which has a model.
        model = frame.f_locals.get("model")
        if isinstance(model, keras.Model):
            if shared_files.collectives_of(model) is not None:
                _refuse_to_ask(question)
            break
        frame = frame.f_back
    return original(question)


def _refuse_to_ask(question: str) -> None:
    # Ranks share one terminal or have none.
    raise FileExistsError(
        f"{question.strip()} With several ranks there is no prompt, and "
        "nothing was written. Pass overwrite=True, or another path."
    )


@_with_ranks
def write_keras_3(save: _Save) -> None:
    whole = functools.partial(
        whole_tables.gather_to_first, collectives=save.collectives
    )
    # Keras creates the folder of files that it does not zip, but no others.
    make_folder = not save.arguments.get("zipped", True)
    with shared_files.with_methods(
        shared_files.shards_of(save.model), numpy=whole
    ):
        write_once(save.collectives, save.filepath, save.write, make_folder)


@_with_ranks
def write_hdf5(save: _Save) -> None:
    if shared_files.shards_of(save.model):
        raise ValueError(
            "A model with partitioned tables cannot be saved in Keras's "
            f"legacy format. Received: filepath='{save.filepath}'. Save to a "
            "path that ends in .keras instead."
        )
    write_once(save.collectives, save.filepath, save.write, make_folder=True)


@_with_ranks
def write_tf_keras(save: _Save) -> None:
    if shared_files.shards_of(save.model):
        raise ValueError(
            "tf_keras cannot save a whole model with partitioned tables. "
            f"Received: filepath='{save.filepath}'. Save a checkpoint "
            "instead, with model.save_weights or tf.train.Checkpoint, and "
            "load it into the model in one process to export it."
        )
    _check_overwrite(save)
    write_once(
        save.collectives,
        save.filepath,
        save.write,
        make_folder=True,
        # A model is copied through a file, which each rank writes in a folder
        # of its own.
        keep=shared_files.is_first_with(save.filepath, save.collectives),
    )


@_with_ranks
def write_tf_keras_weights(save: _Save) -> Any:
    if not _is_hdf5(save):
        # This is a checkpoint, which is written like all others.
        return save.write(save.filepath)
    if shared_files.shards_of(save.model):
        raise ValueError(
            "tf_keras would write only this rank's part of the partitioned "
            f"tables to '{save.filepath}'. Save a TensorFlow checkpoint "
            "instead: a path without .h5 or .keras and no "
            "save_format='h5', or tf.train.Checkpoint."
        )
    _check_overwrite(save)
    write_once(save.collectives, save.filepath, save.write)


def _is_hdf5(save: _Save) -> bool:
    form = save.arguments.get("save_format")
    if form is None:
        return str(save.filepath).endswith((".keras", ".h5", ".hdf5"))
    return form.lower().strip() not in ("tf", "tensorflow")


def _check_overwrite(save: _Save) -> None:
    # The original function would look for the temporary file.
    overwrite = save.arguments.get("overwrite", True)
    if not overwrite and os.path.exists(save.filepath):
        _refuse_to_ask(f"'{save.filepath}' already exists.")


@_with_ranks
def export_archive(save: _Save) -> None:
    if save.arguments.get("format", "tf_saved_model") == "tf_saved_model":
        save.write(save.filepath)  # uses tf.saved_model.save
        return
    shards = shared_files.shards_of(save.model)
    if shards:
        shared_files.refuse_export(shards[0], f"to '{save.filepath}'")
    write_once(save.collectives, save.filepath, save.write)


def read_on_all_ranks(original: Original[T], *args: Any, **kwargs: Any) -> T:
    """Runs a function that reads from a path, as a joint call.

    The function takes a path, or a model and a path. The path of rank 0 is
    used.
    """
    bound = inspect.signature(original).bind(*args, **kwargs)
    first = next(iter(bound.arguments.values()))
    if isinstance(first, keras.Model):
        collectives = shared_files.collectives_of(first)
    else:  # the model will be of the strategy in scope
        collectives = shared_files.while_open(collectives_lib.active())
    if collectives is None:
        return original(*args, **kwargs)
    outer = current.reading_files
    with (
        thread_context.setting(reading_files=outer + 1),
        collectives.joint_call("load a file of Keras", end_barrier=True),
    ):
        if not outer and "filepath" in bound.arguments:
            path = path_to_read(bound.arguments["filepath"], collectives)
            bound.arguments["filepath"] = path
        return original(*bound.args, **bound.kwargs)


def refuse_tables(
    original: Original[T],
    group: Any,
    model: Model,
    *args: Any,
    **kwargs: Any,
) -> T:
    """Rejects a legacy file for a model with partitioned tables.

    Keras would compare the shape of a table with that of a shard, or skip it.
    """
    collectives = shared_files.collectives_of(model)
    if collectives is not None and shared_files.shards_of(model):
        raise ValueError(
            "Partitioned tables cannot be read from a file in Keras's "
            f"legacy format. Received: '{group.file.filename}'. Load it "
            "in one process, save .weights.h5 there and load that."
        )
    return original(group, model, *args, **kwargs)


def read_part_of_slots(
    original: Original[None], optimizer: Optimizer, store: Store
) -> None:
    """Makes optimizers read their part of the entire slots in a file."""
    shards = shared_files.only_shards(list(optimizer.variables))
    assign = whole_tables.assign_part
    with shared_files.with_methods(shards, assign=assign):
        original(optimizer, store)


def read_arrays(original: Original[None], layer: Layer, store: Store) -> None:
    """Makes tf_keras read arrays, so it can divide a summed variable's value.

    Its layers assign datasets of h5py, which do not support division.
    """
    original(layer, {name: store[name][()] for name in store})


def refuse_copy(original: Original[T], copied: Model, argument: object) -> T:
    _refuse_parts(copied)
    return original(copied, argument)


def _refuse_parts(copied: Model) -> None:
    # Models of tf_keras that are not built cannot list their variables.
    if not getattr(copied, "built", True):
        return
    shards = shared_files.shards_of(copied)
    if not shards:
        return
    spec = shard_spec(shards[0])
    assert spec is not None
    raise ValueError(
        f"{type(copied).__name__} '{copied.name}' cannot be copied or pickled: "
        f"{spec.world_size} ranks hold a part each of table '{spec.table}'. "
        "For a second model, make it again under strategy.scope() on all "
        "ranks, by keras.models.clone_model(model) or as you made the first, "
        "and copy layer by layer: whole tables by "
        "layer.set_weights([strategy.gather_table(other)]), other layers by "
        "layer.set_weights(other.get_weights()). To keep or send one, save "
        "it: see docs/checkpoints.md."
    )
