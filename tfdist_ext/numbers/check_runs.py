# SPDX-License-Identifier: Apache-2.0
"""Runs of a step that a check compares, without a change of the state."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdist_ext import keras_internals
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.comm import exchanges
from tfdist_ext.comm.calls import Trial
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.numbers.model_state import Held
from tfdist_ext.numbers.model_state import Snapshot
from tfdist_ext.type_names import Layer
from tfdist_ext.type_names import Model
from tfdist_ext.type_names import Nest
from tfdist_ext.type_names import Strategy
from tfdist_ext.type_names import TensorLike
from tfdist_ext.type_names import TensorOrSlices
from tfdist_ext.type_names import Variable

keras = tf.keras


class CannotCheck(Exception):
    """A step cannot be checked; the message says why."""


def whole_batch_of(batch: Nest, collectives: Collectives) -> Nest:
    """Concatenates the batches of the ranks; all ranks must call this.

    Args:
        batch: batch of this rank, any nest of dense, ragged and sparse
            tensors.
        collectives: collectives of the strategy.

    Returns:
        The same nest of the samples of all ranks, in rank order.

    Raises:
        CannotCheck: the batch has a value that cannot be gathered.
    """
    flat = tf.nest.flatten(batch)
    gathered = [_gather(value, i, collectives) for i, value in enumerate(flat)]
    return tf.nest.pack_sequence_as(batch, gathered)


def signature_of(batch: Nest) -> Nest:
    """Type specs of a batch, with any number of samples.

    Args:
        batch: result of `whole_batch_of`.
    """
    return tf.nest.map_structure(_open_spec, batch)


def _open_spec(value: TensorLike) -> tf.TypeSpec:
    if value is None:
        return None
    spec = tf.type_spec_from_value(value)
    if isinstance(value, tf.experimental.Optional) or spec.shape.rank == 0:
        return spec
    shape = [None, *spec.shape[1:]]
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(
            shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype
        )
    return type(spec)(shape, spec.dtype)


def _gather(
    value: TensorLike, index: int, collectives: Collectives
) -> TensorLike:
    label = f"check/batch/{index}"
    # A missing value, which is an Optional in a dataset of Keras 3.
    if value is None or isinstance(value, tf.experimental.Optional):
        return value
    if not tf.is_tensor(value) or not hasattr(value, "dtype"):
        raise CannotCheck(
            f"element {index} of the batch is of {type(value).__name__}, "
            "which cannot be gathered"
        )
    if value.shape.rank == 0:
        return value
    kinds = (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)
    if not isinstance(value, kinds) or not exchanges.can_gather(value.dtype):
        raise CannotCheck(
            f"element {index} of the batch is of {type(value).__name__} of "
            f"{value.dtype!r}, which cannot be gathered"
        )
    return exchanges.all_gather_rows(collectives, value, label)[0]


# Packages whose layers need no check.
_KNOWN = ("keras", "tf_keras", "tensorflow", "tfdist_ext")
_OWN_STEPS = ("train_step", "compute_loss")
_MEMORY_PART = 4
_TOLERANCE = {
    tf.float32: 1e-4,
    tf.float16: 5e-3,
    tf.bfloat16: 4e-2,
    tf.int8: 1e-1,
}


def needs_check(model: Model) -> bool:
    """Whether a model has user code that may need all samples.

    This is a step or a loss of the user, or a user's layer with state of its
    own. The result is equal on all ranks.

    Args:
        model: built model of Keras.
    """
    for name in _OWN_STEPS:
        step = getattr(type(model), name)
        # Methods of Keras that this package has wrapped count as Keras's.
        if _package(getattr(step, "python_function", step)) not in _KNOWN:
            return True
    return any(map(_has_own_state, keras_internals.layers_of(model)))


def _package(thing: object) -> str:
    return str(getattr(thing, "__module__", "")).partition(".")[0]


def _has_own_state(layer: Layer) -> bool:
    if _package(type(layer)) in _KNOWN or isinstance(layer, keras.Model):
        return False
    inner = keras_internals.inner_layers(layer)
    theirs = {id(w) for each in inner for w in each.non_trainable_weights}
    return any(id(w) not in theirs for w in layer.non_trainable_weights)


def unsynchronized(model: Model) -> list[str]:
    """Names of trained layers that normalize by the samples of their rank."""
    kind = keras.layers.BatchNormalization
    return [
        layer.name
        for layer in keras_internals.layers_of(model)
        if isinstance(layer, kind)
        and layer.trainable
        and not getattr(layer, "synchronized", True)
    ]


def tolerance_of(model: Model, collectives: Collectives) -> float:
    """Relative tolerance of numbers in the dtypes of a model."""
    dtypes = {collectives.gradient_dtype, tf.float32}
    for layer in keras_internals.layers_of(model) if model is not None else ():
        names = (
            getattr(layer, "compute_dtype", None),
            getattr(getattr(layer, "wire", None), "dtype", None),
        )
        dtypes |= {tf.as_dtype(name) for name in names if name}
    return max(_TOLERANCE.get(dtype, 0.0) for dtype in dtypes)


def require_memory(
    held: Sequence[Held], collectives: Collectives, how: str
) -> None:
    """Raises if a copy takes more than a quarter of the available memory.

    Args:
        held: variables to copy on this rank.
        collectives: collectives of the strategy; all ranks must call this.
        how: how to check nevertheless, for the error.

    Raises:
        CannotCheck: a rank has too little memory; raised on all ranks.
    """
    bytes_ = sum(each.bytes for each in held)
    fits = bytes_ * _MEMORY_PART <= available_bytes()
    (missing,) = collectives.all_reduce(
        [tf.constant([0 if fits else 1], tf.int32)], "check/memory"
    )
    if int(missing[0]):
        raise CannotCheck(
            f"a copy of its tables and slots ({bytes_ / 2**20:.0f} MiB) "
            f"would take more than a quarter of the free memory. {how}"
        )


def available_bytes() -> int:
    """Bytes of memory that are available on this host."""
    try:
        text = pathlib.Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return 1 << 62
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return 1 << 62


# Parts of the names of ops whose results differ between runs.
_RANDOM = ("Random", "Multinomial", "TruncatedNormal", "Sampler", "PyFunc")


@dataclasses.dataclass(frozen=True)
class Rows:
    """A gradient of some rows of a table.

    Attributes:
        indices: indices of the rows; values of equal indices are summed.
        values: values of the rows, `[n, width]`.
    """

    indices: np.ndarray
    values: np.ndarray


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Results of one run of a step.

    Attributes:
        logs: numbers that the step returns, by name.
        gradients: gradients that update trainable variables, as arrays or
            `Rows`. Keys are the name of the variable and its number of
            earlier updates in the run.
        changed: new values of variables, by their index in the snapshot.
    """

    logs: dict[str, np.ndarray]
    gradients: dict[tuple[str, int], np.ndarray | Rows]
    changed: dict[int, np.ndarray]


