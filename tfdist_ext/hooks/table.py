# SPDX-License-Identifier: Apache-2.0
"""Table of all attributes of TensorFlow and Keras that this package replaces.

`patching` installs a hook while an object needs it and restores the original
afterwards. A call runs the stages of a hook in the given order, then the
original. This module has the hooks of training; `files` has those of files.
"""

from __future__ import annotations

import tensorflow as tf

from tfdist_ext import keras_internals
from tfdist_ext import keras_internals as names
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.callbacks import resume
from tfdist_ext.callbacks import update_watch
from tfdist_ext.embedding import rows_of_keys
from tfdist_ext.embedding import sharded_variable
from tfdist_ext.hooks import files
from tfdist_ext.keras_internals import KERAS_3
from tfdist_ext.layers import model_plan
from tfdist_ext.numbers import check
from tfdist_ext.numbers import model_state
from tfdist_ext.optimizers import accumulation
from tfdist_ext.optimizers import row_gradients
from tfdist_ext.optimizers import row_optimizer
from tfdist_ext.optimizers import supported
from tfdist_ext.patching import Hook
from tfdist_ext.patching import Need
from tfdist_ext.patching import StageFn
from tfdist_ext.patching import hook
from tfdist_ext.patching import stage
from tfdist_ext.strategy import before_training
from tfdist_ext.strategy import loops
from tfdist_ext.strategy import on_batch
from tfdist_ext.strategy import predictions
from tfdist_ext.strategy import refused
from tfdist_ext.strategy import rounds
from tfdist_ext.strategy import state
from tfdist_ext.strategy import steps
from tfdist_ext.strategy import whole_values

keras = tf.keras

STRATEGY, RANKS, TABLES = Need.STRATEGY, Need.RANKS, Need.TABLES
_place_first = loops.place_first(model_plan.layers_of, model_plan.place)
_place_built = loops.place_built(model_plan.place)

# Changes of Keras or TensorFlow that would replace a hook.
_LOOP = "a hook of Keras around its loops, for strategies"
_STEP = "a hook of Keras around losses and metrics, for strategies"
_UPDATE = (
    "Rows of a table are updated once. Optimizers that cannot do this are "
    "refused."
)
_OPTIMIZER = "a hook of Keras's optimizers around updates, for strategies"


def training_rows() -> list[Hook]:
    """Hooks of training, for the installed version of Keras."""
    return [
        hook(
            internals.autograph_conversion,
            "is_allowlisted",
            "AutoGraph does not convert this package, as it does not convert "
            "Keras: that would take seconds at the start of every program.",
            "a public list of packages that AutoGraph leaves alone",
            stage(internals.calls_as_written, *Need),
        ),
        *_loops(),
        *_functions(),
        *_batches(),
        *_steps(),
        *_of_metrics(),
        *_norms(),
        *_optimizers(),
        *_variables(),
        *_layers(),
    ]


def _loops() -> list[Hook]:
    """Hooks of `fit`, `evaluate` and `predict`."""
    model = keras.Model
    on_all_ranks = stage(loops.on_all_ranks, RANKS)
    compare_settings = stage(loops.compare_settings, STRATEGY)
    end_round = stage(rounds.end_before, STRATEGY)
    place_first = stage(_place_first, STRATEGY)
    in_scope = stage(before_training.in_scope, STRATEGY)
    in_loop = (
        [stage(before_training.lengths_in_loop, STRATEGY)] if KERAS_3 else []
    )
    predict = [stage(predictions.predict, STRATEGY)] if KERAS_3 else []
    return [
        hook(
            model,
            "fit",
            "Ranks start, place tables and end together. What a rank cannot "
            "train as in one process is refused or reported.",
            _LOOP,
            stage(update_watch.end_watch, Need.UPDATE_WATCH),
            stage(resume.skip_trained_batches, STRATEGY),
            stage(model_state.compare_after_epochs, RANKS),
            stage(rounds.end_after_epochs, STRATEGY),
            on_all_ranks,
            compare_settings,
            stage(before_training.shuffle_equally, RANKS),
            place_first,
            *in_loop,
            in_scope,
        ),
        hook(
            model,
            "evaluate",
            "As `fit`.",
            _LOOP,
            end_round,
            on_all_ranks,
            compare_settings,
            place_first,
            *in_loop,
            in_scope,
        ),
        hook(
            model,
            "predict",
            "As `fit`; every rank returns what one process does.",
            _LOOP,
            end_round,
            on_all_ranks,
            compare_settings,
            place_first,
            *in_loop,
            *predict,
            in_scope,
        ),
    ]


