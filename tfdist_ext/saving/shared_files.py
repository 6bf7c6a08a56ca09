# SPDX-License-Identifier: Apache-2.0
"""Files that all ranks write as one, and Keras's callbacks with files."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import NoReturn

import h5py
import numpy as np
import tensorflow as tf

from tfdist_ext import keras_internals
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.embedding import sharded_variable
from tfdist_ext.keras_internals import Backup
from tfdist_ext.keras_internals import value_of
from tfdist_ext.marks import part_of_index
from tfdist_ext.marks import shard_spec
from tfdist_ext.type_names import Callback
from tfdist_ext.type_names import Logs
from tfdist_ext.type_names import Model
from tfdist_ext.type_names import Original
from tfdist_ext.type_names import Path
from tfdist_ext.type_names import PathOrFile
from tfdist_ext.type_names import StageFunction
from tfdist_ext.type_names import Strategy
from tfdist_ext.type_names import T
from tfdist_ext.type_names import Trackable
from tfdist_ext.type_names import Variable

keras = tf.keras


def end_round(model: Model) -> Collectives | None:
    """Sends what a strategy holds back; all ranks must call.

    Returns:
        The result of `collectives_of`.
    """
    strategy = getattr(model, "distribute_strategy", None)
    alone = getattr(strategy, "collectives", None) is None
    collectives = collectives_of(model)
    synchronize = getattr(strategy, "synchronize", None)
    if synchronize is not None and (alone or collectives is not None):
        synchronize()
    return collectives


def collectives_of(model: Model) -> Collectives | None:
    """The collectives of a model's strategy.

    None in one process, and after `close`: the model then belongs to this rank
    alone.
    """
    strategy = getattr(model, "distribute_strategy", None)
    return while_open(getattr(strategy, "collectives", None))


def while_open(collectives: Collectives | None) -> Collectives | None:
    """The collectives, None if they are closed."""
    if collectives is None or not collectives.group.is_open:
        return None
    return collectives


def shards_of(model: Model) -> list[Variable]:
    """Partitioned variables of a model and of its optimizers."""
    variables = list(model.variables)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        variables += list(optimizer.variables)
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        for own in getattr(inner, "table_optimizers", ()):
            variables += list(own.variables)
    return only_shards(variables)


def only_shards(variables: Sequence[Variable]) -> list[Variable]:
    """The partitioned variables among some, each once."""
    unique = {id(each): each for each in variables}
    return [v for v in unique.values() if sharded_variable.is_shard(v)]


@contextlib.contextmanager
def with_methods(
    variables: Sequence[Variable], **methods: Any
) -> Iterator[None]:
    """Replaces methods of variables while the context is active.

    Layers of this package write and read entire tables by themselves. An
    optimizer writes its variables with `numpy()` and reads them with
    `assign()`.
    """
    before = [
        {name: vars(v)[name] for name in methods if name in vars(v)}
        for v in variables
    ]
    for variable in variables:
        for name, method in methods.items():
            setattr(variable, name, functools.partial(method, variable))
    try:
        yield
    finally:
        for variable, own in zip(variables, before, strict=True):
            for name in methods:
                delattr(variable, name)
            for name, method in own.items():
                setattr(variable, name, method)


def write_once(
    collectives: Collectives,
    filepath: Any,
    write: Callable[[PathOrFile], T],
    make_folder: bool = False,
    keep: bool | None = None,
) -> T:
    """Makes all ranks write, and keeps only what rank 0 wrote.

    Args:
        collectives: collectives of the strategy; every rank must call.
        filepath: destination: a path, or an object open for writing bytes. The
            value of rank 0 is used; the objects of other ranks get no data.
        write: called with the path or object to write to instead.
        make_folder: whether to create the parent folder of the path.
        keep: whether to keep what this rank wrote; by default on rank 0 only.

    Returns:
        The result of `write`.

    Raises:
        OSError: rank 0 cannot write. An error on any rank ends the call on all
            of them, with nothing changed.
    """
    if keep is None:
        keep = collectives.group.rank == 0
    is_path = isinstance(filepath, str | os.PathLike)
    what = f"'{os.fspath(filepath)}'" if is_path else "a file object"
    with collectives.joint_call(f"save {what}"):
        with _place(filepath, make_folder, keep) as (own, put):
            result = write(own)
            collectives.barrier("file/written")
            put()
        # Wait until rank 0's temporary folder is removed.
        collectives.barrier("file/placed")
    return result


@contextlib.contextmanager
def _place(
    filepath: PathOrFile, make_folder: bool, keep: bool
) -> Iterator[tuple[PathOrFile, Callable[[], None]]]:
    """Where this rank writes, and a function that moves it into place."""
    if isinstance(filepath, io.IOBase):
        yield filepath if keep else io.BytesIO(), _nothing
    elif keep and is_remote(filepath):
        # Nothing is renamed there: Keras and TensorFlow write to such file
        # systems only at the end, when they have everything.
        yield str(filepath), _nothing
    elif keep:
        path = pathlib.Path(filepath)
        _check_folder(path, make_folder)
        with tempfile.TemporaryDirectory(
            prefix=f".writing-{path.name}-", dir=path.parent
        ) as scratch:
            yield (
                str(pathlib.Path(scratch) / path.name),
                lambda: _move_all(pathlib.Path(scratch), path),
            )
    else:
        with tempfile.TemporaryDirectory() as scratch:
            name = pathlib.Path(filepath).name
            yield str(pathlib.Path(scratch) / name), _nothing


def is_remote(filepath: object) -> bool:
    """Whether a path is of one of TensorFlow's other file systems."""
    return "://" in str(filepath)


