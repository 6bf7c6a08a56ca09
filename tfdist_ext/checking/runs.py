# SPDX-License-Identifier: Apache-2.0
"""Runs of a step that are compared, of which nothing is applied."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext import keras_internals
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.checking.state import Held
from tfdist_ext.checking.state import Snapshot
from tfdist_ext.collectives.trial import Trial

Nest = Any
# Parts of the names of ops that do not give the same again.
_RANDOM = ("Random", "Multinomial", "TruncatedNormal", "Sampler", "PyFunc")


@dataclasses.dataclass(frozen=True)
class Rows:
    """A gradient of some rows.

    Attributes:
        indices: of the rows; one may occur several times, to be summed.
        values: of the rows, flat.
    """

    indices: np.ndarray
    values: np.ndarray


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one run of a step gives.

    Attributes:
        logs: numbers that the step returns, by name.
        gradients: by which trainable variables are updated: arrays, or
            `Rows`; by name and how many updates of it came before.
        changed: new values of variables, by their index in the snapshot.
    """

    logs: dict[str, np.ndarray]
    gradients: dict[tuple[str, int], Any]
    changed: dict[int, np.ndarray]


class Run:
    """A step, traced to be run for a comparison.

    Args:
        strategy: of the ranks.
        step: is given to `strategy.run`.
        signature: of the batch: values or type specs.
        whole: whether every rank has the whole batch.
        reduces: whether what the step returns is averaged over the ranks, as
            Keras does.
    """

    def __init__(
        self,
        strategy: Any,
        step: Callable[[Nest], Nest],
        signature: Nest,
        whole: bool,
        reduces: bool,
    ) -> None:
        self._strategy, self._step = strategy, step
        self._whole, self._reduces = whole, reduces and not whole
        self._variables: list[Any] = []
        self._function = tf.function(
            self._traced, autograph=not keras_internals.KERAS_3
        ).get_concrete_function(signature)

    @property
    def handles(self) -> list[Any]:
        """The handles of the resources that the step uses."""
        return [
            each
            for each in self._function.captured_inputs
            if each.dtype == tf.resource
        ]

    @property
    def variables(self) -> Sequence[Any]:
        """Variables that the step reads."""
        return self._function.graph.variables

    @property
    def is_random(self) -> bool:
        """Whether a second run may give something else."""
        ops = internals.ops_of(self._function.graph.as_graph_def())
        return any(part in op for op in ops for part in _RANDOM)

    def __call__(self, batch: Nest, snapshot: Snapshot) -> Outcome:
        """Runs the step once; the state is then as the step leaves it.

        Args:
            batch: of the signature.
            snapshot: of the state before.
        """
        outputs, gradients = self._function(batch)
        return _outcome(outputs, self._variables, gradients, snapshot)

    def _traced(self, batch: Nest) -> tuple[Nest, list[Any]]:
        outputs, updates = _tried(
            self._strategy, self._step, batch, self._whole, self._reduces
        )
        graph = tf.compat.v1.get_default_graph()
        here = [pair for pair in updates if _graph_of(pair[1]) is graph]
        self._variables = [variable for variable, _ in here]
        return outputs, [value for _, value in here]


class EagerRun:
    """A step that is run without a graph, for a comparison.

    Args:
        strategy: of the ranks.
        step: is given to `strategy.run`.
        reduces: as of `Run`.
    """

    def __init__(
        self, strategy: Any, step: Callable[[Nest], Nest], reduces: bool
    ) -> None:
        self._arguments = strategy, step
        self._reduces = reduces

    def __call__(self, batch: Nest, snapshot: Snapshot) -> Outcome:
        """Runs the step once, as `Run` does."""
        outputs, updates = _tried(*self._arguments, batch, False, self._reduces)
        variables = [variable for variable, _ in updates]
        values = [value for _, value in updates]
        return _outcome(outputs, variables, values, snapshot)


def _tried(
    strategy: Any,
    step: Callable[[Nest], Nest],
    batch: Nest,
    whole: bool,
    reduces: bool,
) -> tuple[Nest, list[tuple[Any, Any]]]:
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


def _without_optional(value: Any) -> Any:
    # As Keras 3 does.
    return None if isinstance(value, tf.experimental.Optional) else value


def _named(outputs: Nest, name: str = "") -> list[tuple[str, Any]]:
    """The leaves of what a step returns, by paths."""
    if isinstance(outputs, dict):
        parts = list(outputs.items())
    elif isinstance(outputs, list | tuple):
        parts = list(enumerate(outputs))
    else:
        if isinstance(outputs, internals.DistributedValues):
            outputs = outputs.values[0]
        return [(name or "result", outputs)]
    prefix = f"{name}/" if name else ""
    return [
        leaf for key, part in parts for leaf in _named(part, f"{prefix}{key}")
    ]


def _graph_of(value: Any) -> Any:
    value = value.values if isinstance(value, tf.IndexedSlices) else value
    return value.graph if tf.is_symbolic_tensor(value) else None


def _outcome(
    outputs: dict[str, Any],
    variables: Sequence[Any],
    values: Sequence[Any],
    snapshot: Snapshot,
) -> Outcome:
    logs = {
        name: np.asarray(value.numpy())
        for name, value in outputs.items()
        if not isinstance(value, tf.__internal__.CompositeTensor)
    }
    gradients: dict[tuple[str, int], Any] = {}
    for variable, value in zip(variables, values, strict=True):
        name = name_of(variable, snapshot.held)
        count = sum(known == name for known, _ in gradients)
        gradients[name, count] = _on_host(value)
    return Outcome(logs, gradients, snapshot.changed())


def name_of(variable: Any, held: Sequence[Held]) -> str:
    """The name that a variable has in a snapshot."""
    parts = {id(part.handle) for part in internals.components(variable)}
    for each in held:
        if id(each.handle) in parts:
            return each.name
    return str(variable.name)


def _on_host(value: Any) -> Any:
    if isinstance(value, tf.IndexedSlices):
        rows = np.array(value.values.numpy(), np.float64)
        indices = np.array(value.indices.numpy())
        return Rows(indices, rows.reshape(len(indices), -1))
    return np.array(value.numpy(), np.float64)
