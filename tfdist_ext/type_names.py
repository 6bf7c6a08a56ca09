# SPDX-License-Identifier: Apache-2.0
"""Names of the types that signatures of this package use.

TensorFlow and Keras ship no types, so mypy takes most of these for `Any`; they
say what a function expects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from typing import TypeAlias

import tensorflow as tf

# Of either Keras.
Model: TypeAlias = tf.keras.Model
Layer: TypeAlias = tf.keras.layers.Layer
Optimizer: TypeAlias = tf.keras.optimizers.Optimizer
Metric: TypeAlias = tf.keras.metrics.Metric
Loss: TypeAlias = tf.keras.losses.Loss
Callback: TypeAlias = tf.keras.callbacks.Callback
# A variable of TensorFlow or of Keras 3; under a strategy, of all ranks.
Variable: TypeAlias = Any
# What `tape.gradient` returns for a variable.
Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | None
# A number, a schedule or a variable.
Rate: TypeAlias = Any
# These stand for what TensorFlow converts to them as well.
TensorLike: TypeAlias = tf.Tensor | tf.RaggedTensor | tf.SparseTensor
Shape: TypeAlias = tf.TensorShape
DTypeLike: TypeAlias = tf.DType
InitializerLike: TypeAlias = tf.keras.initializers.Initializer
# Tensors in lists, tuples and dicts, as `tf.nest` takes them.
Nested: TypeAlias = Any
Strategy: TypeAlias = tf.distribute.Strategy
Trackable: TypeAlias = tf.__internal__.tracking.Trackable
Logs: TypeAlias = dict[str, Any] | None
# The function that a stage of a hook stands around.
Original: TypeAlias = Callable[..., Any]
