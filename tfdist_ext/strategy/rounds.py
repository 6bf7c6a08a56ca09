# SPDX-License-Identifier: Apache-2.0
"""Steps that are applied or exchanged together: modes other than BSP."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext import consistency
from tfdist_ext import keras_internals
from tfdist_ext import marks
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.comm import calls
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.consistency import Consistency
from tfdist_ext.strategy.gradient_sums import GradientSums
from tfdist_ext.strategy.gradient_sums import Pairs
from tfdist_ext.strategy.gradient_sums import local_variable
from tfdist_ext.type_names import Gradient
from tfdist_ext.type_names import Optimizer
from tfdist_ext.type_names import Original
from tfdist_ext.type_names import Strategy

Apply = Callable[[list[tuple[Any, Any]]], Any]
_COUNT = "consistency/samples"


_alive: weakref.WeakSet[Rounds] = weakref.WeakSet()
_numbers = itertools.count()


def all_rounds() -> list[Rounds]:
    """Rounds of all strategies of the process, in the order of creation."""
    return sorted(_alive, key=lambda rounds: rounds.number)


class Rounds:
    """The rounds of all optimizers of a strategy.

    Attributes:
        mode: the strategy's `consistency`.
        number: number of the object in the process.
        step: the step that runs in a single process, None outside of steps.
        local: whether an optimizer updates dense weights by the gradients of
            this rank now.

    Args:
        strategy: the strategy, to which no reference is kept.
        mode: its `consistency`.
        collectives: its collectives; None in a single process.
        reduce: see `HybridParallelExtended.sum_gradients`.
    """

    def __init__(
        self,
        strategy: Strategy,
        mode: Consistency,
        collectives: Collectives | None,
        reduce: Callable[[list[Any]], list[Any]],
    ) -> None:
        self.mode = mode
        self.collectives = collectives
        self.reduce = reduce
        self.step: calls.Step | None = None
        self.local = False
        self._strategy = weakref.ref(strategy)
        self._of = weakref.WeakKeyDictionary[Any, Round]()
        self._passing = False
        self.number = next(_numbers)
        _alive.add(self)

    @property
    def defer(self) -> bool:
        """Whether dense gradients of a step are not exchanged in it.

        A step that is traced or run for a check is one of `BSP`.
        """
        trial = self.collectives.trial if self.collectives else None
        return not isinstance(self.mode, consistency.BSP) and trial is None

    def current(self) -> calls.Step | None:
        """The step that is traced or run now."""
        return self.collectives.step if self.collectives else self.step

    def samples(self) -> tf.Tensor:
        """Samples of this rank in the step, a float32 scalar."""
        if self.collectives is not None:
            return self.collectives.samples()
        return tf.constant(1.0) if self.step is None else self.step.samples

    @contextlib.contextmanager
    def stepping(self, step: calls.Step) -> Iterator[None]:
        """Makes a step of a single process the current one."""
        outer, self.step = self.step, step
        try:
            yield
        finally:
            self.step = outer

    def update(self, optimizer: Optimizer, pairs: Pairs, apply: Apply) -> Any:
        """Updates variables, or notes what is to be updated later.

        Args:
            optimizer: optimizer that is given gradients.
            pairs: gradients of this rank, and their variables.
            apply: gives gradients to the optimizer itself.
        """
        if self._passing or not self.defer:
            return apply(list(pairs))
        round_ = self._of.get(optimizer)
        if round_ is None:
            round_ = self._of[optimizer] = Round(self)
        _build(optimizer, [variable for _, variable in pairs])
        round_.step(pairs, apply)
        return optimizer.iterations

    @contextlib.contextmanager
    def passing(self, local: bool = False) -> Iterator[None]:
        """Lets optimizers apply in the context what they are given."""
        outer = self._passing, self.local
        self._passing, self.local = True, local
        try:
            yield
        finally:
            self._passing, self.local = outer

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

    def drop(self) -> None:
        """Forgets the steps of unfinished rounds."""
        for round_ in self._of.values():
            round_.clear()


class Round:
    """The steps of one optimizer whose gradients are summed.

    Args:
        rounds: the rounds of the strategy.
    """

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._sums = GradientSums()
        self._count = local_variable(lambda: tf.zeros([], tf.int64), "steps")
        self._samples = local_variable(lambda: tf.zeros([]), "samples")
        self._weighted = False

    def step(self, pairs: Pairs, apply: Apply) -> None:
        """Adds the gradients of a step; the last step applies the sums."""
        step = self._rounds.current()
        self._weighted = step is not None and step.weighted
        with tf.control_dependencies(step.checks_here() if step else []):
            self._add(pairs)
            count = tf.convert_to_tensor(self._count.assign_add(1))

        last = count >= self._rounds.mode.k
        internals.run_if(last, lambda: self._finish(apply))

    def _add(self, pairs: Pairs) -> None:
        if not self._weighted:
            self._sums.add(pairs, None, None)
            return
        samples = self._rounds.samples()
        of_all = samples
        shards = any(marks.gradient_spec(g) is not None for g, _ in pairs)
        collectives = self._rounds.collectives
        if shards and collectives is not None:
            # The gradient of a shard is that of the samples of all ranks.
            (of_all,) = collectives.all_reduce([samples], _COUNT)
        self._sums.add(pairs, samples, of_all)
        self._samples.assign_add(samples)

    def _finish(self, apply: Apply) -> None:
        """Applies the mean of the steps, and starts a new round."""
        collectives = self._rounds.collectives
        total = tf.cast(self._count.read_value(), tf.float32)
        if self._weighted:
            total = self._samples.read_value()
            if collectives is not None:
                (total,) = collectives.all_reduce([total], _COUNT)
        pairs = self._sums.pairs()
        gradients = [_divided(gradient, total) for gradient, _ in pairs]
        if self._weighted and collectives is not None:
            gradients = self._rounds.reduce(gradients)
        with self._rounds.passing():
            apply([(g, v) for g, (_, v) in zip(gradients, pairs, strict=True)])
        self.clear()

    def clear(self) -> None:
        """Forgets the steps of the round."""
        self._sums.clear()
        self._count.assign(0)
        self._samples.assign(0)

    def variables(self) -> list[Any]:
        """Variables that the steps have had gradients of."""
        return self._sums.variables()

    def end(self, strategy: Strategy, optimizer: Optimizer) -> None:
        """Applies the mean of the steps so far, if there are any."""
        if not int(self._count.numpy()):
            return

        def finish() -> None:
            self._finish(optimizer.apply_gradients)

        _run_alone(strategy, finish, self._weighted)


def _divided(gradient: Gradient, total: tf.Tensor) -> Any:
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.math.divide_no_nan(gradient, tf.cast(total, gradient.dtype))
    values = gradient.values
    values = tf.math.divide_no_nan(values, tf.cast(total, values.dtype))
    # The same `dense_shape` tensor, which carries the mark of the gradient.
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)


def _build(optimizer: Optimizer, variables: Sequence[Any]) -> None:
    """Creates slots outside of a branch, as the optimizer itself would."""
    if keras_internals.is_built(optimizer):
        return
    with tf.init_scope(), tf.name_scope(optimizer.name):
        optimizer.build(variables)


def _run_alone(
    strategy: Strategy, function: Callable[[], None], weighted: bool
) -> None:
    """Runs a function in a replica, outside of the program's steps."""
    step = calls.Step(tf.constant(1.0), weighted, "end of a round")
    if strategy.collectives is None:
        with strategy.extended.rounds.stepping(step):
            tf.distribute.Strategy.run(strategy, function)
        return
    step.graph = internals.current_graph()
    with strategy.collectives.stepping(step):
        tf.distribute.Strategy.run(strategy, function)


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


def _active() -> Rounds | None:
    extended = tf.distribute.get_strategy().extended
    rounds: Rounds | None = getattr(extended, "rounds", None)
    return rounds
