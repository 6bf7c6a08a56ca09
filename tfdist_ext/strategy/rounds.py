# SPDX-License-Identifier: Apache-2.0
"""Steps that are applied or exchanged together: modes other than BSP.

Optimizers give their gradients to the rounds of the strategy. A round ends by
its mode, after epochs of `fit`, before evaluation and before files.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import weakref
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext import keras_internals
from tfdist_ext import marks
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.consistency import ASP
from tfdist_ext.consistency import BAP
from tfdist_ext.consistency import SSP
from tfdist_ext.consistency import Accumulate
from tfdist_ext.consistency import Consistency
from tfdist_ext.consistency import LocalSteps
from tfdist_ext.embedding.row_copies import RowCopies
from tfdist_ext.keras_internals import value_of
from tfdist_ext.strategy.accumulated_rounds import AccumulatedRound
from tfdist_ext.strategy.local_rounds import LocalRound
from tfdist_ext.strategy.owner_rounds import OwnerRound
from tfdist_ext.strategy.round_base import Apply
from tfdist_ext.strategy.round_base import Pairs
from tfdist_ext.strategy.round_base import Round
from tfdist_ext.strategy.round_base import Steps
from tfdist_ext.strategy.significant_rounds import SignificantRound
from tfdist_ext.strategy.significant_rounds import shares_held_back
from tfdist_ext.type_names import Gradient
from tfdist_ext.type_names import Logs
from tfdist_ext.type_names import Model
from tfdist_ext.type_names import Optimizer
from tfdist_ext.type_names import Original
from tfdist_ext.type_names import StageFunction
from tfdist_ext.type_names import Strategy
from tfdist_ext.type_names import T
from tfdist_ext.type_names import TensorOrSlices
from tfdist_ext.type_names import Variable

keras = tf.keras

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
        mode: Consistency,
        collectives: Collectives | None,
        reduce: Callable[[list[TensorOrSlices]], list[TensorOrSlices]],
    ) -> None:
        super().__init__(mode, collectives, reduce)
        if collectives is not None:
            collectives.keeps_rows = getattr(mode, "tables", False)
            if getattr(mode, "row_cache", False):
                collectives.row_copies = RowCopies()
        self._strategy = weakref.ref(strategy)
        self._of = weakref.WeakKeyDictionary[Optimizer, Round]()
        self._created = 0
        self._outer_slots = weakref.WeakKeyDictionary[
            Optimizer, dict[int, Variable]
        ]()
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
            round_ = self._new_round(optimizer)
            round_.number = self._created
            self._of[optimizer] = round_
            self._created += 1
        self._of[optimizer].step(optimizer, pairs, apply)
        return optimizer.iterations

    def _new_round(self, optimizer: Optimizer) -> Round:
        if isinstance(self.mode, Accumulate):
            return AccumulatedRound(self)
        if isinstance(self.mode, ASP):
            return SignificantRound(self)
        if isinstance(self.mode, SSP | BAP):
            return OwnerRound(self, self._strategy(), optimizer)
        assert isinstance(self.mode, LocalSteps)
        velocities = self._outer_slots.get(optimizer, {})
        return LocalRound(self, self.mode.outer, velocities)

    def add_velocities(
        self, optimizer: Optimizer, variables: Sequence[Variable]
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
        for optimizer, round_ in self._to_end(optimizers):
            round_.end(self._strategy(), optimizer)

    def _to_end(
        self, optimizers: Sequence[Optimizer] | None
    ) -> list[tuple[Optimizer, Round]]:
        """The rounds of some optimizers, or those that all ranks have.

        Python deletes the optimizer of a model that the program has dropped
        when its garbage collector runs, on each rank at another time. The
        steps of such a round are lost on all ranks.
        """
        if optimizers is not None:
            wanted = {id(each) for each in optimizers}
            return [e for e in self._of.items() if id(e[0]) in wanted]
        if self.collectives is None or self._created == 0:
            return list(self._of.items())
        if isinstance(self.mode, Accumulate):
            # Complete rounds exchange nothing, so one rank may end them.
            if not self.are_complete():
                gc.collect()
            return list(self._of.items())
        known = list(self._of.items())  # Nothing of it is deleted now.
        mine = [round_.number for _, round_ in known]
        everyone = self.collectives.all_gather(
            tf.constant(mine, tf.int64), "consistency/rounds"
        ).numpy()
        ranks = self.collectives.group.world_size
        found = []
        for optimizer, round_ in known:
            if np.count_nonzero(everyone == round_.number) == ranks:
                found.append((optimizer, round_))
            else:
                round_.clear()
        return found

    def trained(self) -> list[tuple[Optimizer, list[Variable]]]:
        """The optimizers that have rounds, and the variables they train."""
        return [
            (optimizer, round_.variables())
            for optimizer, round_ in self._of.items()
        ]

    def counts(self) -> dict[int, np.ndarray] | None:
        """Numbers of this rank that `shares` needs; None if there are none.

        Returns:
            Numbers by the round, or under -1 those of all rounds.
        """
        if self.collectives is not None and self.collectives.row_copies:
            return {-1: self.collectives.row_copies.counts().numpy()}
        if not isinstance(self.mode, ASP):
            return None
        return {
            each.number: each.held_back().numpy()
            for each in self._of.values()
            if isinstance(each, SignificantRound)
        }

    def shares(
        self,
        counts: dict[int, np.ndarray],
        before: dict[int, np.ndarray] | None = None,
        *,
        of_all: bool = False,
    ) -> dict[str, float]:
        """Logs of what was held back, or found in copies of rows.

        Args:
            counts: what `counts` has returned.
            before: what it returned earlier; shares are of the time since then.
            of_all: whether to add up the numbers of all ranks, which must call.
        """
        total = np.zeros(4 if isinstance(self.mode, ASP) else 2)
        for number, found in counts.items():
            total += found - (before or {}).get(number, 0)
        if of_all and self.collectives is not None:
            (summed,) = self.collectives.all_reduce(
                [tf.constant(total)], "consistency/counts"
            )
            total = summed.numpy()
        if isinstance(self.mode, ASP):
            return shares_held_back(total.tolist())
        asked, hits = map(float, total)
        return {"row_cache_hits": hits / max(asked, 1.0)}

    def are_complete(self) -> bool:
        """Whether no optimizer is in the middle of a round."""
        return all(round_.is_complete() for round_ in self._of.values())

    def drop(self) -> None:
        """Forgets the steps of unfinished rounds."""
        for round_ in self._of.values():
            round_.clear()


def _build(optimizer: Optimizer, variables: Sequence[Variable]) -> None:
    """Creates slots outside of a branch, as the optimizer itself would."""
    if keras_internals.is_built(optimizer):
        return
    with tf.init_scope(), tf.name_scope(optimizer.name):
        optimizer.build(variables)


def apply(
    original: Original[T],
    optimizer: Optimizer,
    grads: Sequence[Gradient],
    trainable_variables: Sequence[Variable] | None = None,
) -> T:
    rounds = _active()
    if rounds is None:
        return original(optimizer, grads, trainable_variables)
    variables = trainable_variables
    if variables is None:
        variables = keras_internals.trained_by(optimizer)

    def give(pairs: list[tuple[TensorOrSlices, Variable]]) -> T:
        return original(optimizer, *map(list, zip(*pairs, strict=True)))

    return rounds.update(
        optimizer, list(zip(grads, variables, strict=True)), give
    )


def apply_gradients(
    original: Original[T],
    optimizer: Optimizer,
    pairs: Iterable[tuple[Gradient, Variable]],
    *args: Any,
    **kwargs: Any,
) -> T:
    rounds = _active()
    if rounds is None:
        return original(optimizer, pairs, *args, **kwargs)

    def give(pairs: list[tuple[TensorOrSlices, Variable]]) -> T:
        return original(optimizer, pairs, *args, **kwargs)

    return rounds.update(optimizer, list(pairs), give)


def build(
    original: Original[T],
    optimizer: Optimizer,
    variables: Sequence[Variable],
    *args: Any,
) -> T:
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


class _EndRound(keras.callbacks.Callback):  # type: ignore[name-defined]
    """Ends the round of a model before other callbacks see the epoch's end."""

    _counts: dict[int, np.ndarray] | None = None

    def on_train_begin(self, logs: Logs = None) -> None:
        rounds = _rounds_of(self.model)
        self._counts = None if rounds is None else rounds.counts()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        _end_of(self.model)
        rounds = _rounds_of(self.model)
        if rounds is None or self._counts is None or logs is None:
            return
        before, self._counts = self._counts, rounds.counts()
        assert self._counts is not None
        logs.update(rounds.shares(self._counts, before, of_all=True))


