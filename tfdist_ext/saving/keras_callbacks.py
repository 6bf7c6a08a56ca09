# SPDX-License-Identifier: Apache-2.0
"""Callbacks of Keras that write files, run by several ranks.

Models are written by `keras_files.py`. What is left: files that a callback
writes by itself, and folders that all ranks make at once. tf_keras's
callbacks know of ranks; those of Keras 3 do not.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np
import tensorflow as tf

from tfdist_ext import keras_internals
from tfdist_ext.collectives.collectives import Collectives
from tfdist_ext.keras_internals import Backup
from tfdist_ext.saving import model_shards
from tfdist_ext.saving.write_once import is_remote

keras = tf.keras

_PROGRESS = "tfdist_training"


def _with_ranks(function: Callable[..., Any]) -> Callable[..., Any]:
    """A stage that acts on models of several ranks only."""

    @functools.wraps(function)
    def around(original: Any, callback: Any, *args: Any, **kwargs: Any) -> Any:
        collectives = model_shards.collectives_of(callback.model)
        call = functools.partial(original, callback, *args, **kwargs)
        if collectives is None:
            return call()
        return function(collectives, call, callback, *args, **kwargs)

    return around


@_with_ranks
def back_up(collectives: Collectives, call: Any, callback: Any) -> None:
    """Writes weights and progress in one file, which one rename puts there.

    Keras writes two, one after the other: who dies between them goes on
    later with the new weights in an epoch that they have seen. Its second
    file is written as well, for a process without ranks.
    """
    backup = Backup.of(callback)
    first = collectives.group.rank == 0
    if is_remote(backup.weights):
        # Neither h5py nor a rename there; Keras's way, with its order.
        call() if first else callback.model.save_weights(backup.weights)
        return
    following = os.path.join(callback.backup_dir, "next.weights.h5")
    with collectives.together(f"back up to '{callback.backup_dir}'"):
        if first:
            os.makedirs(callback.backup_dir, exist_ok=True)
        callback.model.save_weights(following, overwrite=True)
        if first:
            _put_backup(backup, following, callback.double_checkpoint)
        collectives.barrier("backup/written")


def _put_backup(backup: Backup, following: str, keep_before: bool) -> None:
    progress = json.dumps(backup.training)
    with h5py.File(following, "a") as file:
        file.attrs[_PROGRESS] = progress
    if keep_before:
        _copy(backup.weights, backup.weights_before)
        _copy(backup.progress, backup.progress_before)
    os.replace(following, backup.weights)
    with _replaced(backup.progress) as part, open(part, "w") as file:
        file.write(progress)


def _copy(source: str, target: str) -> None:
    if os.path.exists(source):
        with _replaced(target) as part:
            shutil.copyfile(source, part)


@contextlib.contextmanager
def _replaced(target: str) -> Iterator[str]:
    """Where to write what then takes the place of a file at once."""
    yield f"{target}.part"
    os.replace(f"{target}.part", target)


@_with_ranks
def restore(
    collectives: Collectives, call: Any, callback: Any, logs: Any = None
) -> None:
    """Reads the backup; that before it if any rank cannot read the last."""
    failure = None
    backup = Backup.of(callback)
    try:
        keras_internals.read_backup(callback)
    except OSError as error:
        failure = error
    failed = tf.constant([failure is not None], tf.bool)
    flags = collectives.all_gather(tf.cast(failed, tf.int32), "backup/status")
    if flags.numpy().any():
        if not tf.io.gfile.exists(backup.weights_before):
            raise failure or OSError(
                f"The backup '{backup.weights}' could not be read on "
                f"rank(s) {np.flatnonzero(flags.numpy()).tolist()}."
            )
        if collectives.group.rank == 0:
            _copy(backup.weights_before, backup.weights)
            _copy(backup.progress_before, backup.progress)
        collectives.barrier("backup/previous")
        keras_internals.read_backup(callback)
    if os.path.exists(backup.weights):
        with h5py.File(backup.weights) as file:
            progress = file.attrs.get(_PROGRESS)
        # None if a process without ranks has written it.
        if progress is not None:
            epoch = json.loads(progress)["epoch"]
            keras_internals.set_initial_epoch(callback.model, epoch)


@_with_ranks
def remove_backup(
    collectives: Collectives, call: Any, callback: Any, logs: Any = None
) -> None:
    collectives.barrier("backup/end")
    if collectives.group.rank == 0:
        call()
    # The next `fit` of a slower rank must not find it.
    collectives.barrier("backup/removed")


@_with_ranks
def make_folder(
    collectives: Collectives,
    call: Any,
    callback: Any,
    epoch: int,
    batch: int | None,
    logs: Any,
    filepath: str,
) -> bool:
    # Keras looks whether the folder exists, then makes it: ranks may race.
    wanted = bool(call())
    folder = os.path.dirname(filepath)
    if wanted and folder and not is_remote(filepath):
        os.makedirs(folder, exist_ok=True)
    return wanted


@_with_ranks
def refuse_orbax(
    collectives: Collectives, call: Any, callback: Any, logs: Any = None
) -> None:
    raise ValueError(
        "OrbaxCheckpoint would write each rank's part of the model to one "
        f"place. Received: a strategy of {collectives.group.world_size} "
        "ranks. Use ModelCheckpoint, or tf.train.CheckpointManager."
    )


@_with_ranks
def log_once(
    collectives: Collectives, call: Any, callback: Any, logs: Any = None
) -> None:
    """Leaves the log of all to rank 0: the rows are the same."""
    name = callback.filename
    if collectives.group.rank > 0:
        callback.filename = os.devnull
    try:
        call()
    finally:
        callback.filename = name