def _nothing() -> None:
    pass


def _check_folder(path: pathlib.Path, make_folder: bool) -> None:
    if make_folder:
        path.parent.mkdir(parents=True, exist_ok=True)
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"'{path}' cannot be written: there is no folder "
            f"'{path.parent}'. Make it first."
        )


def _move_all(scratch: pathlib.Path, path: pathlib.Path) -> None:
    """Moves files into the folder of `path`, the one named `path` last.

    Other files in an existing folder stay.
    """
    found = sorted(
        scratch.rglob("*"), key=lambda p: (p.is_file(), p.name == path.name, p)
    )
    for source in found:
        target = path.parent / source.relative_to(scratch)
        if source.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        else:
            os.replace(source, target)


def refuse_for_lite(original: Original[T], model: Model) -> T:
    """Rejects a model with shards, which TFLite cannot convert."""
    for variable in model.variables:
        if shard_spec(variable) is not None:
            refuse_export(variable, "for TFLite")
    return original(model)


def save_once(
    original: Original[T],
    obj: Trackable,
    export_dir: Path,
    *args: Any,
    **kwargs: Any,
) -> T:
    found = list(tf.train.TrackableView(obj).descendants())
    for trackable in found:
        if shard_spec(trackable) is not None:
            refuse_export(trackable, f"to '{export_dir}'")
        if index := part_of_index(trackable):
            raise ValueError(
                f"Index '{index}' cannot be exported to '{export_dir}' by "
                "several ranks, each of which has a part of the candidates. "
                "Use tfdist_ext.export, of the index by itself or of a Keras "
                "model with it: see 'Serving an index' in docs/retrieval.md."
            )
    strategies = {_strategy_of(trackable) for trackable in found}
    for strategy in strategies:
        collectives = getattr(strategy, "collectives", None)
        if collectives is not None:
            return write_once(
                collectives,
                export_dir,
                lambda path: original(obj, path, *args, **kwargs),
                make_folder=True,
                keep=is_first_with(export_dir, collectives),
            )
    return original(obj, export_dir, *args, **kwargs)


def is_first_with(path: object, collectives: Collectives) -> bool:
    """Whether no earlier rank was given the same path.

    Without tables, all ranks have the entire model. Some callers (the TFLite
    converter) read what they wrote, each from a path of its own.
    """
    if not isinstance(path, str | os.PathLike):  # a file object
        return collectives.group.rank == 0
    absolute = os.path.abspath(path).encode()
    digest = hashlib.blake2b(absolute, digest_size=7).digest()
    own = int.from_bytes(digest, "little")
    digests = collectives.all_gather(
        tf.constant([own], tf.int64), "export/path"
    ).numpy()
    return int(np.argmax(digests == own)) == collectives.group.rank