def end_after_epochs(
    original: Original[T], model: Model, *args: Any, **kwargs: Any
) -> T:
    rounds = _rounds_of(model)
    if rounds is None:
        return original(model, *args, **kwargs)
    bound = inspect.signature(original).bind(model, *args, **kwargs)
    given: Any = bound.arguments.get("callbacks")
    own = _EndRound()
    of_caller = isinstance(given, keras.callbacks.CallbackList)
    if of_caller:  # Keras trains with it unchanged.
        own.set_model(model)
        given.callbacks.insert(0, own)
    else:
        callbacks = [own, *tf.nest.flatten(given or [])]
        bound.arguments["callbacks"] = callbacks
    _end_of(model)
    try:
        return original(*bound.args, **bound.kwargs)
    except BaseException:
        rounds.drop()  # The next step starts a round.
        raise
    finally:
        if of_caller:
            given.callbacks.remove(own)


def end_before(
    original: Original[T], model: Model, *args: Any, **kwargs: Any
) -> T:
    """Ends the rounds of a model before it is evaluated or written."""
    _end_of(model)
    return original(model, *args, **kwargs)


def end_before_checkpoint(
    objects_of: Callable[[tf.train.Checkpoint], Sequence[object]],
) -> StageFunction:
    """Creates a stage that ends the rounds of what a checkpoint has.

    Args:
        objects_of: returns the objects of a checkpoint.
    """

    def stage(
        original: Original[T],
        checkpoint: tf.train.Checkpoint,
        *args: Any,
        **kwargs: Any,
    ) -> T:
        every = all_rounds()
        if every and tf.executing_eagerly():
            found = {id(each) for each in objects_of(checkpoint)}
            for rounds in every:
                rounds.end(_in(found, rounds))
        return original(checkpoint, *args, **kwargs)

    return stage


def _in(objects: set[int], rounds: Rounds) -> Sequence[Optimizer]:
    """Optimizers of which a checkpoint has the variables."""
    return [
        optimizer
        for optimizer, variables in rounds.trained()
        if id(optimizer) in objects
        or any(id(value_of(each)) in objects for each in variables)
    ]


def _rounds_of(model: Model) -> Rounds | None:
    strategy = getattr(model, "distribute_strategy", None)
    return getattr(getattr(strategy, "extended", None), "rounds", None)


def _end_of(model: Model) -> None:
    rounds = _rounds_of(model)
    if rounds is not None and tf.executing_eagerly():
        rounds.end()
