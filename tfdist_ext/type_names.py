# SPDX-License-Identifier: Apache-2.0
"""Names of the types that signatures of this package use.

TensorFlow and Keras ship no types, so mypy does not check the attributes of
their classes; these names say what a function expects.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import MutableMapping
from collections.abc import Sequence
from typing import Any
from typing import Protocol
from typing import TypeAlias
from typing import TypeVar

import tensorflow as tf

T = TypeVar("T")

# Of either Keras.
Model: TypeAlias = tf.keras.Model
Metric: TypeAlias = tf.keras.metrics.Metric
Loss: TypeAlias = tf.keras.losses.Loss
Callback: TypeAlias = tf.keras.callbacks.Callback
# Keras also takes their names and configs.
InitializerLike: TypeAlias = tf.keras.initializers.Initializer
RegularizerLike: TypeAlias = tf.keras.regularizers.Regularizer
ConstraintLike: TypeAlias = tf.keras.constraints.Constraint
Logs: TypeAlias = dict[str, Any] | None
# What Keras's loops call for a step: `Model.train_function` and others.
TrainFunction: TypeAlias = Callable[..., Logs]

# Keras 3's `TFEpochIterator` or tf_keras's `DataHandler`, see keras_internals.
EpochIterator: TypeAlias = Any
# The arrays of a layer or an optimizer in a file of Keras, by name. It takes
# variables as well.
Store: TypeAlias = MutableMapping[str, Any]


class Layer(Protocol):
    """A layer of Keras 3 or tf_keras."""

    @property
    def name(self) -> str: ...

    @property
    def built(self) -> bool: ...

    @property
    def weights(self) -> list[Variable]: ...

    @property
    def non_trainable_weights(self) -> list[Variable]: ...


class Optimizer(Protocol):
    """An optimizer of Keras 3 or tf_keras."""

    @property
    def name(self) -> str: ...

    learning_rate: Any

    @property
    def iterations(self) -> tf.Variable: ...

    # A list in Keras 3, a function in versions of tf_keras.
    @property
    def variables(self) -> Any: ...

    def build(self, variables: Sequence[Variable]) -> None: ...

    def add_variable_from_reference(self, *args: Any, **kwargs: Any) -> Any: ...

    def get_config(self) -> dict[str, Any]: ...


class Variable(Protocol):
    """A variable of TensorFlow or of Keras 3; under a strategy, of all ranks.

    Functions that need TensorFlow's variable take a `tf.Variable`;
    `keras_internals.value_of` returns it.
    """

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tf.TensorShape: ...

    @property
    def dtype(self) -> tf.DType: ...

    @property
    def trainable(self) -> bool: ...

    def assign(self, value: Any) -> Any: ...

    def numpy(self) -> Any: ...


Trackable: TypeAlias = tf.__internal__.tracking.Trackable
# A tensor of an object, as a saver of checkpoints knows it.
SavedTensor: TypeAlias = tf.train.experimental.ShardableTensor
TensorOrSlices: TypeAlias = tf.Tensor | tf.IndexedSlices
# What `tape.gradient` returns for a variable.
Gradient: TypeAlias = TensorOrSlices | None
# A number, a schedule or a variable.
Rate: TypeAlias = (
    float
    | tf.Tensor
    | tf.Variable
    | tf.keras.optimizers.schedules.LearningRateSchedule
)
Scalar: TypeAlias = float | tf.Tensor | tf.Variable
# These stand for what TensorFlow converts to them as well.
TensorLike: TypeAlias = tf.Tensor | tf.RaggedTensor | tf.SparseTensor
Shape: TypeAlias = tf.TensorShape
DTypeLike: TypeAlias = tf.DType
# Values in lists, tuples and dicts, as `tf.nest` takes them.
Nested: TypeAlias = T | Sequence["Nested[T]"] | Mapping[str, "Nested[T]"]
# For example a batch of samples, or the outputs of a model.
Nest: TypeAlias = Nested[TensorLike]
# The result of a function under `tf.custom_gradient`: tensors, and a function
# from their gradients to those of the arguments.
WithGradient: TypeAlias = tuple[Any, Callable[..., Any]]

Strategy: TypeAlias = tf.distribute.Strategy
ClusterResolver: TypeAlias = tf.distribute.cluster_resolver.ClusterResolver
ReduceOp: TypeAlias = tf.distribute.ReduceOp
InputOptions: TypeAlias = tf.distribute.InputOptions | None
ReduceOptions: TypeAlias = (
    tf.distribute.experimental.CommunicationOptions | None
)
# The variables or devices that get the result of a reduction.
Destinations: TypeAlias = tf.distribute.DistributedValues | tf.Variable | str

# The function that a stage of a hook stands around.
Original: TypeAlias = Callable[..., T]
# A stage of a hook, called with the original and the arguments of a call.
StageFunction: TypeAlias = Callable[..., Any]
# The positional arguments of a call, and those with names.
Arguments: TypeAlias = tuple[Any, ...]
Keywords: TypeAlias = dict[str, Any]
# The arguments of a constructor, as `get_config` returns them.
Config: TypeAlias = dict[str, Any]
# An object of a JSON text.
JsonObject: TypeAlias = dict[str, Any]
Path: TypeAlias = str | os.PathLike[str]
PathOrFile: TypeAlias = Path | io.IOBase
