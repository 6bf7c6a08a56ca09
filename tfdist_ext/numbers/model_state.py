# SPDX-License-Identifier: Apache-2.0
"""State that a step may change, and comparison of replicas between ranks."""

from __future__ import annotations

import collections
import dataclasses
import inspect
import logging
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import TypeGuard

import numpy as np
import tensorflow as tf

from tfdist_ext import keras_internals
from tfdist_ext import marks
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.type_names import Logs
from tfdist_ext.type_names import Model
from tfdist_ext.type_names import Optimizer
from tfdist_ext.type_names import Original
from tfdist_ext.type_names import T
from tfdist_ext.type_names import Variable

_LOG = logging.getLogger("tfdist_ext")
keras = tf.keras

_RANDOM = ("seed_generator_state", "StateVar")
_ON_READ = tf.VariableSynchronization.ON_READ


@dataclasses.dataclass(frozen=True)
class Held:
    """A variable of this rank, identified by its handle.

    Attributes:
        name: name of the variable, or a substitute if it has none.
        handle: handle of the resource.
        dtype: dtype of the values.
        owner: the variable, or the distributed variable that contains it;
            None if unknown.
        trainable: whether optimizers update it.
        is_slot: whether it belongs to an optimizer.
    """

    name: str
    handle: tf.Tensor
    dtype: tf.DType
    owner: tf.Variable
    trainable: bool
    is_slot: bool

    @property
    def is_random(self) -> bool:
        """Whether it is the state of a random generator."""
        return is_random(self.name)

    @property
    def is_shard(self) -> bool:
        """Whether it is this rank's shard of a table or of a slot."""
        return marks.shard_spec(self.owner) is not None

    @property
    def aggregation(self) -> tf.VariableAggregation | None:
        """Reduction of the ranks' values at a read; None for replicas."""
        if getattr(self.owner, "synchronization", None) != _ON_READ:
            return None
        found: tf.VariableAggregation = self.owner.aggregation
        return found

    @property
    def bytes(self) -> int:
        """Bytes of the values; 0 if the shape is unknown."""
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
        """Restores values.

        Args:
            value: values that `read` has returned.
        """
        tf.raw_ops.AssignVariableOp(
            resource=self.handle, value=tf.constant(value, self.dtype)
        )


def is_random(name: str) -> bool:
    """Whether a variable's name is that of a random generator's state."""
    return any(part in name for part in _RANDOM)


def slots_of(model: Model) -> Iterator[Variable]:
    """Yields the variables of a model's optimizers.

    Args:
        model: model that may have other optimizers than the compiled one.
    """
    for found in [getattr(model, "optimizer", None), *vars(model).values()]:
        if is_optimizer(found):
            yield from variables_of_optimizer(found)


def is_optimizer(thing: object) -> TypeGuard[Optimizer]:
    """Whether an object is an optimizer of Keras, also a legacy one."""
    legacy = getattr(keras.optimizers, "legacy", None)
    old = getattr(legacy, "Optimizer", keras.optimizers.Optimizer)
    return isinstance(thing, keras.optimizers.Optimizer | old)


def variables_of_optimizer(optimizer: Optimizer) -> list[Variable]:
    """The slots of an optimizer, and its counters."""
    variables = optimizer.variables
    return list(variables() if callable(variables) else variables)


def label_of(variable: Variable | None) -> str:
    """Name of a variable in a report."""
    native = keras_internals.value_of(variable)
    name = getattr(variable, "path", None) or getattr(native, "name", "")
    return str(name).removesuffix(":0")


