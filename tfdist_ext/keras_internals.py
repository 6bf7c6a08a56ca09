# SPDX-License-Identifier: Apache-2.0
"""Private parts of Keras that this package uses, in Keras 3 and tf_keras."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import types
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext.type_names import EpochIterator
from tfdist_ext.type_names import Layer
from tfdist_ext.type_names import Metric
from tfdist_ext.type_names import Model
from tfdist_ext.type_names import Nest
from tfdist_ext.type_names import Optimizer
from tfdist_ext.type_names import Original
from tfdist_ext.type_names import T
from tfdist_ext.type_names import TensorLike
from tfdist_ext.type_names import Variable

keras = tf.keras

# tf_keras has no __version__ in tf.keras; `ops` exists since Keras 3.
KERAS_3 = hasattr(keras, "ops")

_MODULES = ("keras.", "tf_keras.")
# Modules between an assignment of a variable and the code that assigns it.
_ASSIGNING = (
    "tensorflow.",
    "tfdist_ext.",
    "keras.src.backend.",
    "keras.src.utils.",
    "tf_keras.src.backend",
    "contextlib",
    "functools",
)

# Methods that this package replaces; their classes are in the comments.
LOOPS = ("fit", "evaluate", "predict")  # Model
BUILD_BY_SHAPES = "_maybe_symbolic_build"  # Model, Keras 3
UPDATE_AVERAGES = "_update_model_variables_moving_average"  # Optimizer
MOMENTS = "_moments"  # BatchNormalization
SKIPS_EMPTY = "_support_zero_size_input"  # BatchNormalization, tf_keras
LOG_WEIGHTS = "_log_weights"  # TensorBoard
WRITE_BACKUP = "_save_model"  # BackupAndRestore, Keras 3
SHOULD_WRITE_MODEL = "_should_save_model"  # ModelCheckpoint, Keras 3
WRITE_ORBAX = "_save_checkpoint"  # OrbaxCheckpoint, Keras 3

# Argument of `evaluate` that is set if `fit` calls it.
WITHIN_FIT = "_use_cached_eval_dataset"


def array_adapter() -> type:
    """The class with which Keras 3 creates datasets of arrays."""
    from keras.src.trainers.data_adapters import array_data_adapter

    return array_data_adapter.ArrayDataAdapter


def concatenation() -> tuple[Any, str]:
    """Function that concatenates predictions of ranks: its module and name."""
    return inspect.getmodule(inspect.unwrap(_trainer())), "_multi_worker_concat"


def _trainer() -> Callable[..., object]:
    """A method that is defined in the module of Keras's loops."""
    method: Callable[..., object] = keras.Model.make_predict_function
    return method


def converted(function: Callable[..., T]) -> Callable[..., T]:
    """Converts a user's function by AutoGraph if the current code is converted.

    This applies to layers of tf_keras. Keras 3 converts nothing.
    """
    if KERAS_3:
        return function
    autograph = tf.__internal__.autograph
    return autograph.tf_convert(function, autograph.control_status_ctx())


def value_of(variable: object) -> tf.Variable:
    """TensorFlow's variable of a Keras 3 variable; other objects unchanged.

    None for a variable that Keras 3 has not created yet. Keras's own `value`
    would be rounded in mixed precision.
    """
    if isinstance(variable, tf.Variable):
        return variable  # `getattr` would read a mirrored variable.
    return getattr(variable, "_value", variable)


def when_made(
    variable: tf.keras.Variable,
    scope: Callable[[], contextlib.AbstractContextManager[object]],
    then: Callable[[], None],
) -> None:
    """Calls `then` once a variable is created, which is now or later.

    Keras 3 builds some models in a scope where no variable may be created,
    and creates the variables afterwards.

    Args:
        variable: result of `add_weight`.
        scope: scope for the creation of the variable, if that is later.
        then: function to call after the creation.
    """
    if value_of(variable) is not None:
        return then()
    make = variable._deferred_initialize

    def make_in_scope() -> None:
        with scope():
            make()
        then()

    variable._deferred_initialize = make_in_scope
    return None


def is_symbolic_build() -> bool:
    """Whether Keras 3 is building a model in a graph that is never run.

    It does so under a strategy, with dense placeholders even for sparse
    inputs.
    """
    return _name_of_graph().startswith("scratch_graph")


def is_shape_inference() -> bool:
    """Whether tf_keras is inferring shapes in a graph that is never run."""
    name = _name_of_graph()
    return name.endswith("_scratch_graph") or name == "build_graph"


