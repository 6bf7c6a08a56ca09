# SPDX-License-Identifier: Apache-2.0
"""Keras's loops: start, comparison of settings, and building of models."""

from __future__ import annotations

import hashlib
import inspect
import json
import warnings
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext import keras_internals
from tfdist_ext import marks
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.comm import collectives as collectives_lib
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.comm.collectives import Loop
from tfdist_ext.comm.exchanges import sum_over_ranks
from tfdist_ext.strategy import refused
from tfdist_ext.type_names import Config
from tfdist_ext.type_names import Gradient
from tfdist_ext.type_names import Layer
from tfdist_ext.type_names import Model
from tfdist_ext.type_names import Nest
from tfdist_ext.type_names import Optimizer
from tfdist_ext.type_names import Original
from tfdist_ext.type_names import StageFunction
from tfdist_ext.type_names import T
from tfdist_ext.type_names import TensorLike
from tfdist_ext.type_names import Variable

keras = tf.keras

# Batch size of arrays if `fit` has no `batch_size`.
_BATCH_OF_KERAS = 32

Find = Callable[[Model], Sequence[Layer]]
Place = Callable[[Model, Collectives], None]


def place_first(find: Find, place: Place) -> StageFunction:
    """Creates a stage of Keras's loops that places the tables of a model.

    Args:
        find: returns the layers of a model that have tables, built or not.
        place: moves the tables of a model that can still be moved; all ranks
            call it.
    """

    def stage(
        original: Original[T], self: Model, *args: Any, **kwargs: Any
    ) -> T:
        collectives = getattr(self.distribute_strategy, "collectives", None)
        if collectives is None or collectives.loop is not None:
            return original(self, *args, **kwargs)
        layers = find(self)
        if not layers:
            return original(self, *args, **kwargs)
        given = inspect.signature(original).bind(self, *args, **kwargs)
        x, batch_size = map(given.arguments.get, ("x", "batch_size"))
        samples = samples_of(x, batch_size, collectives.group.world_size)
        collectives.loop = Loop(self, _largest(samples, collectives))
        try:
            with self.distribute_strategy.scope():
                if not all(layer.built for layer in layers):
                    _build(self, x, collectives)
                place(self, collectives)
            return original(self, *args, **kwargs)
        finally:
            collectives.loop = None

    return stage


def place_built(place: Place) -> StageFunction:
    """Creates a stage of `Optimizer.build` that places the tables of a model.

    All layers are built then, and no slots exist yet.
    """

    def stage(
        original: Original[T],
        self: tf.keras.optimizers.Optimizer,
        *args: Any,
        **kwargs: Any,
    ) -> T:
        collectives = collectives_lib.active()
        loop = collectives.loop if collectives else None
        if collectives is not None and loop is not None and not self.built:
            with tf.init_scope():
                place(loop.model, collectives)
        return original(self, *args, **kwargs)

    return stage