class Run:
    """A step that is traced to run for a comparison.

    Args:
        strategy: strategy of the ranks.
        step: function that is passed to `strategy.run`.
        signature: the batch, as values or type specs.
        whole: whether every rank has the global batch.
        reduces: whether outputs of the step are averaged over the ranks, as
            in Keras.
    """

    def __init__(
        self,
        strategy: Strategy,
        step: Callable[[Nest], Nest],
        signature: Nest,
        whole: bool,
        reduces: bool,
    ) -> None:
        self._strategy, self._step = strategy, step
        self._whole, self._reduces = whole, reduces and not whole
        self._variables: list[Variable] = []
        self._function = tf.function(
            self._traced, autograph=not keras_internals.KERAS_3
        ).get_concrete_function(signature)

    @property
    def handles(self) -> list[tf.Tensor]:
        """Handles of the resources that the step uses."""
        return [
            each
            for each in self._function.captured_inputs
            if each.dtype == tf.resource
        ]

    @property
    def variables(self) -> Sequence[Variable]:
        """Variables that the step reads."""
        return self._function.graph.variables

    @property
    def is_random(self) -> bool:
        """Whether a second run may have other results."""
        ops = internals.ops_of(self._function.graph.as_graph_def())
        return any(part in op for op in ops for part in _RANDOM)

    def __call__(self, batch: Nest, snapshot: Snapshot) -> Outcome:
        """Runs the step once, and leaves the state as the step leaves it.

        Args:
            batch: batch that matches the signature.
            snapshot: state before the run.
        """
        outputs, gradients = self._function(batch)
        return _outcome(outputs, self._variables, gradients, snapshot)

    def _traced(
        self, batch: Nest
    ) -> tuple[dict[str, tf.Tensor], list[TensorOrSlices]]:
        outputs, updates = _tried(
            self._strategy, self._step, batch, self._whole, self._reduces
        )
        graph = tf.compat.v1.get_default_graph()
        here = [pair for pair in updates if _graph_of(pair[1]) is graph]
        self._variables = [variable for variable, _ in here]
        return outputs, [value for _, value in here]


