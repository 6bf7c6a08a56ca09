# SPDX-License-Identifier: Apache-2.0
"""Hooks for files: models, checkpoints, callbacks and exports."""

from __future__ import annotations

import inspect
import sys
import types

import tensorflow as tf

from tfdist_ext import keras_internals as names
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.callbacks import timeline
from tfdist_ext.embedding import sharded_variable
from tfdist_ext.keras_internals import KERAS_3
from tfdist_ext.patching import Hook
from tfdist_ext.patching import Need
from tfdist_ext.patching import StageFn
from tfdist_ext.patching import hook
from tfdist_ext.patching import stage
from tfdist_ext.saving import exporting
from tfdist_ext.saving import keras_files
from tfdist_ext.saving import orbax_files
from tfdist_ext.saving import saver
from tfdist_ext.saving import shared_files
from tfdist_ext.strategy import rounds

keras = tf.keras

STRATEGY, RANKS, TABLES = Need.STRATEGY, Need.RANKS, Need.TABLES

# Changes of Keras or TensorFlow that would replace a hook.
_SAVING = "a hook of Keras around files, for strategies"
_CHECKPOINT = "a hook of TensorFlow's checkpoints, for partitioned variables"
_EXPORT = "a hook of SavedModels for objects that need this package"
_CALLBACKS = "callbacks of Keras 3 that support several workers"


def rows() -> list[Hook]:
    """Hooks for files, for the installed version of Keras."""
    return [
        *_writers(),
        *_readers(),
        *_copies(),
        *_checkpoints(),
        *_callbacks(),
        *_orbax(),
        *_exports(),
    ]


def _writers() -> list[Hook]:
    """Hooks of functions that write Keras's files of models and weights."""
    saving = names.SavingModules()
    files, folders = saving.files, saving.folders
    if KERAS_3:
        written = [
            (files, "save_model", keras_files.write_keras_3),
            (files, "save_weights_only", keras_files.write_keras_3),
            (saving.hdf5, "save_model_to_hdf5", keras_files.write_hdf5),
        ]
    else:
        weights = keras_files.write_tf_keras_weights
        written = [
            (files, "save_model", keras_files.write_tf_keras),
            (files, "save_weights_only", weights),
            (folders, "save_model", keras_files.write_tf_keras),
            (folders, "save_weights", weights),
        ]
    why = "One rank writes, and tables are written whole."
    return [
        hook(
            saving.asking,
            "input",
            "Ranks have no terminal to ask whether to overwrite a file.",
            _SAVING,
            stage(keras_files.ask_user, RANKS),
        ),
        *(
            hook(
                *(owner, name, why, _SAVING),
                stage(rounds.end_before, STRATEGY),
                stage(call, RANKS),
            )
            for owner, name, call in written
        ),
    ]


def _readers() -> list[Hook]:
    """Hooks of functions that read Keras's files of models and weights."""
    saving = names.SavingModules()
    files, hdf5, folders = saving.files, saving.hdf5, saving.folders
    read, refuse = keras_files.read_on_all_ranks, keras_files.refuse_tables
    if KERAS_3:
        loaded: list[tuple[object, str, StageFn]]
        loaded = [(hdf5, "load_model_from_hdf5", read)]
    else:
        arrays = keras_files.read_arrays
        loaded = [
            (folders, "load_model", read),
            (folders, "load_weights", read),
            (keras.layers.Layer, "load_own_variables", arrays),
        ]
    slots = keras_files.read_part_of_slots
    loaded += [
        (files, "load_model", read),
        (files, "load_weights_only", read),
        (hdf5, "load_weights_from_hdf5_group", refuse),
        (hdf5, "load_weights_from_hdf5_group_by_name", refuse),
        (keras.Model, "load_weights", read),
        (keras.optimizers.Optimizer, "load_own_variables", slots),
    ]
    why = "All ranks read one file, and their parts of tables."
    reading = stage(orbax_files.reading, STRATEGY, Need.VOCABULARY)
    # These check first whether the file exists.
    public = ["load_model", "load_weights"] if KERAS_3 else ["load_model"]
    return [
        *(
            hook(owner, name, why, _SAVING, stage(call, RANKS))
            for owner, name, call in loaded
        ),
        *(
            hook(module, name, why, _SAVING, reading, stage(read, RANKS))
            for name in public
            for module in _public_readers(name)
        ),
    ]


def _public_readers(name: str) -> list[types.ModuleType]:
    """Modules that have one of Keras's public functions that read files.

    Args:
        name: "load_model", or "load_weights", which only Keras 3 has.
    """
    public = inspect.unwrap(keras.models.load_model).__globals__[name]
    modules = list(sys.modules.values())
    return [m for m in modules if vars(m).get(name) is public]


def _copies() -> list[Hook]:
    copy = stage(keras_files.refuse_copy, RANKS, TABLES)
    copied = [
        (keras.layers.Layer, "__reduce_ex__"),
        (keras.optimizers.Optimizer, "__reduce_ex__"),
    ]
    if not KERAS_3:
        copied.append((keras.Model, "__deepcopy__"))
    return [
        hook(
            owner,
            name,
            "A copy would have one rank's part of the tables.",
            "a hook of Keras for copies of layers",
            copy,
        )
        for owner, name in copied
    ]