def samples_of(x: TensorLike, batch_size: int | None, world_size: int) -> int:
    """Number of samples of a rank in a step, or 0 if it is unknown.

    Args:
        x: data that is passed to `fit`: a dataset of global batches, a
            distributed dataset, arrays, or a generator (always unknown).
        batch_size: global batch size of arrays; None for Keras's default.
        world_size: number of ranks.
    """
    if marks.is_distributed(x):
        return marks.samples_of(x)
    if isinstance(x, tf.data.Dataset):
        return max(0, -(-internals.batch_size_of(x) // world_size))
    leaves = tf.nest.flatten(x)
    if x is None or not all(hasattr(leaf, "shape") for leaf in leaves):
        return 0
    rows = [int(leaf.shape[0]) for leaf in leaves if len(leaf.shape)]
    batch = min([batch_size or _BATCH_OF_KERAS, *rows])
    return -(-batch // world_size)


def _largest(samples: int, collectives: Collectives) -> int | None:
    """Largest number of samples that a rank knows; None if no rank does."""
    everyone = collectives.all_gather(
        tf.constant([samples], tf.int64), "samples of a step"
    )
    return int(np.max(everyone.numpy())) or None


def _build(model: Model, x: TensorLike, collectives: Collectives) -> None:
    """Builds a model of tf_keras in a graph that is never run.

    tf_keras builds layers while it traces the first step, and by then tables
    can no longer be moved. Keras 3 builds them before the first step.
    """
    inputs = _specs_of(x)
    if keras_internals.KERAS_3 or inputs is None:
        return
    strategy = model.distribute_strategy

    def call(values: Nest) -> Nest:
        # A `train_step` of the user may pass fewer inputs to the model.
        with keras_internals.forgetting_inputs(model):
            return model(values, training=False)

    # By this name layers detect a graph that is never run and is no step.
    def scratch_graph(values: Nest) -> Nest:
        return tf.distribute.Strategy.run(strategy, call, args=(values,))

    try:
        tf.function(scratch_graph, autograph=False).get_concrete_function(
            inputs
        )
    except Exception as error:
        # A model that needs more than its inputs is built by its first step,
        # whose error is more precise. All ranks do the same.
        collectives.give_up("building the model", error)


def _specs_of(x: TensorLike) -> Nest | None:
    """Specs of the inputs of a model; None if they are unknown."""
    if isinstance(x, tf.data.Dataset):
        spec = x.element_spec
        if isinstance(spec, tuple):
            spec = keras.utils.unpack_x_y_sample_weight(spec)[0]
        return tf.nest.map_structure(_of_any_batch, spec)
    leaves = tf.nest.flatten(x)
    if x is None or not all(hasattr(leaf, "shape") for leaf in leaves):
        return None
    specs = [_spec_of(leaf) for leaf in leaves]
    if None in specs:
        return None
    return tf.nest.pack_sequence_as(x, [_of_any_batch(each) for each in specs])


def _spec_of(value: TensorLike) -> tf.TypeSpec:
    """TensorFlow type of a value; does not read data from a file."""
    if isinstance(value, tf.Tensor | tf.__internal__.CompositeTensor):
        return tf.type_spec_from_value(value)
    try:
        return tf.TensorSpec(value.shape, value.dtype)
    except (AttributeError, TypeError):  # For example a pandas DataFrame.
        return None


def _of_any_batch(spec: tf.TypeSpec) -> tf.TypeSpec:
    if isinstance(spec, tf.TensorSpec) and spec.shape.rank:
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)
    return spec


_BATCHES = ("train_on_batch", "test_on_batch", "predict_on_batch")


def on_all_ranks(
    original: Original[T], model: Model, *args: Any, **kwargs: Any
) -> T:
    collectives = collectives_of(model)
    if collectives is None:
        return original(model, *args, **kwargs)
    name = original.__name__
    if name in ("fit", "train_on_batch"):
        _warn_of_eager_steps(model)
    # If a loop fails on one rank, it ends on all ranks. The functions of one
    # batch are too short for that.
    loop = name in keras_internals.LOOPS
    with collectives.joint_call(name, end_barrier=loop, own_error_first=True):
        return original(model, *args, **kwargs)


def _warn_of_eager_steps(model: Model) -> None:
    """Warns that a step without a graph cannot tell sums from means."""
    own = type(model).train_step is not keras.Model.train_step
    if own and model.run_eagerly:
        warnings.warn(
            "With run_eagerly=True a sum over the samples cannot be told from "
            "a mean. A loss that `train_step` sums by hand would train with "
            "gradients that are too small: use means (tf.reduce_mean, a loss "
            "of Keras), or leave run_eagerly off.",
            stacklevel=4,
        )


def build_on_all_ranks(
    original: Original[T], optimizer: Optimizer, *args: Any, **kwargs: Any
) -> T:
    """Waits until all ranks are about to build an optimizer.

    Keras marks the optimizer as built before it has created the slots. If
    another rank failed before, this rank's slots would never be created.
    """
    collectives = collectives_lib.active()
    if collectives is not None and not keras_internals.is_built(optimizer):
        with tf.init_scope():
            collectives.barrier("optimizer/build")
    return original(optimizer, *args, **kwargs)


def finite_on_all_ranks(
    original: Original[T], optimizer: Optimizer, grads: Sequence[Gradient]
) -> T:
    """Lets ranks agree whether Keras 3's loss scale skips a step.

    Keras checks the gradients before they are summed, so they may be
    infinite on one rank only.
    """
    finite = original(optimizer, grads)
    return sum_over_ranks(
        tf.cast(tf.logical_not(finite), tf.float32), "gradients/finite"
    ) == tf.constant(0.0)


def average_of_rows(
    original: Original[None],
    optimizer: tf.keras.optimizers.Optimizer,
    variables: Sequence[Variable],
) -> None:
    """Lets Keras 3 average weights although this rank has no rows of a table.

    Keras's `ops.add` treats a tensor without rows as a bias, and fails.
    """
    if not optimizer.use_ema or collectives_lib.active() is None:
        return original(optimizer, variables)
    averages = keras_internals.averages_of(optimizer)
    pairs = zip(variables, averages, strict=True)
    kept = [pair for pair in pairs if 0 not in pair[0].shape]
    state = keras_internals.averages_state(
        optimizer, [average for _, average in kept]
    )
    # A shard may not be read where the entire table is expected, so its
    # values are read here.
    read = [keras_internals.value_of(v).read_value() for v, _ in kept]
    return original(state, read)


def collectives_of(model: Model) -> Collectives | None:
    """Collectives of the strategy of a model; None with a single process."""
    return getattr(model.distribute_strategy, "collectives", None)


_DATA = ("x", "y", "sample_weight", "validation_data")
# Arguments that may differ between ranks, or that Keras's validation passes.
_OWN = (
    "self",
    "verbose",
    "callbacks",
    "return_dict",
    "max_queue_size",
    "workers",
    "use_multiprocessing",
    "kwargs",
)
_Policy = tf.data.experimental.AutoShardPolicy


def compare_settings(
    original: Original[T], model: Model, *args: Any, **kwargs: Any
) -> T:
    name, strategy = original.__name__, model.distribute_strategy
    collectives = getattr(strategy, "collectives", None)
    if collectives is not None and not kwargs.get(keras_internals.WITHIN_FIT):
        bound = inspect.signature(original).bind(model, *args, **kwargs)
        bound.apply_defaults()
        refused.check_recurrent(model, collectives.group.world_size)
        if name == "fit":
            refused.check_optimizer(getattr(model, "optimizer", None))
            refused.check_callbacks(bound.arguments["callbacks"])
        settings = settings_of(model, bound.arguments)
        if name == "fit":
            settings.update(vocabularies_of(model))
        settings["check"] = collectives.check
        compare_texts(collectives, {"method": name, **settings})
    try:
        return original(model, *args, **kwargs)
    except (UnboundLocalError, StopIteration) as error:
        # Keras 3's `predict`, and tf_keras with a generator, raise these
        # errors if there is no batch.
        ours = hasattr(strategy, "collectives")
        if not ours or (str(error) and "batch_outputs" not in str(error)):
            raise
        raise ValueError(
            f"`{name}` got no batch: its data is empty."
        ) from error


def compare_texts(
    collectives: Collectives, settings: Mapping[str, str]
) -> None:
    """Raises on all ranks if their settings are not equal.

    Args:
        collectives: collectives of the strategy.
        settings: text of each setting by its name.

    Raises:
        ValueError: the error names the settings that differ, with the value
            of every rank.
    """
    own = np.frombuffer(json.dumps(settings).encode() + b"\0", np.uint8)
    gathered = collectives.all_gather(tf.constant(own), "settings")
    texts = gathered.numpy().tobytes().split(b"\0")[:-1]
    if len(set(texts)) == 1:
        return
    ranks = [json.loads(text) for text in texts]
    names = dict.fromkeys(name for each in ranks for name in each)
    lines = [
        f"  {name}: "
        + ", ".join(
            f"{each.get(name, 'none')} (rank {rank})"
            for rank, each in enumerate(ranks)
        )
        for name in names
        if len({each.get(name) for each in ranks}) > 1
    ]
    raise ValueError(
        f"The ranks call `{settings['method']}` with different settings:\n"
        + "\n".join(lines[:20])
        + "\nAll ranks train one model: give them the same settings."
    )


def settings_of(
    model: Model, arguments: Mapping[str, object]
) -> dict[str, str]:
    """Text of each setting that must be equal on all ranks, by its name.

    Args:
        model: model whose method is called.
        arguments: arguments of the method by their names.
    """
    compiled = {
        **keras_internals.compile_config(model),
        "optimizer": getattr(model, "optimizer", None),
    }
    found: dict[str, str] = {}
    for name, value in {**arguments, **compiled}.items():
        if name in _DATA:
            found[name] = _describe_data(value)
        elif name not in _OWN:
            found.update(_flat(name, value))
    if model.built:
        found["trainable variables"] = str(len(model.trainable_variables))
    return found


def vocabularies_of(model: Model) -> dict[str, str]:
    """Texts of the vocabularies of a model's preprocessing layers.

    A vocabulary that was made from a set has another order on every rank.

    Args:
        model: model that may have such layers at any depth.
    """
    found = {}
    for layer in keras_internals.layers_of(model):
        if hasattr(layer, "get_vocabulary"):
            entries = [str(entry) for entry in layer.get_vocabulary()]
            digest = _digest("\0".join(entries).encode())
            found[f"vocabulary of {layer.name}"] = f"{len(entries)} {digest}"
    return found


def _digest(data: bytes) -> str:
    return "#" + hashlib.blake2b(data, digest_size=4).hexdigest()


def _describe_data(value: object) -> str:
    if isinstance(value, tf.data.Dataset):
        return _describe_dataset(value)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        dtype = getattr(value.dtype, "name", value.dtype)
        return f"{dtype}{list(value.shape)}"
    if isinstance(value, dict):
        items = (f"{k}: {_describe_data(v)}" for k, v in value.items())
        return f"({', '.join(items)})"
    if isinstance(value, tuple | list) and not is_numbers(value):
        return f"({', '.join(map(_describe_data, value))})"
    size = f" of {len(value)}" if hasattr(value, "__len__") else ""
    return f"{type(value).__name__}{size}"


def _describe_dataset(dataset: tf.data.Dataset) -> str:
    policy = dataset.options().experimental_distribute.auto_shard_policy
    own = marks.is_distributed(dataset)
    if own or policy in (_Policy.FILE, _Policy.OFF):
        return "a dataset of the rank's own"
    return str(dataset.element_spec)


def is_numbers(value: Sequence[object]) -> bool:
    """Whether a list is data, rather than a list of inputs."""
    return all(isinstance(v, bool | int | float | str | list) for v in value)


def _flat(name: str, value: object) -> Iterator[tuple[str, str]]:
    """Names and texts of a setting and of its components."""
    if isinstance(value, tf.Variable) or tf.is_tensor(value):
        value = np.asarray(value)
    if isinstance(value, np.ndarray | np.generic) and np.ndim(value) == 0:
        value = value.item()
    if hasattr(value, "get_config") and not inspect.isclass(value):
        yield name, type(value).__name__
        value = _config_of(value)
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _flat(f"{name}.{key}", part)
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from _flat(f"{name}[{index}]", part)
    elif value is None or isinstance(value, bool | int | float | str):
        yield name, repr(value)
    elif isinstance(value, np.ndarray):
        yield (
            name,
            f"{value.dtype}{list(value.shape)} {_digest(value.tobytes())}",
        )
    else:
        yield name, getattr(value, "__qualname__", type(value).__name__)


def _config_of(value: Any) -> Config:
    try:
        config = value.get_config()
    except Exception:  # A class of the user may not implement it.
        return {}
    # Keras numbers names by the objects that a rank has created.
    return {key: part for key, part in config.items() if key != "name"}
