# SPDX-License-Identifier: Apache-2.0
"""All state that a step may change: what it was, and what it becomes."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext import keras_internals
from tfdist_ext import marks
from tfdist_ext import tensorflow_internals as internals

keras = tf.keras

_RANDOM = ("seed_generator_state", "StateVar")
_ON_READ = tf.VariableSynchronization.ON_READ


@dataclasses.dataclass(frozen=True)
class Held:
    """A variable of this rank, by its handle.

    Attributes:
        name: of the variable, or what is known of it.
        handle: of the resource.
        dtype: of the values.
        owner: the variable, distributed if it is; None if not known.
        trainable: whether optimizers update it.
        is_slot: whether it is of an optimizer.
    """

    name: str
    handle: tf.Tensor
    dtype: tf.DType
    owner: Any
    trainable: bool
    is_slot: bool

    @property
    def is_random(self) -> bool:
        """Whether it is the state of a random generator."""
        return is_random(self.name)

    @property
    def is_shard(self) -> bool:
        """Whether it is this rank's part of a table or of a slot."""
        return marks.shard_spec(self.owner) is not None

    @property
    def aggregation(self) -> tf.VariableAggregation | None:
        """How the ranks' values are read; None if they are to be equal."""
        if getattr(self.owner, "synchronization", None) != _ON_READ:
            return None
        found: tf.VariableAggregation = self.owner.aggregation
        return found

    @property
    def bytes(self) -> int:
        """How much memory the values take."""
        shape = getattr(self.owner, "shape", None)
        if shape is None or not tf.TensorShape(shape).is_fully_defined():
            return 0
        return int(tf.TensorShape(shape).num_elements()) * self.dtype.size

    def read(self) -> np.ndarray:
        """A copy of the values."""
        value = tf.raw_ops.ReadVariableOp(
            resource=self.handle, dtype=self.dtype
        )
        return np.array(value.numpy())

    def write(self, value: np.ndarray) -> None:
        """Puts values back.

        Args:
            value: what `read` has returned.
        """
        tf.raw_ops.AssignVariableOp(
            resource=self.handle, value=tf.constant(value, self.dtype)
        )


def is_random(name: str) -> bool:
    """Whether a variable is the state of a random generator, by its name."""
    return any(part in name for part in _RANDOM)


def slots_of(model: Any) -> Iterator[Any]:
    """The variables of a model's optimizers.

    Args:
        model: that may have optimizers of its own besides the compiled one.
    """
    for found in [getattr(model, "optimizer", None), *vars(model).values()]:
        if is_optimizer(found):
            yield from variables_of_optimizer(found)


def is_optimizer(thing: Any) -> bool:
    """Whether it is an optimizer of either Keras, old or new."""
    legacy = getattr(keras.optimizers, "legacy", None)
    old = getattr(legacy, "Optimizer", keras.optimizers.Optimizer)
    return isinstance(thing, keras.optimizers.Optimizer | old)


def variables_of_optimizer(optimizer: Any) -> list[Any]:
    """The slots of an optimizer, and its counters."""
    variables = optimizer.variables
    return list(variables() if callable(variables) else variables)


def label_of(variable: Any) -> str:
    """How a variable is named in a report."""
    native = keras_internals.value_of(variable)
    name = getattr(variable, "path", None) or getattr(native, "name", "")
    return str(name).removesuffix(":0")


def held_by(
    handles: Iterable[Any],
    variables: Iterable[Any],
    slots: Iterable[Any],
    others: Iterable[Any],
) -> list[Held]:
    """The variables that a function may change.

    Args:
        handles: that a traced function captures, in order; may be of other
            resources.
        variables: of Keras's models.
        slots: of their optimizers.
        others: of TensorFlow, that may be among these.
    """
    slots = list(slots)
    are_slots = {id(slot) for slot in slots}
    owners: dict[int, tuple[Any, str, bool]] = {}
    extra = []
    for variable in [*slots, *variables, *others]:
        native, name = keras_internals.value_of(variable), label_of(variable)
        for part in internals.components(native):
            owner = internals.container_of(part.handle)
            owner = native if owner is None else owner
            entry = owner, name, id(variable) in are_slots
            owners.setdefault(id(part.handle), entry)
            extra.append(part.handle)
    found: dict[int, Held] = {}
    names = collections.Counter[str]()
    for handle in [*handles, *extra]:
        dtype = internals.variable_dtype(handle)
        if dtype is None or id(handle) in found:
            continue
        container = internals.container_of(handle)
        unknown = (container, label_of(container), False)
        owner, name, is_slot = owners.get(id(handle), unknown)
        name = name or "variable without a name"
        names[name] += 1
        if names[name] > 1:
            name = f"{name} ({names[name]})"
        trainable = bool(getattr(owner, "trainable", False)) and not is_slot
        found[id(handle)] = Held(name, handle, dtype, owner, trainable, is_slot)
    return list(found.values())


class Snapshot:
    """What variables, and vocabularies that grow, are before a trial.

    Args:
        held: the variables.
    """

    def __init__(self, held: Sequence[Held]) -> None:
        self.held = held
        self.before = [each.read() for each in held]
        owners = [each.owner for each in held if each.owner is not None]
        keys = map(marks.keys_of, owners)
        known = {id(each): each for each in keys if each is not None}
        self._keys = [(each, each.copy()) for each in known.values()]

    def changed(self) -> dict[int, np.ndarray]:
        """The values of those that have other values now, by index."""
        found = {}
        for i, each in enumerate(self.held):
            now = each.read()
            if now.shape != self.before[i].shape or (
                now.tobytes() != self.before[i].tobytes()
                if now.dtype != object
                else (now != self.before[i]).any()
            ):
                found[i] = now
        return found

    def restore(self, random: bool) -> None:
        """Makes everything what it was.

        Args:
            random: whether random generators, too, go back.
        """
        for i in self.changed():
            if random or not self.held[i].is_random:
                self.held[i].write(self.before[i])
        for keys, copied in self._keys:
            keys.put_back(copied)