def _strategy_of(trackable: Trackable) -> Strategy | None:
    value = value_of(trackable)
    if isinstance(value, tf.distribute.DistributedValues):
        return value._distribute_strategy
    return None


def refuse_export(shard: Variable, where: str) -> NoReturn:
    """Raises the error that a model with this shard cannot be exported."""
    spec = shard_spec(shard)
    assert spec is not None
    raise ValueError(
        f"A model with partitioned tables cannot be exported {where} by "
        f"{spec.world_size} ranks. Received: table '{spec.table}'. Call "
        "tfdist_ext.export(model, path), on all ranks: it writes a SavedModel "
        "of TensorFlow's own ops, which others convert. For ONNX, call "
        "tfdist_ext.export_onnx(model, path). See docs/serving.md."
    )


_PROGRESS = "tfdist_training"


def _with_ranks(function: Callable[..., Any]) -> StageFunction:
    """A stage that only acts on models of several ranks."""

    @functools.wraps(function)
    def around(
        original: Original[T], callback: Callback, *args: Any, **kwargs: Any
    ) -> T:
        collectives = collectives_of(callback.model)
        call = functools.partial(original, callback, *args, **kwargs)
        if collectives is None:
            return call()
        return function(collectives, call, callback, *args, **kwargs)

    return around


@_with_ranks
def back_up(
    collectives: Collectives, call: Callable[[], object], callback: Callback
) -> None:
    """Writes weights and progress in one file, by one rename.

    Keras writes two files, one after the other. If a process ends between them,
    it later resumes with the new weights in an epoch that they were already
    trained in. Keras's second file is written too, for a process without ranks.
    """
    backup = Backup.of(callback)
    first = collectives.group.rank == 0
    if is_remote(backup.weights):
        # h5py and rename do not work there, so this is Keras's way, in its
        # order.
        call() if first else callback.model.save_weights(backup.weights)
        return
    following = os.path.join(callback.backup_dir, "next.weights.h5")
    with collectives.joint_call(f"back up to '{callback.backup_dir}'"):
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
    """Yields a path to write to, which then replaces a file."""
    yield f"{target}.part"
    os.replace(f"{target}.part", target)


@_with_ranks
def restore(
    collectives: Collectives,
    call: Callable[[], object],
    callback: Callback,
    logs: Logs = None,
) -> None:
    """Reads the last backup; the one before if a rank cannot read it."""
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
        # It is None if a process without ranks has written it.
        if progress is not None:
            epoch = json.loads(progress)["epoch"]
            keras_internals.set_initial_epoch(callback.model, epoch)


@_with_ranks
def remove_backup(
    collectives: Collectives,
    call: Callable[[], object],
    callback: Callback,
    logs: Logs = None,
) -> None:
    collectives.barrier("backup/end")
    if collectives.group.rank == 0:
        call()
    # The next `fit` of a slower rank must not find it.
    collectives.barrier("backup/removed")


@_with_ranks
def make_folder(
    collectives: Collectives,
    call: Callable[[], object],
    callback: Callback,
    epoch: int,
    batch: int | None,
    logs: Logs,
    filepath: str,
) -> bool:
    # Keras checks whether the folder exists, then creates it: ranks may race.
    wanted = bool(call())
    folder = os.path.dirname(filepath)
    if wanted and folder and not is_remote(filepath):
        os.makedirs(folder, exist_ok=True)
    return wanted


@_with_ranks
def log_once(
    collectives: Collectives,
    call: Callable[[], object],
    callback: Callback,
    logs: Logs = None,
) -> None:
    """Makes only rank 0 write the log, as all ranks have the same rows."""
    name = callback.filename
    if collectives.group.rank > 0:
        callback.filename = os.devnull
    try:
        call()
    finally:
        callback.filename = name