def _name_of_graph() -> str:
    """Name of the graph that is traced, or of the graph around its branches.

    A `tf.function` that is called in the graph has a name of its own, because
    it is stored and run.
    """
    graph: Any = tf.compat.v1.get_default_graph()
    function = tf.__internal__.FuncGraph
    while isinstance(graph, function) and type(graph) is not function:
        graph = graph.outer_graph
    return str(getattr(graph, "name", ""))


def layers_of(model: Model) -> list[tf.keras.layers.Layer]:
    """The model and all layers in it, at any depth."""
    return list(model._flatten_layers())


def inner_layers(layer: tf.keras.layers.Layer) -> list[Layer]:
    """Layers directly inside of a layer."""
    return list(layer._flatten_layers(recursive=False, include_self=False))


def is_built(optimizer: Optimizer) -> bool:
    """Whether an optimizer has its slots, or is about to create them."""
    built = getattr(optimizer, "_built", False)
    return bool(getattr(optimizer, "built", built))


def trained_by(optimizer: Optimizer) -> Sequence[Variable]:
    """Variables that an optimizer of Keras 3 was built for."""
    return list(getattr(optimizer, "_trainable_variables", ()))


def compile_config(model: Model) -> dict[str, Any]:
    """Arguments of a model's `compile`, by their names."""
    config = getattr(model, "_compile_config", None)
    return getattr(config, "config", {})


def dataset_of(iterator: EpochIterator) -> tf.data.Dataset:
    """Dataset of Keras 3's `TFEpochIterator` or tf_keras's `DataHandler`."""
    if KERAS_3:
        return iterator._distributed_dataset
    return iterator._dataset


def batch_loop() -> tuple[type, str]:
    """Method that iterates over the batches of a loop: its owner and name."""
    module: Any = inspect.getmodule(inspect.unwrap(_trainer()))
    if KERAS_3:
        return module.TFEpochIterator, "__next__"
    return module.data_adapter.DataHandler, "steps"


def without_calls(
    original: Original[Any], loop: Any, skips: Callable[[int, int], bool] | None
) -> Any:
    """Result of the method of `batch_loop`, without some of the calls.

    Args:
        original: the method.
        loop: the object whose method is called.
        skips: function of the first and the last batch of a call of the train
            function; returns whether the call is skipped. None skips none.
    """
    if KERAS_3:
        found = original(loop)
        while skips is not None and skips(found[0], found[1]):
            found = original(loop)
        return found
    if skips is None:
        return original(loop)
    return (
        first
        for first in original(loop)
        if not skips(first, first + loop.step_increment)
    )


def first_batches(iterator: EpochIterator) -> list[Nest] | None:
    """Batches of a generator that Keras 3 has read; None for other data.

    Keras 3 reads two batches to inspect them, and yields them again.
    """
    return getattr(iterator.data_adapter, "_first_batches", None)


@contextlib.contextmanager
def means_allowed(loss: tf.keras.losses.Loss, allowed: bool) -> Iterator[None]:
    """Lets a loss of tf_keras be a mean over the batch under a strategy."""
    own = vars(loss).get("_allow_sum_over_batch_size", False)
    loss._allow_sum_over_batch_size = own or allowed
    try:
        yield
    finally:
        loss._allow_sum_over_batch_size = own


def symbolic(shape: Sequence[int | None], dtype: str, ragged: bool) -> Any:
    """Symbolic result of a layer in Keras 3; old versions have no `ragged`."""
    options = {"ragged": True} if ragged else {}
    return keras.KerasTensor(shape, dtype=dtype, **options)


def mask_of(value: TensorLike) -> tf.Tensor | None:
    """Keras's mask of the elements that count in a loss; None for all."""
    return getattr(value, "_keras_mask", None)


@contextlib.contextmanager
def mask_or(value: TensorLike, everything: tf.Tensor) -> Iterator[None]:
    """Includes all elements of a result in a loss where `everything` is True.

    Args:
        value: result whose mask is extended, if it has one.
        everything: bool scalar.
    """
    mask = mask_of(value)
    if mask is None:
        yield
        return
    value._keras_mask = tf.cast(mask, tf.bool) | everything
    try:
        yield
    finally:
        value._keras_mask = mask


