# SPDX-License-Identifier: Apache-2.0
"""Steps that are applied or exchanged together: modes other than BSP."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext import keras_internals
from tfdist_ext import marks
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.consistency import Accumulate
from tfdist_ext.consistency import LocalSteps
from tfdist_ext.keras_internals import value_of
from tfdist_ext.strategy.accumulated_rounds import AccumulatedRound
from tfdist_ext.strategy.local_rounds import LocalRound
from tfdist_ext.strategy.round_base import Apply
from tfdist_ext.strategy.round_base import Pairs
from tfdist_ext.strategy.round_base import Round
from tfdist_ext.strategy.round_base import Steps
from tfdist_ext.type_names import Gradient
from tfdist_ext.type_names import Optimizer
from tfdist_ext.type_names import Original
from tfdist_ext.type_names import Strategy

_alive: weakref.WeakSet[Rounds] = weakref.WeakSet()
_numbers = itertools.count()


def all_rounds() -> list[Rounds]:
    """Rounds of all strategies of the process, in the order of creation."""
    return sorted(_alive, key=lambda rounds: rounds.number)


class Rounds(Steps):
    """The rounds of all optimizers of a strategy.

    Attributes:
        number: number of the object in the process.

    Args:
        strategy: the strategy, to which no reference is kept.
        mode: its `consistency`, not `BSP`.
        collectives: its collectives; None in a single process.
        reduce: see `HybridParallelExtended.sum_deferred`.
    """

    def __init__(
        self,
        strategy: Strategy,
        mode: Accumulate | LocalSteps,
        collectives: Collectives | None,
        reduce: Callable[[list[Any]], list[Any]],
    ) -> None:
        super().__init__(mode, collectives, reduce)
        self._strategy = weakref.ref(strategy)
        self._of = weakref.WeakKeyDictionary[Any, Round]()
        self._outer_slots = weakref.WeakKeyDictionary[Any, dict[int, Any]]()
        self.number = next(_numbers)
        _alive.add(self)

    @property
    def defer(self) -> bool:
        """Whether dense gradients of a step are not exchanged in it.

        A step that is traced or run for a check is one of `BSP`.
        """
        return self.collectives is None or self.collectives.trial is None

    def update(self, optimizer: Optimizer, pairs: Pairs, apply: Apply) -> Any:
        """Updates variables, or notes what is to be updated later.

        Args:
            optimizer: optimizer that is given gradients.
            pairs: gradients of this rank, and their variables.
            apply: gives gradients to the optimizer itself.
        """
        if self.passes or not self.defer:
            return apply(list(pairs))
        _build(optimizer, [variable for _, variable in pairs])
        if optimizer not in self._of:
            self._of[optimizer] = self._new_round(optimizer)
        self._of[optimizer].step(pairs, apply)
        return optimizer.iterations

    def _new_round(self, optimizer: Optimizer) -> Round:
        if isinstance(self.mode, Accumulate):
            return AccumulatedRound(self)
        velocities = self._outer_slots.get(optimizer, {})
        return LocalRound(self, self.mode.outer, velocities)

    def add_velocities(
        self, optimizer: Optimizer, variables: Sequence[Any]
    ) -> None:
        """Adds slots for the outer optimizer of `LocalSteps`.

        Args:
            optimizer: optimizer that is being built.
            variables: the variables that it trains.
        """
        outer = getattr(self.mode, "outer", None)
        if outer is None or optimizer in self._outer_slots:
            return
        self._outer_slots[optimizer] = {
            id(value_of(each)): optimizer.add_variable_from_reference(
                each, "outer_velocity"
            )
            for each in variables
            if marks.shard_spec(each) is None
        }

    def end(self, optimizers: Sequence[Optimizer] | None = None) -> None:
        """Applies what is noted now; all ranks must call.

        Args:
            optimizers: those whose rounds end; None for all.
        """
        for optimizer, round_ in list(self._of.items()):
            if optimizers is None or any(o is optimizer for o in optimizers):
                round_.end(self._strategy(), optimizer)

    def trained(self) -> list[tuple[Any, list[Any]]]:
        """The optimizers that have rounds, and the variables they train."""
        return [
            (optimizer, round_.variables())
            for optimizer, round_ in self._of.items()
        ]

    def are_complete(self) -> bool:
        """Whether no optimizer is in the middle of a round."""
        return all(round_.is_complete() for round_ in self._of.values())

    def drop(self) -> None:
        """Forgets the steps of unfinished rounds."""
        for round_ in self._of.values():
            round_.clear()


def _build(optimizer: Optimizer, variables: Sequence[Any]) -> None:
    """Creates slots outside of a branch, as the optimizer itself would."""
    if keras_internals.is_built(optimizer):
        return
    with tf.init_scope(), tf.name_scope(optimizer.name):
        optimizer.build(variables)


def apply(
    original: Original,
    optimizer: Optimizer,
    grads: Sequence[Gradient],
    trainable_variables: Sequence[Any] | None = None,
) -> Any:
    rounds = _active()
    if rounds is None:
        return original(optimizer, grads, trainable_variables)
    variables = trainable_variables
    if variables is None:
        variables = keras_internals.trained_by(optimizer)

    def give(pairs: list[tuple[Any, Any]]) -> Any:
        return original(optimizer, *map(list, zip(*pairs, strict=True)))

    return rounds.update(
        optimizer, list(zip(grads, variables, strict=True)), give
    )


def apply_gradients(
    original: Original, optimizer: Any, pairs: Any, *args: Any, **kwargs: Any
) -> Any:
    rounds = _active()
    if rounds is None:
        return original(optimizer, pairs, *args, **kwargs)

    def give(pairs: list[tuple[Any, Any]]) -> Any:
        return original(optimizer, pairs, *args, **kwargs)

    return rounds.update(optimizer, list(pairs), give)


def build(
    original: Original,
    optimizer: Optimizer,
    variables: Sequence[Any],
    *args: Any,
) -> Any:
    built = keras_internals.is_built(optimizer)
    result = original(optimizer, variables, *args)
    rounds = _active()
    if rounds is not None and not built:
        rounds.add_velocities(optimizer, variables)
    return result


def _active() -> Rounds | None:
    extended = tf.distribute.get_strategy().extended
    rounds: Rounds | None = getattr(extended, "rounds", None)
    return rounds