def _functions() -> list[Hook]:
    """Hooks of methods that create or call the functions of the loops."""
    model = keras.Model
    (compiles, *_) = (c for c in model.__mro__ if "compile" in vars(c))
    return [
        hook(
            compiles,
            "compile",
            "XLA cannot compile exchanges between ranks and lookups of this "
            "package.",
            "a way for strategies to set `jit_compile`",
            stage(refused.compile_without_xla, STRATEGY),
        ),
        hook(
            model,
            "make_train_function",
            "The first step is compared with one process before it is trained.",
            _LOOP,
            stage(refused.check_first, STRATEGY),
            stage(check.check_first_step, RANKS),
        ),
        hook(
            *names.batch_loop(),
            "Batches that were trained before a restart call no callback.",
            "`fit(initial_step=)`, like `initial_epoch`",
            stage(resume.without_trained_batches, STRATEGY),
        ),
        hook(
            *names.concatenation(),
            "The predictions of ranks are in order already.",
            "a hook of Keras around predictions of replicas",
            stage(predictions.concatenate, RANKS),
        ),
    ]


def _batches() -> list[Hook]:
    """Hooks of steps on batches of the caller, and of tracing."""
    model = keras.Model
    on_all_ranks = stage(loops.on_all_ranks, RANKS)
    in_scope = stage(before_training.in_scope, STRATEGY)
    end_round = stage(rounds.end_before, STRATEGY)
    on_batch_steps = [stage(on_batch.step_on_batch, RANKS)] if KERAS_3 else []
    rows = []
    for name in ("train_on_batch", "test_on_batch"):
        ends = [end_round] if name == "test_on_batch" else []
        rows.append(
            hook(
                model,
                name,
                "As `fit`, for one batch, of which each rank takes its part.",
                _LOOP,
                *ends,
                on_all_ranks,
                *on_batch_steps,
                in_scope,
            )
        )
    predict_on_batch = (
        [stage(on_batch.predict_on_batch, RANKS)] if KERAS_3 else []
    )
    rows.append(
        hook(
            model,
            "predict_on_batch",
            "As `predict`, for one batch.",
            _LOOP,
            end_round,
            on_all_ranks,
            *predict_on_batch,
        )
    )
    return rows + (_builders() if KERAS_3 else [])


def _builders() -> list[Hook]:
    """Hooks of Keras 3 before a first batch."""
    model = keras.Model
    return [
        hook(
            model,
            "make_predict_function",
            "`predict` is traced once for batches of all sizes.",
            _LOOP,
            stage(predictions.make_predict_function, STRATEGY),
        ),
        hook(
            model,
            names.BUILD_BY_SHAPES,
            "A model is built with the shapes of a rank's batch.",
            _LOOP,
            stage(before_training.build, STRATEGY),
        ),
        hook(
            names.array_adapter(),
            "get_tf_dataset",
            "Ranks know the number of samples of arrays.",
            "datasets of arrays that know their number of samples",
            stage(before_training.keep_lengths, STRATEGY),
        ),
    ]