def _checkpoints() -> list[Hook]:
    """Hooks of checkpoints of TensorFlow."""
    needs = (RANKS, Need.CHECKPOINTS)
    why = "Each rank writes and reads its shards. All succeed or all fail."
    ends = stage(rounds.end_before_checkpoint(saver.objects_of), STRATEGY)
    rows = []
    for owner in (tf.train.Checkpoint, tf.compat.v1.train.Checkpoint):
        for name in ("_write", "save", "read", "restore"):
            if hasattr(owner, name):
                verb = "restore" if name in ("read", "restore") else "save"
                call = stage(saver.on_all_ranks(verb), *needs)
                rows.append(hook(owner, name, why, _CHECKPOINT, ends, call))
    old = tf.compat.v1.train.Saver
    for owner, name, function in (
        (tf.train.CheckpointManager, "save", saver.save_managed),
        (old, "save", saver.refuse_by_name),
        (old, "restore", saver.refuse_by_name),
        (internals.MultiDeviceSaver, "save", saver.save_parts),
        (internals.MultiDeviceSaver, "restore", saver.restore_parts),
    ):
        call = stage(function, *needs)
        rows.append(hook(owner, name, why, _CHECKPOINT, call))
    return rows


def _callbacks() -> list[Hook]:
    callbacks = keras.callbacks
    own = [(callbacks.CSVLogger, "on_train_begin", shared_files.log_once)]
    if KERAS_3:
        backup = callbacks.BackupAndRestore
        own += [
            (backup, names.WRITE_BACKUP, shared_files.back_up),
            (backup, "on_train_begin", shared_files.restore),
            (backup, "on_train_end", shared_files.remove_backup),
            (
                callbacks.ModelCheckpoint,
                names.SHOULD_WRITE_MODEL,
                shared_files.make_folder,
            ),
        ]
    calls = callbacks.CallbackList
    return [
        *(
            hook(
                owner,
                name,
                "One rank writes what this callback writes.",
                _CALLBACKS,
                stage(call, RANKS),
            )
            for owner, name, call in own
        ),
        hook(
            callbacks.TensorBoard,
            names.LOG_WEIGHTS,
            "Histograms of a table are those of this rank's part.",
            _CALLBACKS,
            stage(sharded_variable.read_parts, RANKS),
        ),
        *(
            hook(
                calls,
                name,
                "The time that callbacks take is measured.",
                "times of callbacks in Keras",
                stage(call, Need.TIMELINE),
            )
            for name, call in (
                ("on_train_batch_begin", timeline.time_begin),
                ("on_train_batch_end", timeline.time_end),
            )
        ),
    ]


def _orbax() -> list[Hook]:
    """Hooks of checkpoints of Orbax, which Keras 3 makes from state trees."""
    orbax = getattr(keras.callbacks, "OrbaxCheckpoint", None)
    if orbax is None:
        return []
    needs = (STRATEGY, Need.VOCABULARY)
    why = "A checkpoint has whole tables and the keys of vocabularies."
    return [
        hook(
            orbax,
            names.WRITE_ORBAX,
            "One rank writes, and tables are written whole.",
            _CALLBACKS,
            stage(orbax_files.save, *needs),
        ),
        *(
            hook(keras.Model, name, why, _SAVING, stage(call, *needs))
            for name, call in (
                ("get_state_tree", orbax_files.get_state_tree),
                ("set_state_tree", orbax_files.set_state_tree),
            )
        ),
    ]


def _exports() -> list[Hook]:
    """Hooks of exports as SavedModels and TFLite models."""
    module = internals.saved_model_save
    served = "Models with tables are exported with ops of TensorFlow only."
    export = [
        stage(rounds.end_before, STRATEGY),
        stage(exporting.export_archive, TABLES),
    ]
    if KERAS_3:
        export.insert(1, stage(keras_files.export_archive, RANKS))
    save = stage(exporting.save_model, TABLES)
    return [
        hook(keras.Model, "export", served, _EXPORT, *export),
        hook(tf.saved_model, "save", served, _EXPORT, save),
        hook(module, "save", served, _EXPORT, save),
        hook(
            module,
            internals.VERIFY_OPS,
            "Ops of this package in a SavedModel are refused, unless they are "
            "allowed.",
            _EXPORT,
            stage(exporting.verify_ops, TABLES),
        ),
        hook(
            module,
            "save_and_return_nodes",
            "One rank writes; parts of tables are refused.",
            _EXPORT,
            stage(shared_files.save_once, RANKS, TABLES),
        ),
        hook(
            tf.lite.TFLiteConverter,
            "from_keras_model",
            "TFLite cannot convert parts of tables.",
            _EXPORT,
            stage(shared_files.refuse_for_lite, RANKS, TABLES),
        ),
    ]