def held_by(
    handles: Iterable[tf.Tensor],
    variables: Iterable[Variable],
    slots: Iterable[Variable],
    others: Iterable[Variable],
) -> list[Held]:
    """Variables that a function may change.

    Args:
        handles: handles that a traced function captures, in order; other
            resources are skipped.
        variables: variables of Keras models.
        slots: variables of the models' optimizers.
        others: variables of TensorFlow, possibly including these.
    """
    slots = list(slots)
    are_slots = {id(slot) for slot in slots}
    owners: dict[int, tuple[Variable, str, bool]] = {}
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
    """Copy of variables, and of the keys of dynamic vocabularies.

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
        """New values of variables that have changed, by index."""
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
        """Restores all variables and vocabularies.

        Args:
            random: whether states of random generators are restored as well.
        """
        for i in self.changed():
            if random or not self.held[i].is_random:
                self.held[i].write(self.before[i])
        for keys, copied in self._keys:
            keys.put_back(copied)


_DIGEST_BYTES = 8
_MOST_LINES = 20
# Bytes of variables that are compared after an epoch, within milliseconds.
_BYTES_OF_AN_EPOCH = 32 << 20
# Largest variable for which ranks also report the size of the difference.
_MOST_ELEMENTS = 1 << 22


def compare_replicas(
    variables: Iterable[Variable],
    collectives: Collectives,
    when: str,
    epoch: int | None = None,
) -> None:
    """Reports variables that differ between ranks; all ranks must call this.

    Shards of tables and slots, metrics and random generators are not
    compared, because each rank has its own values.

    Args:
        variables: variables of Keras or TensorFlow, the same on all ranks.
        collectives: collectives of the strategy.
        when: when the variables are compared, for the message.
        epoch: index of an epoch, which selects a group of variables if there
            are many; None compares all.

    Raises:
        ValueError: variables differ and `check="error"`; raised on all ranks.
    """
    replicas = _replicas_of(variables)
    if epoch is not None:
        groups = _groups_of(replicas)
        replicas = groups[epoch % len(groups)] if groups else []
    if collectives.check == "off" or not replicas:
        return
    digests = _digests_of_ranks(replicas, collectives)
    differ = [
        i
        for i in range(len(replicas))
        if (digests[:, i] != digests[0, i]).any()
    ]
    new = [i for i in differ if replicas[i][0] not in collectives.drifted]
    if not new:
        return
    lines = [
        "Variables that must be equal on all ranks have different values "
        f"{when}:",
        *(
            _line(*replicas[i], digests[:, i], collectives)
            for i in new[:_MOST_LINES]
        ),
    ]
    if len(new) > _MOST_LINES:
        lines.append(f"  and {len(new) - _MOST_LINES} more")
    lines.append(
        "From here on, every rank trains a different model. Assign equal "
        "values on all ranks, computed from what all ranks have."
    )
    if collectives.check == "error":
        raise ValueError("\n".join(lines))
    collectives.drifted.update(replicas[i][0] for i in new)
    if collectives.group.rank == 0:
        _LOG.warning("%s", "\n".join(lines))


def variables_of(model: Model) -> list[Variable]:
    """The variables of a model and its optimizers."""
    return [*model.variables, *slots_of(model)]


def _replicas_of(
    variables: Iterable[Variable],
) -> list[tuple[str, tf.Variable]]:
    """Names and values of the variables that must be equal on all ranks."""
    found: dict[int, tuple[str, tf.Variable]] = {}
    for variable in variables:
        native = keras_internals.value_of(variable)
        if not isinstance(native, internals.MirroredVariable):
            continue
        name = label_of(variable)
        if not is_random(name) and native.dtype != tf.string:
            found.setdefault(id(native), (name, native.values[0]))
    return list(found.values())


def _groups_of(
    replicas: Sequence[tuple[str, tf.Variable]],
) -> list[list[tuple[str, tf.Variable]]]:
    """Divides variables into groups that are compared within milliseconds."""
    groups: list[list[tuple[str, tf.Variable]]] = []
    left = 0
    for name, variable in replicas:
        size = (variable.shape.num_elements() or 0) * variable.dtype.size
        if not groups or size > left:
            groups.append([])
            left = _BYTES_OF_AN_EPOCH
        groups[-1].append((name, variable))
        left -= size
    return groups


def _digests_of_ranks(
    replicas: Sequence[tuple[str, tf.Variable]], collectives: Collectives
) -> np.ndarray:
    """A digest of 8 bytes for every rank and variable, in one exchange."""
    with tf.device("CPU:0"):
        own = tf.concat([_digest(variable) for _, variable in replicas], axis=0)
    gathered, rows = collectives.all_gather_parts(own, "check/replicas")
    counts = rows.numpy().tolist()
    if len(set(counts)) > 1:
        raise ValueError(
            "The ranks have different numbers of variables: "
            f"{', '.join(map(str, counts))}, by rank. All ranks train one "
            "model: build the same model on each."
        )
    flat = np.ascontiguousarray(gathered.numpy())
    return flat.view(np.uint64).reshape(len(counts), len(replicas))


def _digest(variable: tf.Variable) -> tf.Tensor:
    flat = tf.reshape(variable.read_value(), [1, -1])
    if flat.dtype in (tf.bfloat16, tf.float16):
        flat = tf.bitcast(flat, tf.uint16)
    return tf.fingerprint(flat)


def _line(
    name: str,
    variable: tf.Variable,
    digests: np.ndarray,
    collectives: Collectives,
) -> str:
    groups: dict[int, list[int]] = {}
    for rank, digest in enumerate(digests.tolist()):
        groups.setdefault(digest, []).append(rank)
    largest = max(groups.values(), key=len)
    others = [r for ranks in groups.values() if ranks != largest for r in ranks]
    line = f"  {name} {variable.shape}: ranks {_listed(others)} differ from "
    line += f"ranks {_listed(largest)}"
    elements = variable.shape.num_elements()
    if elements and elements <= _MOST_ELEMENTS:
        line += f", by up to {_apart(variable, collectives):.1e}"
    return line


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown + (", ..." if len(ranks) > 8 else "")


def _apart(variable: tf.Variable, collectives: Collectives) -> float:
    """Largest difference of an element from the ranks' mean."""
    value = tf.cast(variable.read_value(), tf.float64)
    (total,) = collectives.all_reduce([value], "check/replicas/values")
    mean = total / collectives.group.world_size
    own = tf.reduce_max(tf.abs(value - mean))
    everyone = collectives.all_gather(own[tf.newaxis], "check/replicas/apart")
    return float(np.max(everyone.numpy()))


class _Compare(keras.callbacks.Callback):  # type: ignore[name-defined]
    """Compares replicas before other callbacks save them."""

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Reports differences."""
        compare_replicas(
            variables_of(self.model),
            self.model.distribute_strategy.collectives,
            f"after epoch {epoch + 1}",
            epoch,
        )


def compare_after_epochs(
    original: Original[T], model: Model, *args: Any, **kwargs: Any
) -> T:
    strategy = model.distribute_strategy
    collectives = getattr(strategy, "collectives", None)
    if collectives is None or collectives.check == "off":
        return original(model, *args, **kwargs)
    bound = inspect.signature(original).bind(model, *args, **kwargs)
    callbacks = bound.arguments.get("callbacks")
    if isinstance(callbacks, keras.callbacks.CallbackList):
        # Keras trains with a `CallbackList` of the caller unchanged.
        return original(model, *args, **kwargs)
    bound.arguments["callbacks"] = [
        _Compare(),
        *tf.nest.flatten(callbacks or []),
    ]
    return original(*bound.args, **bound.kwargs)