@contextlib.contextmanager
def forgetting_inputs(model: Model) -> Iterator[None]:
    """Restores the recorded inputs of a tf_keras model after a call.

    tf_keras records the inputs of the first call only.
    """
    names = ("_saved_model_inputs_spec", "_saved_model_arg_spec")
    before = {name: getattr(model, name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(model, name, value)


def writing_module() -> str:
    """Name of the module that assigns a variable.

    Frames of TensorFlow, and of Keras's variables, are skipped.
    """
    frame = inspect.currentframe()
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if not name.startswith(_ASSIGNING):
            return name
        frame = frame.f_back
    return ""


def is_of_keras(module: str) -> bool:
    """Whether a module belongs to Keras."""
    return module.startswith(_MODULES)


def writes_alone(module: str) -> bool:
    """Whether values that a module assigns must not be reduced over ranks.

    Optimizers count steps and scale losses, and random generators count drawn
    numbers; these values are equal on all ranks. States of a recurrent layer
    belong to this rank's samples. The retrieval layers of
    tensorflow_recommenders number the candidates, which are not a batch.

    Args:
        module: result of `writing_module`.
    """
    if module == "tensorflow_recommenders.layers.factorized_top_k":
        return True
    parts = ("optimizers", "random", "layers.rnn", "mixed_precision")
    start = module.partition(".")[0]
    names = tuple(f"{start}.src.{part}" for part in parts)
    return is_of_keras(module) and module.startswith(names)


def averages_of(optimizer: Any) -> Sequence[Variable]:
    """Moving averages of an optimizer, one for each of its variables."""
    return optimizer._model_variables_moving_average


def averages_state(optimizer: Any, averages: Sequence[Variable]) -> Any:
    """Argument of `UPDATE_AVERAGES` for an optimizer with other averages."""
    return types.SimpleNamespace(
        use_ema=True,
        ema_momentum=optimizer.ema_momentum,
        iterations=optimizer.iterations,
        _model_variables_moving_average=averages,
    )


@dataclasses.dataclass(frozen=True)
class Backup:
    """Files and progress of Keras 3's `BackupAndRestore`.

    Attributes:
        weights: path of the weights.
        progress: path of the file of `training`.
        weights_before: path of the previous weights.
        progress_before: path of the previous progress.
        training: the epoch and the batch, as Keras writes them.
    """

    weights: str
    progress: str
    weights_before: str
    progress_before: str
    training: dict[str, Any]

    @classmethod
    def of(cls, callback: tf.keras.callbacks.Callback) -> Backup:
        """Current state of a callback."""
        training = {
            "epoch": callback._current_epoch,
            "batch": callback._last_batch_seen,
        }
        return cls(
            callback._weights_path,
            callback._training_metadata_path,
            callback._prev_weights_path,
            callback._prev_training_metadata_path,
            training,
        )


def read_backup(callback: tf.keras.callbacks.Callback) -> None:
    """Loads weights and progress into the model."""
    callback._load_model()


def set_initial_epoch(model: Model, epoch: int) -> None:
    """Sets the epoch from which `fit` continues."""
    model._initial_epoch = epoch


def start_at_epoch(model: Model, epoch: int | None) -> None:
    """Sets the first epoch of `fit`, in `on_train_begin`; None for default."""
    if KERAS_3:
        model._initial_epoch = epoch
        return
    state = None
    if epoch is not None:
        state = types.SimpleNamespace(
            maybe_load_initial_counters_from_ckpt=lambda *_, **__: (epoch, 0)
        )
    model._training_state = state


@contextlib.contextmanager
def same_seeds(layers: Sequence[Layer]) -> Iterator[None]:
    """Restores the seeds of layers of tf_keras after a trace.

    Each trace increments the seeds.

    Args:
        layers: layers that may draw random numbers.
    """
    generators = [getattr(each, "_random_generator", None) for each in layers]
    found: list[Any] = [each for each in generators if hasattr(each, "_seed")]
    seeds = [each._seed for each in found]
    try:
        yield
    finally:
        for generator, seed in zip(found, seeds, strict=True):
            generator._seed = seed


def steps_of_call(model: Model) -> int:
    """Number of batches that one call of a model's train function reads."""
    if KERAS_3:
        return int(model.steps_per_execution)
    steps = model._steps_per_execution
    return 1 if steps is None else int(steps.numpy())


def keep_metrics(model: Model, kept: bool) -> None:
    """Sets whether the metrics of a model are not reset before an epoch."""
    if kept:
        model.reset_metrics = lambda: None
    elif "reset_metrics" in vars(model):
        del model.reset_metrics


def untracked_variables(model: Model) -> list[Variable]:
    """Variables of a built model that TensorFlow's checkpoints omit.

    In Keras 3 these are metrics and the states of random generators. tf_keras
    creates metrics only in the first step.
    """
    if not KERAS_3:
        return []
    seeds = [v for v in model.variables if "seed_generator_state" in v.path]
    known = {id(v): value_of(v) for v in [*seeds, *model.metrics_variables]}
    return list(known.values())


class SavingModules:
    """Modules that implement Keras's public functions to save and load.

    Attributes:
        asking: module of `input`, with which Keras asks whether to overwrite.
        files: module of .keras and .weights.h5 files.
        hdf5: module of the legacy format in one file.
        folders: module of tf_keras's legacy formats; None in Keras 3.
    """

    def __init__(self) -> None:
        modules = inspect.unwrap(keras.models.save_model).__globals__
        self.asking = modules["io_utils"]
        self.files = modules["saving_lib"]
        self.folders = None
        if KERAS_3:
            self.hdf5 = modules["legacy_h5_format"]
        else:
            self.folders = modules["legacy_sm_saving_lib"]
            self.hdf5 = self.folders.hdf5_format


def function_arguments(wrapper: object) -> dict[str, Any]:
    """Arguments that a loss or a metric passes to its wrapped function."""
    return getattr(wrapper, "_fn_kwargs", {})


def metric_function(metric: Metric) -> Callable[..., tf.Tensor]:
    """Function of a `MeanMetricWrapper`."""
    return metric._fn


def strategy_of(optimizer: Optimizer) -> tf.distribute.Strategy | None:
    """Strategy in whose scope an optimizer was created; None if unknown."""
    return getattr(optimizer, "_distribution_strategy", None)


def remake_states(
    metric: Metric,
    states: Sequence[tf.Variable],
    prepare: Callable[[Variable], object] = lambda variable: None,
) -> list[Variable]:
    """Creates variables of a metric again, in the current scope.

    Args:
        metric: metric of Keras 3 or tf_keras.
        states: variables of the metric; new ones get their values.
        prepare: called with TensorFlow's new variable before it gets its
            value.

    Returns:
        Variables that cannot be replaced.
    """
    if not KERAS_3:
        return _replace_states(metric, states, prepare)
    for state in states:
        value = state.numpy()
        state._initialize(value)
        prepare(value_of(state))
        state.assign(value)  # A summed variable gets a part on each rank.
    return []


def _replace_states(
    metric: Metric, states: Sequence[Any], prepare: Callable[[Any], object]
) -> list[Variable]:
    """`remake_states` for tf_keras, which replaces attributes of the metric."""
    left = {id(state): state for state in states}
    for holder in (metric, *metric._metrics):
        # It was bound at construction, perhaps before it was replaced.
        vars(holder).pop("update_state", None)
        for name, value in list(vars(holder).items()):
            if id(value) not in left:
                continue
            state = tf.Variable(
                value.numpy(),
                trainable=False,
                name=value.name.split(":")[0],
                dtype=value.dtype,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )
            prepare(state)
            state.assign(value.numpy())
            setattr(holder, name, state)
            del left[id(value)]
    return list(left.values())


def is_keras_class(kind: type) -> bool:
    """Whether a class belongs to Keras 3 or tf_keras."""
    return kind.__module__.split(".")[0] in ("keras", "tf_keras")


def is_container(value: object) -> bool:
    """Whether a loss or a metric is the container that `compile` creates."""
    kind = value if isinstance(value, type) else type(value)
    return is_keras_class(kind) and kind.__module__.endswith("compile_utils")


def set_mask(value: TensorLike, mask: tf.Tensor) -> None:
    """Sets the mask of a result, see `mask_of`."""
    value._keras_mask = mask


def compiled_losses(
    model: Model, y: Any, y_pred: Nest
) -> list[tuple[tf.keras.losses.Loss, Nest, Nest]]:
    """The losses of `compile`, with the labels and predictions of each.

    Args:
        model: model of Keras 3 or tf_keras.
        y: labels of the outputs.
        y_pred: the outputs.

    Returns:
        Triples; empty if they are unknown before the losses are called.
    """
    if KERAS_3:
        losses = getattr(model, "_compile_loss", None)
        found = getattr(losses, "_flat_losses", None) or []
        try:
            return [
                (each.loss, _at(each.path, y), _at(each.path, y_pred))
                for each in found
            ]
        except (KeyError, IndexError, TypeError):
            return []
    losses = getattr(model, "compiled_loss", None)
    if losses is None or y is None:
        return []
    labels = tf.nest.flatten(losses._conform_to_outputs(y_pred, y))
    if not losses.built:
        losses.build(y_pred)
    flat = tf.nest.flatten(y_pred)
    if not len(losses._losses) == len(labels) == len(flat):
        return []
    triples = zip(losses._losses, labels, flat, strict=True)
    return [
        (loss, y, predicted)
        for loss, y, predicted in triples
        if loss is not None and y is not None
    ]


def _at(path: Sequence[str | int], value: Any) -> Any:
    for part in path:
        value = value[part]
    return value
