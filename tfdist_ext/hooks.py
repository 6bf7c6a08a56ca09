# SPDX-License-Identifier: Apache-2.0
"""The table of all that this package replaces in TensorFlow and Keras.

`patching` installs a row while something needs it and restores the original
afterwards. Calls go through the stages of a row in the order given, then to the
original.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist_ext import keras_internals as names
from tfdist_ext import keras_objects
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.callbacks import resume
from tfdist_ext.callbacks import timeline
from tfdist_ext.callbacks import update_watch
from tfdist_ext.checking import each_epoch
from tfdist_ext.checking import first_step
from tfdist_ext.checkpoints import saver
from tfdist_ext.distribute import python_values
from tfdist_ext.distribute import state
from tfdist_ext.keras_internals import KERAS_3
from tfdist_ext.keras_training import array_lengths
from tfdist_ext.keras_training import array_order
from tfdist_ext.keras_training import building
from tfdist_ext.keras_training import gradient_norms
from tfdist_ext.keras_training import jit_compile
from tfdist_ext.keras_training import loop_start
from tfdist_ext.keras_training import loops
from tfdist_ext.keras_training import normalizing
from tfdist_ext.keras_training import on_batch
from tfdist_ext.keras_training import outputs
from tfdist_ext.keras_training import predicting
from tfdist_ext.keras_training import predictions
from tfdist_ext.keras_training import rehearsed_call
from tfdist_ext.keras_training import scopes
from tfdist_ext.keras_training import settings
from tfdist_ext.keras_training import steps
from tfdist_ext.keras_training import whole_values
from tfdist_ext.layers import model_plan
from tfdist_ext.optimizers import applying
from tfdist_ext.optimizers import repeated_rows
from tfdist_ext.optimizers import row_norms
from tfdist_ext.patching import Hook
from tfdist_ext.patching import Need
from tfdist_ext.patching import Stage
from tfdist_ext.patching import stage
from tfdist_ext.saving import copies
from tfdist_ext.saving import exports
from tfdist_ext.saving import keras_callbacks
from tfdist_ext.saving import keras_files
from tfdist_ext.saving import keras_reading
from tfdist_ext.serving import routes
from tfdist_ext.sharding import kernel_reads
from tfdist_ext.sharding import key_steps

keras = tf.keras

STRATEGY, RANKS, TABLES = Need.STRATEGY, Need.RANKS, Need.TABLES
_place_first = loop_start.place_first(model_plan.layers_of, model_plan.place)
_place_built = loop_start.place_built(model_plan.place)

# What would make a row unnecessary.
_LOOP = "a hook of Keras around its loops, for strategies"
_STEP = "a hook of Keras around losses and metrics, for strategies"
_SAVING = "a hook of Keras around what writes and reads files, for strategies"
_OPTIMIZER = "a hook of Keras's optimizers around updates, for strategies"
_CHECKPOINT = "a hook of TensorFlow's checkpoints, for partitioned variables"
_EXPORT = "a hook of SavedModels for what cannot be served as it is"
_CALLBACKS = "callbacks of Keras 3 that know of several workers"


def table() -> list[Hook]:
    """All rows, for the Keras that is in use.

    Owners and originals are those of now: nothing is to be replaced yet.
    """
    return [
        *_loops(),
        *_steps(),
        *_optimizers(),
        *_variables(),
        *_layers(),
        *_files(),
        *_checkpoints(),
        *_callbacks(),
        *_exports(),
    ]


def _row(
    owner: Any,
    name: str,
    why: str,
    upstream: str,
    *stages: Stage,
    plain: bool = False,
) -> Hook:
    return Hook(owner, name, stages, why, upstream, plain)


def _loops() -> list[Hook]:
    """`fit`, `evaluate`, `predict` and their steps on batches."""
    model = keras.Model
    on_all_ranks = stage(loops.on_all_ranks, RANKS)
    compare_settings = stage(settings.compare_settings, STRATEGY)
    place_first = stage(_place_first, STRATEGY)
    in_scope = stage(scopes.in_scope, STRATEGY)
    in_loop = [stage(array_lengths.in_loop, STRATEGY)] if KERAS_3 else []
    predict = [stage(predicting.predict, STRATEGY)] if KERAS_3 else []
    (compiles, *_) = (c for c in model.__mro__ if "compile" in vars(c))
    rows = [
        _row(
            model,
            "fit",
            "Ranks begin, place tables and end together; what a rank cannot "
            "train as one process does is refused or named.",
            _LOOP,
            stage(update_watch.end_watch, Need.UPDATE_WATCH),
            stage(resume.skip_trained_batches, STRATEGY),
            stage(each_epoch.compare_after_epochs, RANKS),
            on_all_ranks,
            compare_settings,
            stage(array_order.shuffle_alike, RANKS),
            place_first,
            *in_loop,
            in_scope,
        ),
        _row(
            model,
            "evaluate",
            "As `fit`.",
            _LOOP,
            on_all_ranks,
            compare_settings,
            place_first,
            *in_loop,
            in_scope,
        ),
        _row(
            model,
            "predict",
            "As `fit`; every rank returns what one process does.",
            _LOOP,
            on_all_ranks,
            compare_settings,
            place_first,
            *in_loop,
            *predict,
            in_scope,
        ),
        _row(
            compiles,
            "compile",
            "XLA compiles no exchange between ranks and no lookup of ours.",
            "a strategy's word in Keras's choice of `jit_compile`",
            stage(jit_compile.compile_without_xla, STRATEGY),
        ),
        _row(
            model,
            "make_train_function",
            "The first step is compared with one process before it is trained.",
            _LOOP,
            stage(first_step.check_first_step, RANKS),
        ),
        _row(
            *names.batch_loop(),
            "Batches that were trained before a restart call no callback.",
            "`fit(initial_step=)` beside `initial_epoch`",
            stage(resume.without_trained_batches, STRATEGY),
        ),
        _row(
            *names.concatenation(),
            "What ranks predict is in order already.",
            "a hook of Keras around what replicas predict",
            stage(predictions.concatenate, RANKS),
        ),
    ]
    on_batch_steps = [stage(on_batch.step_on_batch, RANKS)] if KERAS_3 else []
    for name in ("train_on_batch", "test_on_batch"):
        rows.append(
            _row(
                model,
                name,
                "As `fit`, for one batch, of which each rank takes its part.",
                _LOOP,
                on_all_ranks,
                *on_batch_steps,
                in_scope,
            )
        )
    predict_on_batch = (
        [stage(on_batch.predict_on_batch, RANKS)] if KERAS_3 else []
    )
    rows.append(
        _row(
            model,
            "predict_on_batch",
            "As `predict`, for one batch.",
            _LOOP,
            on_all_ranks,
            *predict_on_batch,
        )
    )
    if KERAS_3:
        rows += [
            _row(
                model,
                "make_predict_function",
                "`predict` is traced once for batches of all sizes.",
                _LOOP,
                stage(predicting.make_predict_function, STRATEGY),
            ),
            _row(
                model,
                names.BUILD_BY_SHAPES,
                "A model is built with the shapes of a rank's batch.",
                _LOOP,
                stage(building.build, STRATEGY),
            ),
            _row(
                names.array_adapter(),
                "get_tf_dataset",
                "The number of samples of arrays is known to the ranks.",
                "datasets of arrays that know their number of samples",
                stage(array_lengths.keep_lengths, STRATEGY),
            ),
        ]
    return rows


def _steps() -> list[Hook]:
    """What a step calls: layers, losses, metrics, gradients."""
    metrics = keras.metrics
    update_metric = stage(whole_values.update_metric, STRATEGY)
    loss = [stage(steps.call_loss, STRATEGY)]
    if not KERAS_3:
        loss.append(stage(steps.allow_means, STRATEGY))
    add_state = "add_variable" if KERAS_3 else "add_weight"
    rows = [
        _row(
            keras.layers.Layer,
            "__call__",
            "A layer computes the samples of its own rank, also none.",
            "a mark of Keras for code that looks at samples together",
            stage(steps.call_layer, STRATEGY),
            plain=True,
        ),
        _row(
            keras.Model,
            "__call__",
            "Layers with tables share their exchanges.",
            "a hook of Keras around the call of a model",
            stage(rehearsed_call.share_exchanges, RANKS),
            plain=True,
        ),
        _row(
            keras.Model,
            "compute_loss",
            "Losses that do not decompose over samples get the whole batch.",
            _STEP,
            stage(outputs.gather_first, STRATEGY),
            plain=True,
        ),
        _row(
            keras.losses.Loss,
            "__call__",
            "Means and sums over the batch are those of all ranks.",
            _STEP,
            *loss,
            plain=True,
        ),
        _row(
            metrics.Mean,
            "update_state",
            "Numbers of the whole batch are counted once.",
            _STEP,
            update_metric,
            stage(steps.track_mean, STRATEGY),
            plain=True,
        ),
        _row(
            metrics.Sum,
            "update_state",
            "As `Mean`.",
            _STEP,
            update_metric,
            stage(steps.track_sum, STRATEGY),
            plain=True,
        ),
        Hook(
            keras.losses.Loss,
            "__call__",
            [stage(whole_values.call_loss, STRATEGY)],
            "Losses of users' own classes get the whole batch.",
            _STEP,
            plain=True,
            subclasses=_is_no_container,
        ),
        Hook(
            metrics.Metric,
            "update_state",
            [update_metric],
            "Metrics that do not decompose over samples get the whole batch.",
            _STEP,
            plain=True,
            subclasses=_is_no_container,
        ),
        _row(
            metrics.Metric,
            add_state,
            "States of metrics that all ranks have are not summed.",
            _STEP,
            stage(whole_values.add_state, STRATEGY),
        ),
        _row(
            tf.GradientTape,
            "gradient",
            "Gradients in Keras's steps are those of the whole batch.",
            "a hook of strategies around the gradients of a step",
            stage(steps.gradient, STRATEGY),
            plain=True,
        ),
        _row(
            tf.distribute.ReplicaContext,
            "all_reduce",
            "Sums over ranks in a model are told from those of gradients.",
            "none: an all-reduce does not say what it is for",
            stage(steps.tell_forward_sums, STRATEGY),
            plain=True,
        ),
    ]
    norms = "norms of TensorFlow that know of partitioned variables"
    for owner, name, call in (
        (tf.linalg, "global_norm", gradient_norms.global_norm),
        (tf, "clip_by_global_norm", gradient_norms.clip_by_global_norm),
        (tf, "clip_by_norm", gradient_norms.clip_by_norm),
    ):
        rows.append(
            _row(
                owner,
                name,
                "The norm of a table's gradient counts all shards once.",
                norms,
                stage(call, STRATEGY),
                plain=True,
            )
        )
    return rows


def _is_no_container(cls: type[Any]) -> bool:
    return not keras_objects.is_container(cls)


def _optimizers() -> list[Hook]:
    optimizer = keras.optimizers.Optimizer
    end_steps = stage(key_steps.end_steps, Need.VOCABULARY)
    rows = [
        _row(
            optimizer,
            "build",
            "All ranks make slots at once, after their tables are placed.",
            _OPTIMIZER,
            stage(loops.build_on_all_ranks, RANKS),
            *([stage(_place_built, STRATEGY)] if KERAS_3 else []),
            stage(row_norms.refuse_at_build, Need.MAX_NORM),
        ),
        _row(
            optimizer,
            names.UPDATE_AVERAGES,
            "Averages of tables are those of the rows of this rank.",
            _OPTIMIZER,
            stage(kernel_reads.read_parts, RANKS),
            *([stage(loops.average_of_rows, RANKS)] if KERAS_3 else []),
        ),
    ]
    why = (
        "Rows of a table are updated once; what cannot update them is refused."
    )
    if KERAS_3:
        scaled = keras.optimizers.LossScaleOptimizer
        apply = stage(applying.apply, STRATEGY)
        return [
            *rows,
            _row(
                optimizer,
                "apply",
                why,
                _OPTIMIZER,
                end_steps,
                apply,
                stage(repeated_rows.sum_repeated_rows, TABLES),
            ),
            _row(scaled, "apply", why, _OPTIMIZER, apply),
            _row(
                scaled,
                "check_finite",
                "A step is left out on all ranks or on none.",
                _OPTIMIZER,
                stage(loops.finite_on_all_ranks, RANKS),
            ),
        ]
    apply = stage(applying.apply_gradients, STRATEGY)
    refuse = stage(row_norms.refuse_at_apply, Need.MAX_NORM)
    legacy = keras.optimizers.legacy.Optimizer
    name = "apply_gradients"
    return [
        *rows,
        _row(optimizer, name, why, _OPTIMIZER, end_steps, apply),
        _row(legacy, name, why, _OPTIMIZER, refuse, end_steps, apply),
    ]


def _variables() -> list[Hook]:
    rows = [
        _row(
            internals.MirroredVariable,
            internals.WRITE_IN_REPLICA,
            "State that a step assigns is that of the whole batch.",
            "a hook of strategies around assignments in a step",
            stage(state.write, RANKS),
        )
    ]
    if KERAS_3:
        rows += [
            _row(
                keras.Variable,
                name,
                "What ranks add to a summed variable is added once.",
                "`assign_add` of Keras 3 that heeds the aggregation",
                stage(state.change_sum, RANKS),
            )
            for name in ("assign_add", "assign_sub")
        ]
    variable = internals.DistributedVariable
    return rows + [
        _row(
            variable,
            name,
            "Python and numpy convert variables of a strategy.",
            "these methods of TensorFlow's distributed variables",
            stage(convert, Need.VARIABLES),
        )
        for name, convert in python_values.CONVERSIONS.items()
        if not hasattr(variable, name)
    ]


def _layers() -> list[Hook]:
    layer = keras.layers.BatchNormalization
    upstream = "synchronized moments of Keras that count samples"
    moments: Any = normalizing.keras_3_moments
    empty: list[Hook] = []
    if not KERAS_3:
        moments = normalizing.tf_keras_moments
        empty = [
            _row(
                layer,
                names.SKIPS_EMPTY,
                "A rank without samples counts none.",
                upstream,
                stage(normalizing.skips_empty, RANKS),
            )
        ]
    return [
        _row(
            layer,
            names.MOMENTS,
            "Synchronized moments are those of the whole batch.",
            upstream,
            stage(moments, RANKS),
        ),
        *empty,
    ]


def _files() -> list[Hook]:
    """Keras's files of models and weights."""
    saving = names.SavingModules()
    files, hdf5, folders = saving.files, saving.hdf5, saving.folders
    read = stage(keras_reading.read_on_all_ranks, RANKS)
    refuse = stage(keras_reading.refuse_tables, RANKS)
    write = "One rank writes, and tables are written whole."
    reads = "All ranks read one file, and their parts of tables."
    if KERAS_3:
        writers = [
            (files, "save_model", keras_files.write_keras_3),
            (files, "save_weights_only", keras_files.write_keras_3),
            (hdf5, "save_model_to_hdf5", keras_files.write_hdf5),
        ]
        readers = [(hdf5, "load_model_from_hdf5", read)]
    else:
        weights = keras_files.write_tf_keras_weights
        writers = [
            (files, "save_model", keras_files.write_tf_keras),
            (files, "save_weights_only", weights),
            (folders, "save_model", keras_files.write_tf_keras),
            (folders, "save_weights", weights),
        ]
        readers = [
            (folders, "load_model", read),
            (folders, "load_weights", read),
            (
                keras.layers.Layer,
                "load_own_variables",
                stage(keras_reading.read_arrays, RANKS),
            ),
        ]
    readers += [
        (files, "load_model", read),
        (files, "load_weights_only", read),
        (hdf5, "load_weights_from_hdf5_group", refuse),
        (hdf5, "load_weights_from_hdf5_group_by_name", refuse),
        # They look whether there is a file, before any of the above.
        *((module, "load_model", read) for module in names.public_readers()),
        (keras.Model, "load_weights", read),
        (
            keras.optimizers.Optimizer,
            "load_own_variables",
            stage(keras_reading.read_part_of_slots, RANKS),
        ),
    ]
    copy = stage(copies.refuse_copy, RANKS, TABLES)
    copied = [
        (keras.layers.Layer, "__reduce_ex__"),
        (keras.optimizers.Optimizer, "__reduce_ex__"),
    ]
    if not KERAS_3:
        copied.append((keras.Model, "__deepcopy__"))
    return [
        _row(
            saving.asking,
            "input",
            "Ranks have no terminal to ask whether to overwrite a file.",
            _SAVING,
            stage(keras_files.ask, RANKS),
        ),
        *(
            _row(owner, name, write, _SAVING, stage(call, RANKS))
            for owner, name, call in writers
        ),
        *(
            _row(owner, name, reads, _SAVING, call)
            for owner, name, call in readers
        ),
        *(
            _row(
                owner,
                name,
                "A copy would have one rank's part of the tables.",
                "copies of Keras that ask layers",
                copy,
            )
            for owner, name in copied
        ),
    ]