def _steps() -> list[Hook]:
    """Hooks of layers, losses and gradients in a step."""
    loss = [stage(steps.call_loss, STRATEGY)]
    if not KERAS_3:
        loss.append(stage(steps.allow_means, STRATEGY))
    rows = [
        hook(
            keras.layers.Layer,
            "__call__",
            "A layer computes the samples of its rank, of which there may be "
            "none.",
            "a mark of Keras for code that looks at samples together",
            stage(steps.call_layer, STRATEGY),
            plain=True,
        ),
        hook(
            keras.Model,
            "__call__",
            "Layers with tables share their exchanges.",
            "a hook of Keras around the call of a model",
            stage(steps.share_exchanges, RANKS),
            plain=True,
        ),
        hook(
            keras.Model,
            "compute_loss",
            "Losses that do not decompose over samples get the whole batch.",
            _STEP,
            stage(whole_values.gather_first, STRATEGY),
            plain=True,
        ),
        hook(
            keras.losses.Loss,
            "__call__",
            "Means and sums over the batch include all ranks.",
            _STEP,
            *loss,
            plain=True,
        ),
        hook(
            tf.GradientTape,
            "gradient",
            "Gradients in Keras's steps are those of the whole batch.",
            "a hook of strategies around the gradients of a step",
            stage(steps.gradient, STRATEGY),
            plain=True,
        ),
        hook(
            tf.distribute.ReplicaContext,
            "all_reduce",
            "Sums over ranks in a model are distinguished from sums of "
            "gradients.",
            "none: an all-reduce does not say what it is for",
            stage(steps.tell_forward_sums, STRATEGY),
            plain=True,
        ),
    ]
    return rows


def _of_metrics() -> list[Hook]:
    metrics = keras.metrics
    update_metric = stage(whole_values.update_metric, STRATEGY)
    add_state = "add_variable" if KERAS_3 else "add_weight"
    return [
        hook(
            metrics.Mean,
            "update_state",
            "Numbers of the whole batch are counted once.",
            _STEP,
            update_metric,
            stage(steps.track_mean, STRATEGY),
            plain=True,
        ),
        hook(
            metrics.Sum,
            "update_state",
            "As `Mean`.",
            _STEP,
            update_metric,
            stage(steps.track_sum, STRATEGY),
            plain=True,
        ),
        hook(
            keras.losses.Loss,
            "__call__",
            "Losses of users' own classes get the whole batch.",
            _STEP,
            stage(whole_values.call_loss, STRATEGY),
            plain=True,
            subclasses=_is_no_container,
        ),
        hook(
            metrics.Metric,
            "update_state",
            "Metrics that do not decompose over samples get the whole batch.",
            _STEP,
            update_metric,
            plain=True,
            subclasses=_has_own_update,
        ),
        hook(
            metrics.Metric,
            add_state,
            "States of metrics that are equal on all ranks are not summed.",
            _STEP,
            stage(whole_values.add_state, STRATEGY),
        ),
    ]


def _norms() -> list[Hook]:
    rows = []
    for owner, name, call in (
        (tf.linalg, "global_norm", steps.global_norm),
        (tf, "clip_by_global_norm", steps.clip_by_global_norm),
        (tf, "clip_by_norm", steps.clip_by_norm),
    ):
        rows.append(
            hook(
                owner,
                name,
                "The norm of a table's gradient counts all shards once.",
                "norms of TensorFlow that support partitioned variables",
                stage(call, STRATEGY),
                plain=True,
            )
        )
    return rows


def _is_no_container(cls: type) -> bool:
    return not keras_internals.is_container(cls)


def _has_own_update(metric: type) -> bool:
    """Whether `update_state` of a class is not reached through another hook.

    `Mean` and `Sum` of tf_keras have that of a common base class.
    """
    inherited = keras.metrics.Mean.__mro__[1:]
    return _is_no_container(metric) and metric not in inherited


def _optimizers() -> list[Hook]:
    """Hooks of what builds optimizers, and of their averages of weights."""
    optimizer = keras.optimizers.Optimizer
    return [
        hook(
            optimizer,
            "build",
            "All ranks make slots at once, after their tables are placed.",
            _OPTIMIZER,
            stage(loops.build_on_all_ranks, RANKS),
            *([stage(_place_built, STRATEGY)] if KERAS_3 else []),
            stage(rounds.build, STRATEGY),
            stage(row_optimizer.refuse_norms_at_build, Need.MAX_NORM),
        ),
        hook(
            optimizer,
            names.UPDATE_AVERAGES,
            "The moving average of a table is over the rows of this rank.",
            _OPTIMIZER,
            stage(sharded_variable.read_parts, RANKS),
            *([stage(loops.average_of_rows, RANKS)] if KERAS_3 else []),
        ),
        *(_updates() if KERAS_3 else _updates_of_tf_keras()),
    ]


