# SPDX-License-Identifier: Apache-2.0
"""Keras files (.keras, .weights.h5, backups) written by several ranks.

Keras 3 knows nothing of ranks: all of them would write one path at once, and
each only its part of the tables. The wrappers here let rank 0 write whole
tables to a temporary file that then takes the path's place, so a crash while
saving leaves the last file intact; the other ranks take part and write
nothing that stays. TensorFlow checkpoints (`sharding/checkpoint.py`) gather
nothing and are the way for tables that do not fit into one process.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import tempfile
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext.distribute.collectives import Collectives
from tfdist_ext.sharding import sharded_variable

keras = tf.keras
_TABLE_FILES = (".keras", ".h5", ".hdf5")


def install() -> None:
    """Wraps Keras's file writers; they act on models of our strategy only."""
    if hasattr(keras.Model.save, "_tfdist_original"):
        return
    if not hasattr(keras, "ops"):  # tf_keras
        _wrap(keras.Model, "save", _refuse_whole_models)
        _wrap(keras.Model, "save_weights", _refuse_table_files)
        return
    _wrap(keras.Model, "save", _write_once)
    _wrap(keras.Model, "save_weights", _write_once)
    _read_part_of_slots()
    backup = keras.callbacks.BackupAndRestore
    _wrap(backup, "_save_model", _back_up_once)
    _wrap(backup, "on_train_end", _remove_backup_once)
    _wrap(keras.callbacks.ModelCheckpoint, "_save_model", _make_folder_once)


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        collectives = _collectives_of(self)
        if collectives is None:
            return original(self, *args, **kwargs)
        return wrapper(collectives, original, self, *args, **kwargs)

    wrapped._tfdist_original = original  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)


def _collectives_of(owner: Any) -> Collectives | None:
    model = owner if isinstance(owner, keras.Model) else owner.model
    return getattr(model.distribute_strategy, "collectives", None)


def _shards(model: Any) -> list[Any]:
    variables = list(model.variables)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        variables += list(optimizer.variables)
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        for own in getattr(inner, "table_optimizers", ()):
            variables += list(own.variables)
    return _only_shards(variables)


def _only_shards(variables: list[Any]) -> list[Any]:
    return [v for v in variables if sharded_variable.is_shard(v)]


def _refuse_whole_models(
    collectives: Collectives,
    original: Any,
    model: Any,
    filepath: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if _shards(model):
        raise ValueError(
            "tf_keras cannot save a whole model with partitioned tables. "
            f"Received: filepath='{filepath}'. Save a checkpoint instead, "
            "with model.save_weights or tf.train.Checkpoint, and load it "
            "into the model in one process to export it."
        )
    return original(model, filepath, *args, **kwargs)


def _refuse_table_files(
    collectives: Collectives,
    original: Any,
    model: Any,
    filepath: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if str(filepath).endswith(_TABLE_FILES) and _shards(model):
        raise ValueError(
            "tf_keras would write only this rank's part of the partitioned "
            f"tables to '{filepath}'. Save a TensorFlow checkpoint instead: "
            "a path without .h5 or .keras, or tf.train.Checkpoint."
        )
    return original(model, filepath, *args, **kwargs)


def _write_once(
    collectives: Collectives,
    original: Any,
    model: Any,
    filepath: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    path = pathlib.Path(filepath)
    whole = functools.partial(
        sharded_variable.gather_to_first, collectives=collectives
    )
    failure: Exception | None = None
    with tempfile.TemporaryDirectory() as scratch:
        folder = path.parent if collectives.group.rank == 0 else scratch
        own = pathlib.Path(folder) / f".writing-{path.name}"
        try:
            with _methods(_shards(model), numpy=whole):
                original(model, str(own), *args, **kwargs)
            if collectives.group.rank == 0:
                os.replace(own, path)
        except OSError as error:
            failure = error
    failed = [int(failure is not None)]
    flags = collectives.all_gather(tf.constant(failed), "file/status").numpy()
    if failure is not None:
        raise failure
    if flags.any():
        raise OSError(
            f"'{filepath}' was not written: it failed on rank(s) "
            f"{np.flatnonzero(flags).tolist()}; see their output. An earlier "
            "file is intact."
        )


def _read_part_of_slots() -> None:
    """Lets optimizers read their part of the whole slots in a file."""
    original = keras.optimizers.Optimizer.load_own_variables

    @functools.wraps(original)
    def load_own_variables(self: Any, store: Any) -> None:
        shards = _only_shards(self.variables)
        with _methods(shards, assign=sharded_variable.assign_part):
            original(self, store)

    keras.optimizers.Optimizer.load_own_variables = load_own_variables


@contextlib.contextmanager
def _methods(variables: list[Any], **methods: Any) -> Iterator[None]:
    """Gives variables other methods of these names for a while.

    Layers of ours write and read whole tables by themselves; an optimizer
    writes its variables with `numpy()` and reads them with `assign()`.
    """
    for variable in variables:
        for name, method in methods.items():
            setattr(variable, name, functools.partial(method, variable))
    try:
        yield
    finally:
        for variable in variables:
            for name in methods:
                delattr(variable, name)


def _back_up_once(
    collectives: Collectives, original: Any, callback: Any
) -> None:
    if collectives.group.rank == 0:
        original(callback)
    else:
        callback.model.save_weights(callback._weights_path, overwrite=True)


def _remove_backup_once(
    collectives: Collectives, original: Any, callback: Any, logs: Any = None
) -> None:
    collectives.barrier("backup/end")
    if collectives.group.rank == 0:
        original(callback, logs)


def _make_folder_once(
    collectives: Collectives,
    original: Any,
    callback: Any,
    *args: Any,
    **kw: Any,
) -> None:
    # Keras looks whether the folder exists, then makes it: ranks may race.
    folder = os.path.dirname(callback.filepath)
    if folder:
        os.makedirs(folder, exist_ok=True)
    original(callback, *args, **kw)