class EagerRun:
    """A step that runs without a graph for a comparison.

    Args:
        strategy: strategy of the ranks.
        step: function that is passed to `strategy.run`.
        reduces: see `Run`.
    """

    def __init__(
        self, strategy: Strategy, step: Callable[[Nest], Nest], reduces: bool
    ) -> None:
        self._arguments = strategy, step
        self._reduces = reduces

    def __call__(self, batch: Nest, snapshot: Snapshot) -> Outcome:
        """Runs the step once, like `Run`."""
        outputs, updates = _tried(*self._arguments, batch, False, self._reduces)
        variables = [variable for variable, _ in updates]
        values = [value for _, value in updates]
        return _outcome(outputs, variables, values, snapshot)


def _tried(
    strategy: Strategy,
    step: Callable[[Nest], Nest],
    batch: Nest,
    whole: bool,
    reduces: bool,
) -> tuple[dict[str, tf.Tensor], list[tuple[TensorOrSlices, Variable]]]:
    trial = Trial(whole)
    batch = tf.nest.map_structure(_without_optional, batch)
    with strategy.collectives.trying(trial):
        outputs = strategy.run(step, args=(batch,))
    outputs = [
        (name, local) for name, local in _named(outputs) if tf.is_tensor(local)
    ]
    if reduces:
        values = strategy.reduce("MEAN", [v for _, v in outputs], axis=0)
        names = [name for name, _ in outputs]
        outputs = list(zip(names, values, strict=True))
    return dict(outputs), trial.updates


def _without_optional(value: object) -> object:
    # Keras 3 replaces an Optional by None as well.
    return None if isinstance(value, tf.experimental.Optional) else value


def _named(outputs: Nest, name: str = "") -> list[tuple[str, TensorLike]]:
    """Leaves of a step's outputs, with their paths."""
    if isinstance(outputs, dict):
        parts = list(outputs.items())
    elif isinstance(outputs, list | tuple):
        parts = list(enumerate(outputs))
    else:
        if isinstance(outputs, tf.distribute.DistributedValues):
            outputs = outputs.values[0]
        return [(name or "result", outputs)]
    prefix = f"{name}/" if name else ""
    return [
        leaf for key, part in parts for leaf in _named(part, f"{prefix}{key}")
    ]


def _graph_of(value: TensorOrSlices) -> tf.Graph | None:
    value = value.values if isinstance(value, tf.IndexedSlices) else value
    return value.graph if tf.is_symbolic_tensor(value) else None


def _outcome(
    outputs: dict[str, tf.Tensor],
    variables: Sequence[Variable],
    values: Sequence[TensorOrSlices],
    snapshot: Snapshot,
) -> Outcome:
    logs = {
        name: np.asarray(value.numpy())
        for name, value in outputs.items()
        if not isinstance(value, tf.__internal__.CompositeTensor)
    }
    gradients: dict[tuple[str, int], np.ndarray | Rows] = {}
    for variable, value in zip(variables, values, strict=True):
        name = name_of(variable, snapshot.held)
        count = sum(known == name for known, _ in gradients)
        gradients[name, count] = _on_host(value)
    return Outcome(logs, gradients, snapshot.changed())


def name_of(variable: Variable, held: Sequence[Held]) -> str:
    """Name of a variable in a snapshot."""
    parts = {id(part.handle) for part in internals.components(variable)}
    for each in held:
        if id(each.handle) in parts:
            return each.name
    return str(variable.name)


def _on_host(value: TensorOrSlices) -> np.ndarray | Rows:
    if isinstance(value, tf.IndexedSlices):
        rows = np.array(value.values.numpy(), np.float64)
        indices = np.array(value.indices.numpy())
        # A rank without a part of a table has no rows.
        width = int(np.prod(rows.shape[1:]))
        return Rows(indices, rows.reshape(len(indices), width))
    return np.array(value.numpy(), np.float64)
