# SPDX-License-Identifier: Apache-2.0
"""Work before the first step: scopes, order of arrays, building of models."""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist_ext import keras_internals
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext import thread_context
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.comm.exchanges import text_of_first_rank
from tfdist_ext.optimizers.supported import parts_of
from tfdist_ext.strategy import decomposing
from tfdist_ext.strategy import whole_values
from tfdist_ext.strategy.loops import samples_of
from tfdist_ext.thread_context import current
from tfdist_ext.type_names import EpochIterator
from tfdist_ext.type_names import Metric
from tfdist_ext.type_names import Model
from tfdist_ext.type_names import Nest
from tfdist_ext.type_names import Optimizer
from tfdist_ext.type_names import Original
from tfdist_ext.type_names import Strategy
from tfdist_ext.type_names import T
from tfdist_ext.type_names import TensorLike
from tfdist_ext.type_names import Variable

keras = tf.keras


def lengths_in_loop(
    original: Original[T], model: Model, *args: Any, **kwargs: Any
) -> T:
    strategy = model.distribute_strategy
    several = getattr(strategy, "collectives", None) is not None
    with thread_context.setting(in_loop_of_ranks=several):
        return original(model, *args, **kwargs)


def keep_lengths(
    original: Original[tf.data.Dataset], adapter: Any
) -> tf.data.Dataset:
    dataset = original(adapter)
    batches = adapter.num_batches
    if not current.in_loop_of_ranks or batches is None:
        return dataset
    return dataset.apply(tf.data.experimental.assert_cardinality(batches))


def shuffle_equally(
    original: Original[T], model: Model, *args: Any, **kwargs: Any
) -> T:
    collectives = getattr(model.distribute_strategy, "collectives", None)
    if collectives is None:
        return original(model, *args, **kwargs)
    given = inspect.signature(original).bind(model, *args, **kwargs).arguments
    if not given.get("shuffle", True) or not _is_of_arrays(given.get("x")):
        return original(model, *args, **kwargs)
    with _order_of_first_rank(collectives):
        return original(model, *args, **kwargs)


def _is_of_arrays(x: TensorLike) -> bool:
    if x is None or isinstance(x, tf.data.Dataset):
        return False
    leaves = tf.nest.flatten(x)
    return all(hasattr(leaf, "shape") for leaf in leaves)


@contextlib.contextmanager
def _order_of_first_rank(collectives: Collectives) -> Iterator[None]:
    """Uses TensorFlow's random state of rank 0; all ranks must call this."""
    own = internals.random_state()
    text = text_of_first_rank(json.dumps(own), collectives, "order of arrays")
    if collectives.group.rank == 0:
        yield
        return
    internals.set_random_state(json.loads(text))
    try:
        yield
    finally:
        internals.set_random_state(own)


_BATCHES = ("train_on_batch", "test_on_batch")
_TRAINING = ("fit", "train_on_batch")


def in_scope(
    original: Original[T], model: Model, *args: Any, **kwargs: Any
) -> T:
    strategy = model.distribute_strategy
    if hasattr(strategy, "collectives"):
        if original.__name__ in _TRAINING:
            for optimizer in _optimizers_of(model):
                _check_optimizer(model, optimizer)
        if strategy.collectives is not None:
            for metric in metrics_of(model):
                move_metric(metric, strategy)
            given = inspect.signature(original).bind(model, *args, **kwargs)
            x, batch_size = map(given.arguments.get, ("x", "batch_size"))
            whole_values.expect(samples_of(x, batch_size, strategy.world_size))
    return original(model, *args, **kwargs)


def _optimizers_of(model: Model) -> list[Optimizer]:
    """Optimizers of `compile`, and others of the model, such as of a GAN."""
    found = [
        each
        for each in vars(model).values()
        if isinstance(each, keras.optimizers.Optimizer)
    ]
    return found + [part for each in found for part in parts_of(each)]


def _check_optimizer(model: Model, optimizer: Optimizer) -> None:
    strategy = model.distribute_strategy
    made_in = keras_internals.strategy_of(optimizer)
    if made_in is None or made_in is strategy:
        return
    raise ValueError(
        f"Optimizer {optimizer.name!r} ({type(optimizer).__name__}) was "
        f"created outside of strategy.scope(), and model {model.name!r} "
        "inside of it. Create both in it, and call `compile`, which creates "
        "an optimizer that is given by its name, in it as well: "
        "`with strategy.scope(): model.compile(optimizer=..., ...)`."
    )


def metrics_of(model: Model) -> Iterator[Metric]:
    """All metrics of a model and its layers; some are yielded twice."""
    compiled = keras_internals.compile_config(model)
    given = [compiled.get(key) for key in ("metrics", "weighted_metrics")]
    yield from _metrics_in(given)
    yield from _metrics_in(list(model.metrics))
    for layer in keras_internals.layers_of(model):
        yield from _metrics_in(list(vars(layer).values()))


def _metrics_in(value: object) -> Iterator[Metric]:
    if isinstance(value, keras.metrics.Metric):
        yield value
    elif isinstance(value, dict):
        yield from _metrics_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _metrics_in(each)


