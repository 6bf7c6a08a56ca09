# SPDX-License-Identifier: Apache-2.0
"""Lets the sparse layers of a model share one exchange per direction.

Under Keras's loops, and in any other step of our strategy that is a graph, a
model's call is traced twice for it, see `embedding.capture`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist_ext import keras_internals
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.collectives import collectives as collectives_lib
from tfdist_ext.embedding import capture
from tfdist_ext.embedding.pooled_lookup import look_up_together

keras = tf.keras


def share_exchanges(
    original: Any, model: Any, *args: Any, **kwargs: Any
) -> Any:
    call = functools.partial(original, model, *args, **kwargs)
    collectives = collectives_lib.active()
    if (
        collectives is None
        or collectives.step is None
        or tf.executing_eagerly()
        or capture.is_active()
        or sum(1 for _ in _sparse_layers(model)) < 2
    ):
        return call()
    return capture.shared(
        call,
        collectives,
        functools.partial(look_up_together, collectives=collectives),
        functools.partial(_forget, model),
    )


def _sparse_layers(layer: Any) -> Iterator[Any]:
    """Layers within one that look up in tables, each with its own call."""
    for inner in keras_internals.inner_layers(layer):
        if getattr(inner, "looks_up_tables", False):
            yield inner
        else:
            yield from _sparse_layers(inner)


def _forget(model: Any, graph: tf.Graph) -> None:
    """Takes tensors of a graph out of the lists that layers keep."""

    def is_of_graph(value: Any) -> bool:
        return tf.is_symbolic_tensor(value) and value.graph is graph

    for layer in keras_internals.layers_of(model):
        for value in vars(layer).values():
            if isinstance(value, list) and any(map(is_of_graph, value)):
                internals.keep_in_list(value, lambda v: not is_of_graph(v))
