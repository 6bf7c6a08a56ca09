# SPDX-License-Identifier: Apache-2.0
"""What is done when a model comes to one of Keras's loops.

Only there are all layers of a model known, and the size of its batches: so its
tables are planned again. What is not traced and has no slots yet may still be
moved: at the start of a loop, and in Keras 3, which builds some models in it,
before the optimizer makes its slots.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext import keras_internals
from tfdist_ext import marks
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.collectives import collectives as collectives_lib
from tfdist_ext.collectives.collectives import Collectives
from tfdist_ext.collectives.loop import Loop

keras = tf.keras
Nest = Any

# Of arrays, if `fit` is not told.
_BATCH_OF_KERAS = 32

Find = Callable[[Any], Sequence[Any]]
Place = Callable[[Any, Collectives], None]


def place_first(find: Find, place: Place) -> Callable[..., Any]:
    """A stage of Keras's loops that places the tables of a model.

    Args:
        find: the layers of a model that have tables, built or not.
        place: moves what can be moved of the tables of a model; all ranks
            call it.
    """

    def stage(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        collectives = getattr(self.distribute_strategy, "collectives", None)
        if collectives is None or collectives.loop is not None:
            return original(self, *args, **kwargs)
        layers = find(self)
        if not layers:
            return original(self, *args, **kwargs)
        given = inspect.signature(original).bind(self, *args, **kwargs)
        x, batch_size = map(given.arguments.get, ("x", "batch_size"))
        samples = samples_of(x, batch_size, collectives.group.world_size)
        collectives.loop = Loop(self, _agreed(samples, collectives))
        try:
            with self.distribute_strategy.scope():
                if not all(layer.built for layer in layers):
                    _build(self, x, collectives)
                place(self, collectives)
            return original(self, *args, **kwargs)
        finally:
            collectives.loop = None

    return stage


def place_built(place: Place) -> Callable[..., Any]:
    """A stage of `Optimizer.build`: all layers are built before slots are."""

    def stage(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        collectives = collectives_lib.active()
        loop = collectives.loop if collectives else None
        if collectives is not None and loop is not None and not self.built:
            with tf.init_scope():
                place(loop.model, collectives)
        return original(self, *args, **kwargs)

    return stage


def samples_of(x: Any, batch_size: int | None, world_size: int) -> int:
    """Samples of a rank in a step, 0 if nothing tells.

    Args:
        x: what `fit` is given: a dataset, of global batches or distributed,
            arrays, or a generator, of which nothing is known.
        batch_size: of arrays, of all ranks; None for Keras's default.
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


def _agreed(samples: int, collectives: Collectives) -> int | None:
    """The most that a rank knows of, None if no rank knows."""
    everyone = collectives.all_gather(
        tf.constant([samples], tf.int64), "samples of a step"
    )
    return int(np.max(everyone.numpy())) or None


def _build(model: Any, x: Any, collectives: Collectives) -> None:
    """Builds a model of tf_keras in a graph that is never run.

    It would build its layers while it traces its first step, where tables
    cannot be moved any more. Keras 3 does as much by itself.
    """
    inputs = _specs_of(x)
    if keras_internals.KERAS_3 or inputs is None:
        return
    strategy = model.distribute_strategy

    def call(values: Nest) -> Nest:
        # A step of the model's own may call it with less.
        with keras_internals.forgetting_inputs(model):
            return model(values, training=False)

    # Under this name layers know that it is never run, and it is no step.
    def scratch_graph(values: Nest) -> Nest:
        return internals.Strategy.run(strategy, call, args=(values,))

    try:
        tf.function(scratch_graph, autograph=False).get_concrete_function(
            inputs
        )
    except Exception as error:
        # A model that needs more than that is built by its first step, which
        # says better what is wrong. All ranks do the same.
        collectives.give_up("building the model", error)


def _specs_of(x: Any) -> Nest | None:
    """What a model is called with, None if nothing tells."""
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


def _spec_of(value: Any) -> Any:
    """A type of TensorFlow, without reading what may lie on a disk."""
    if isinstance(value, tf.Tensor | tf.__internal__.CompositeTensor):
        return tf.type_spec_from_value(value)
    try:
        return tf.TensorSpec(value.shape, value.dtype)
    except (AttributeError, TypeError):  # a table of pandas, say
        return None


def _of_any_batch(spec: Any) -> Any:
    if isinstance(spec, tf.TensorSpec) and spec.shape.rank:
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)
    return spec