def _updates() -> list[Hook]:
    """Hooks of updates by optimizers of Keras 3."""
    scaled = keras.optimizers.LossScaleOptimizer
    apply = stage(supported.apply, STRATEGY)
    return [
        hook(
            keras.optimizers.Optimizer,
            "apply",
            _UPDATE,
            _OPTIMIZER,
            stage(rows_of_keys.end_steps, Need.VOCABULARY),
            apply,
            stage(rounds.apply, STRATEGY),
            stage(row_gradients.sum_repeated_rows, TABLES),
        ),
        hook(
            keras.optimizers.Optimizer,
            accumulation.APPLY,
            "Accumulated gradients are summed over the ranks once.",
            _OPTIMIZER,
            stage(accumulation.accumulate, STRATEGY),
        ),
        hook(scaled, "apply", _UPDATE, _OPTIMIZER, apply),
        hook(
            scaled,
            "check_finite",
            "A step is skipped on all ranks or on none.",
            _OPTIMIZER,
            stage(loops.finite_on_all_ranks, RANKS),
        ),
    ]


def _updates_of_tf_keras() -> list[Hook]:
    """Hooks of updates by optimizers of tf_keras."""
    end_steps = stage(rows_of_keys.end_steps, Need.VOCABULARY)
    apply = stage(supported.apply_gradients, STRATEGY)
    return [
        hook(
            keras.optimizers.Optimizer,
            "apply_gradients",
            _UPDATE,
            _OPTIMIZER,
            end_steps,
            apply,
            stage(rounds.apply_gradients, STRATEGY),
        ),
        hook(
            keras.optimizers.legacy.Optimizer,
            "apply_gradients",
            _UPDATE,
            _OPTIMIZER,
            stage(row_optimizer.refuse_norms_at_apply, Need.MAX_NORM),
            end_steps,
            apply,
        ),
    ]


def _variables() -> list[Hook]:
    rows = [
        hook(
            internals.MirroredVariable,
            internals.WRITE_IN_REPLICA,
            "State assigned in a step is computed from the whole batch.",
            "a hook of strategies around assignments in a step",
            stage(state.write, RANKS),
        )
    ]
    if KERAS_3:
        rows += [
            hook(
                keras.Variable,
                name,
                "Values that ranks add to a summed variable are added once.",
                "`assign_add` of Keras 3 that respects the aggregation",
                stage(state.change_sum, RANKS),
            )
            for name in ("assign_add", "assign_sub")
        ]
    variable = internals.DistributedVariable
    return rows + [
        hook(
            variable,
            name,
            "Python and numpy convert variables of a strategy.",
            "these methods of TensorFlow's distributed variables",
            stage(convert, Need.VARIABLES),
        )
        for name, convert in state.CONVERSIONS.items()
        if not hasattr(variable, name)
    ]


def _layers() -> list[Hook]:
    layer = keras.layers.BatchNormalization
    upstream = "synchronized moments of Keras that count samples"
    moments: StageFn = steps.keras_3_moments
    empty: list[Hook] = []
    if not KERAS_3:
        moments = steps.tf_keras_moments
        empty = [
            hook(
                layer,
                names.SKIPS_EMPTY,
                "A rank without samples counts zero samples.",
                upstream,
                stage(steps.skips_empty, RANKS),
            )
        ]
    return [
        hook(
            layer,
            names.MOMENTS,
            "Synchronized moments are those of the whole batch.",
            upstream,
            stage(moments, RANKS),
        ),
        *empty,
    ]


def table() -> list[Hook]:
    """All hooks, for the installed version of Keras.

    Must be called before the first attribute is replaced, because hooks
    contain the owners and originals at the time of the call.
    """
    return [*training_rows(), *files.rows()]