def move_metric(metric: Metric, strategy: Strategy) -> None:
    """Creates a metric's states again in the scope of a strategy.

    Args:
        metric: metric whose states may have been created outside of the
            scope.
        strategy: strategy in whose scope the states must be.

    Raises:
        ValueError: states cannot be created again.
    """
    outside = [
        variable
        for variable in metric.variables
        if _is_outside(keras_internals.value_of(variable), strategy)
    ]
    if not outside:
        return

    def prepare(variable: Variable) -> None:
        if not decomposing.is_metric_class_local(type(metric)):
            internals.read_from_first(variable)

    with strategy.scope():
        left = keras_internals.remake_states(metric, outside, prepare)
    if left:
        names = ", ".join(variable.name for variable in left)
        raise ValueError(
            f"Metric {metric.name!r} ({type(metric).__name__}) was created "
            "outside of strategy.scope(), and its states cannot be moved into "
            f"it: {names}. Create it inside of `with strategy.scope():`."
        )


def _is_outside(variable: Variable, strategy: Strategy) -> bool:
    if variable is None:  # It will be created later, in the scope.
        return False
    return not strategy.extended.variable_created_in_scope(variable)


def build(
    original: Original[None],
    model: Model,
    iterator: EpochIterator | None = None,
    data_batch: Nest = None,
) -> None:
    strategy = model.distribute_strategy
    if not hasattr(strategy, "collectives"):
        return original(model, iterator=iterator, data_batch=data_batch)
    unbuilt = not _has_built_optimizer(model)
    try:
        if iterator is None:
            return original(model, data_batch=data_batch)
        return _build_unread(original, model, iterator)
    except Exception as error:
        half_built = unbuilt and _has_built_optimizer(model)
        if half_built or not _is_built_for_own_steps(model):
            raise
        if strategy.collectives is not None:
            strategy.collectives.give_up("building the model", error)
    # Without a strategy, Keras does not call a model before its own step
    # does. That step may call something else.
    with strategy.scope():
        if model.optimizer is not None and not _has_built_optimizer(model):
            model.optimizer.build(model.trainable_variables)
    return None


def _is_built_for_own_steps(model: Model) -> bool:
    """Whether all layers of a model with its own steps are built."""
    kind = type(model)
    own = (
        kind.train_step is not keras.Model.train_step
        or kind.test_step is not keras.Model.test_step
    )
    layers = keras_internals.layers_of(model)
    return own and all(each.built for each in layers if each is not model)


def _build_unread(
    original: Original[None], model: Model, iterator: EpochIterator
) -> None:
    shapes = _shapes_of(iterator)
    if shapes is None:
        return original(model, iterator=iterator)
    collectives = model.distribute_strategy.collectives
    unbuilt = not _has_built_optimizer(model)
    built = _built_layers(model)
    try:
        original(model, data_batch=shapes)
        if collectives is not None:
            collectives.barrier("model built")
        return None
    except Exception as error:
        if _built_layers(model) > built:
            # A tf.function cannot use a table that was created while it was
            # traced. A second trace can use it.
            return _build_unread(original, model, iterator)
        no_other_way = keras_internals.first_batches(iterator) is not None
        # An optimizer whose build failed half-way is not built again.
        no_other_way |= unbuilt and _has_built_optimizer(model)
        if no_other_way:
            raise
        # Reading is an exchange: either all ranks read, or none.
        if collectives is not None:
            collectives.give_up("building the model", error)
    # The specs of a dataset do not contain the batch size, which code for
    # eager execution may need. The data does, or the error is the same.
    return original(model, iterator=iterator)


def _has_built_optimizer(model: Model) -> bool:
    return bool(getattr(getattr(model, "optimizer", None), "built", False))


def _built_layers(model: Model) -> int:
    return sum(layer.built for layer in keras_internals.layers_of(model))


def _shapes_of(iterator: EpochIterator) -> Nest | None:
    """A batch of `tf.TensorSpec`; None if shapes are known only from data.

    Args:
        iterator: `TFEpochIterator` of Keras.
    """
    element = keras_internals.dataset_of(iterator).element_spec
    flat = [_dense(spec) for spec in tf.nest.flatten(element)]
    first = keras_internals.first_batches(iterator)
    if first:
        values = [v for v in keras.tree.flatten(first[0]) if v is not None]
        known = iter(values)
        flat = [
            spec and tf.TensorSpec(next(known).shape, spec.dtype)
            for spec in flat
        ]
    elif not all(spec is None or _is_known(spec.shape) for spec in flat):
        return None
    return tf.nest.pack_sequence_as(element, flat)


def _dense(spec: tf.TypeSpec) -> tf.TensorSpec | None:
    """Shape and dtype of a value of any type; None for Keras's None."""
    if isinstance(spec, tf.OptionalSpec):
        return None
    return tf.TensorSpec(spec.shape, spec.dtype)


def _is_known(shape: tf.TensorShape) -> bool:
    return shape.rank is not None and None not in shape.as_list()[1:]
