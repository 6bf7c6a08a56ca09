# SPDX-License-Identifier: Apache-2.0
"""Keras's `compile` with `jit_compile=True`: training goes on without XLA.

XLA has no kernels for lookups and exchanges. Keras 3 sees that of our layers,
tf_keras of nothing, and neither of them of a strategy.
"""

from __future__ import annotations

import warnings
from typing import Any

import tensorflow as tf

from tfdist_ext import keras_internals

keras = tf.keras


def compile_without_xla(
    original: Any, model: Any, *args: Any, **kwargs: Any
) -> Any:
    result = original(model, *args, **kwargs)
    if model.jit_compile and _is_beyond_xla(model):
        warnings.warn(
            "XLA cannot compile what several ranks exchange, nor the lookups "
            "of tfdist_ext.layers. Proceeding with `jit_compile=False`.",
            stacklevel=3,
        )
        model.jit_compile = False
    return result


def _is_beyond_xla(model: Any) -> bool:
    strategy = model.distribute_strategy
    if not hasattr(strategy, "collectives"):
        return False
    return strategy.collectives is not None or not all(
        getattr(layer, "supports_jit", True)
        for layer in keras_internals.layers_of(model)
    )