def _checkpoints() -> list[Hook]:
    """Checkpoints of TensorFlow."""
    needs = (RANKS, Need.CHECKPOINTS)
    why = "Each rank writes and reads its shards; all end alike."
    rows = []
    for owner in (tf.train.Checkpoint, tf.compat.v1.train.Checkpoint):
        for name in ("_write", "save", "read", "restore"):
            if hasattr(owner, name):
                verb = "restore" if name in ("read", "restore") else "save"
                call = stage(saver.on_all_ranks(verb), *needs)
                rows.append(_row(owner, name, why, _CHECKPOINT, call))
    old = tf.compat.v1.train.Saver
    for owner, name, function in (
        (tf.train.CheckpointManager, "save", saver.save_managed),
        (old, "save", saver.refuse_by_name),
        (old, "restore", saver.refuse_by_name),
        (internals.MultiDeviceSaver, "save", saver.save_parts),
        (internals.MultiDeviceSaver, "restore", saver.restore_parts),
    ):
        call = stage(function, *needs)
        rows.append(_row(owner, name, why, _CHECKPOINT, call))
    return rows


def _callbacks() -> list[Hook]:
    callbacks = keras.callbacks
    own = [
        (callbacks.CSVLogger, "on_train_begin", keras_callbacks.log_once),
    ]
    if KERAS_3:
        backup = callbacks.BackupAndRestore
        own += [
            (backup, names.WRITE_BACKUP, keras_callbacks.back_up),
            (backup, "on_train_begin", keras_callbacks.restore),
            (backup, "on_train_end", keras_callbacks.remove_backup),
            (
                callbacks.ModelCheckpoint,
                names.SHOULD_WRITE_MODEL,
                keras_callbacks.make_folder,
            ),
        ]
        if hasattr(callbacks, "OrbaxCheckpoint"):
            refuse = keras_callbacks.refuse_orbax
            own.append((callbacks.OrbaxCheckpoint, "on_train_begin", refuse))
    calls = callbacks.CallbackList
    return [
        *(
            _row(
                owner,
                name,
                "One rank writes what this callback writes.",
                _CALLBACKS,
                stage(call, RANKS),
            )
            for owner, name, call in own
        ),
        _row(
            callbacks.TensorBoard,
            names.LOG_WEIGHTS,
            "Histograms of a table are those of this rank's part.",
            _CALLBACKS,
            stage(kernel_reads.read_parts, RANKS),
        ),
        *(
            _row(
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


def _exports() -> list[Hook]:
    """SavedModels and TFLite."""
    module = internals.saved_model_save
    served = "Models with tables are exported with ops of TensorFlow only."
    export = [stage(routes.export, TABLES)]
    if KERAS_3:
        export.insert(0, stage(keras_files.export, RANKS))
    save = stage(routes.save, TABLES)
    return [
        _row(keras.Model, "export", served, _EXPORT, *export),
        _row(tf.saved_model, "save", served, _EXPORT, save),
        _row(module, "save", served, _EXPORT, save),
        _row(
            module,
            internals.VERIFY_OPS,
            "Ops of ours in a SavedModel are refused, unless they are allowed.",
            _EXPORT,
            stage(routes.verify, TABLES),
        ),
        _row(
            module,
            "save_and_return_nodes",
            "One rank writes; parts of tables are refused.",
            _EXPORT,
            stage(exports.save_once, RANKS, TABLES),
        ),
        _row(
            tf.lite.TFLiteConverter,
            "from_keras_model",
            "TFLite takes no parts of tables.",
            _EXPORT,
            stage(exports.refuse_for_lite, RANKS, TABLES),
        ),
    ]
