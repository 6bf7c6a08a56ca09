# SPDX-License-Identifier: Apache-2.0
"""Files of Keras (.keras, .weights.h5, folders) written by several ranks.

Keras knows nothing of ranks: all of them would write one path at once, and
each only its part of the tables. Wrapped are the functions that its public
ways to save and load end in, so that it does not matter which of them a
program has imported before there was a strategy. Models of our strategy are
written by `write_once`, whether they have tables or not; formats that cannot
hold a whole table are refused before anything is written. TensorFlow
checkpoints (`sharding/checkpoint_slices.py`) gather nothing and are the way for
tables that do not fit into one process.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist_ext.checking import drift
from tfdist_ext.collectives.collectives import Collectives
from tfdist_ext.saving import exports
from tfdist_ext.saving import model_shards
from tfdist_ext.saving.write_once import write_once
from tfdist_ext.sharding import whole_tables

keras = tf.keras


@dataclasses.dataclass(frozen=True)
class _Save:
    """A call of a function of Keras that writes a model.

    Attributes:
        collectives: of the model's strategy.
        model: that is written.
        filepath: where to, as the caller gave it.
        arguments: all of the call, by name, without defaults.
        write: makes the call with another path.
    """

    collectives: Collectives
    model: Any
    filepath: Any
    arguments: dict[str, Any]
    write: Callable[[Any], Any]


def _with_ranks(function: Callable[[_Save], Any]) -> Callable[..., Any]:
    """A stage around a function that takes a model and a path first."""

    @functools.wraps(function)
    def around(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        collectives = model_shards.collectives_of(model)
        if collectives is None:
            return original(model, *args, **kwargs)
        signature = inspect.signature(original)
        _, path_argument, *_ = signature.parameters
        bound = signature.bind(model, *args, **kwargs)

        def write(path: Any) -> Any:
            bound.arguments[path_argument] = path
            return original(*bound.args, **bound.kwargs)

        filepath = bound.arguments[path_argument]
        given = dict(bound.arguments)
        drift.compare_replicas(
            drift.variables_of(model),
            collectives,
            f"before '{filepath}' is saved",
        )
        return function(_Save(collectives, model, filepath, given, write))

    return around


def ask(original: Callable[[str], str], question: str) -> str:
    """Asks the user as Keras does, except about a model of several ranks."""
    frame = inspect.currentframe()
    while frame is not None:
        # The function of Keras that is to save: that takes a model.
        model = frame.f_locals.get("model")
        if isinstance(model, keras.Model):
            if model_shards.collectives_of(model) is not None:
                _refuse_to_ask(question)
            break
        frame = frame.f_back
    return original(question)


def _refuse_to_ask(question: str) -> None:
    # The terminal is one that ranks share or do not have.
    raise FileExistsError(
        f"{question.strip()} With several ranks nobody is asked, and nothing "
        "was written. Pass overwrite=True, or another path."
    )


@_with_ranks
def write_keras_3(save: _Save) -> None:
    whole = functools.partial(
        whole_tables.gather_to_first, collectives=save.collectives
    )
    # Keras makes the folder of what it does not zip, and of no other.
    make_folder = not save.arguments.get("zipped", True)
    with model_shards.methods(model_shards.shards_of(save.model), numpy=whole):
        write_once(save.collectives, save.filepath, save.write, make_folder)


@_with_ranks
def write_hdf5(save: _Save) -> None:
    if model_shards.shards_of(save.model):
        raise ValueError(
            "A model with partitioned tables cannot be saved in Keras's "
            f"legacy format. Received: filepath='{save.filepath}'. Save to a "
            "path that ends in .keras instead."
        )
    write_once(save.collectives, save.filepath, save.write, make_folder=True)


@_with_ranks
def write_tf_keras(save: _Save) -> None:
    if model_shards.shards_of(save.model):
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
        # Copies of a model go through a file, each rank's in its own folder.
        stays=exports.is_first_with(save.filepath, save.collectives),
    )


@_with_ranks
def write_tf_keras_weights(save: _Save) -> Any:
    if not _is_hdf5(save):
        # A checkpoint, which is written like all others.
        return save.write(save.filepath)
    if model_shards.shards_of(save.model):
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
    # The original would look for the temporary file.
    overwrite = save.arguments.get("overwrite", True)
    if not overwrite and os.path.exists(save.filepath):
        _refuse_to_ask(f"'{save.filepath}' already exists.")


@_with_ranks
def export(save: _Save) -> None:
    if save.arguments.get("format", "tf_saved_model") == "tf_saved_model":
        save.write(save.filepath)  # by tf.saved_model.save
        return
    shards = model_shards.shards_of(save.model)
    if shards:
        exports.refuse(shards[0], f"to '{save.filepath}'")
    write_once(save.collectives, save.filepath, save.write)
