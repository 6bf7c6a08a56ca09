# SPDX-License-Identifier: Apache-2.0
"""What rounds of all modes have in common: the step, and their counts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.comm import calls
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.embedding.sharded_variable import local_variable
from tfdist_ext.type_names import Optimizer
from tfdist_ext.type_names import Strategy
from tfdist_ext.type_names import TensorOrSlices
from tfdist_ext.type_names import Variable

Pairs = Sequence[tuple[TensorOrSlices, Variable]]
Apply = Callable[[list[tuple[TensorOrSlices, Variable]]], Any]
# Label of the exchanged numbers of samples.
COUNT = "consistency/samples"


class Steps:
    """The step that runs, and how optimizers apply what they are given.

    Attributes:
        mode: the strategy's `consistency`, not `BSP`; rounds know its class.
        collectives: its collectives; None in a single process.
        reduce: see `HybridParallelExtended.sum_deferred`.
        alone: the step that runs in a single process, None outside of steps.
        passes: whether optimizers apply at once what they are given.
        local: whether they apply dense gradients of this rank as they are.
    """

    def __init__(
        self,
        mode: Any,
        collectives: Collectives | None,
        reduce: Callable[[list[TensorOrSlices]], list[TensorOrSlices]],
    ) -> None:
        self.mode = mode
        self.collectives = collectives
        self.reduce = reduce
        self.alone: calls.Step | None = None
        self.passes = False
        self.local = False

    def current(self) -> calls.Step | None:
        """The step that is traced or run now."""
        return self.collectives.step if self.collectives else self.alone

    def samples(self) -> tf.Tensor:
        """Samples of this rank in the step, a float32 scalar."""
        if self.collectives is not None:
            return self.collectives.samples()
        return tf.constant(1.0) if self.alone is None else self.alone.samples

    @contextlib.contextmanager
    def stepping(self, step: calls.Step) -> Iterator[None]:
        """Makes a step of a single process the current one."""
        outer, self.alone = self.alone, step
        try:
            yield
        finally:
            self.alone = outer

    @contextlib.contextmanager
    def passing(self, local: bool = False) -> Iterator[None]:
        """Lets optimizers apply in the context what they are given."""
        outer = self.passes, self.local
        self.passes, self.local = True, local
        try:
            yield
        finally:
            self.passes, self.local = outer


class Round:
    """The steps of one optimizer that belong together.

    Attributes:
        asynchronous: whether each rank steps alone, see `calls.Step`.
        number: number of the round in the strategy, the same on all ranks.

    Args:
        steps: what the rounds of the strategy have in common.
    """

    asynchronous = False
    number = 0

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._count = local_variable(lambda: tf.zeros([], tf.int64), "steps")
        self._samples = local_variable(lambda: tf.zeros([]), "samples")
        self._weighted = False
        self._ends: dict[Hashable, Callable[[], None]] = {}

    def step(self, optimizer: Optimizer, pairs: Pairs, apply: Apply) -> None:
        """Makes a step of the round; the last one ends it.

        Args:
            optimizer: the optimizer, to which the round keeps no reference.
            pairs: gradients of this rank, and their variables.
            apply: gives gradients to the optimizer.
        """
        raise NotImplementedError

    def clear(self) -> None:
        """Forgets the steps of the round."""
        self._count.assign(0)
        self._samples.assign(0)

    def is_complete(self) -> bool:
        """Whether the round has no steps yet."""
        return int(self._count.numpy()) == 0

    def variables(self) -> list[Variable]:
        """Variables that the steps have had gradients of."""
        raise NotImplementedError

    def end(self, strategy: Strategy, optimizer: Optimizer) -> None:
        """Ends the round now, if it has any steps; all ranks must call."""
        raise NotImplementedError

    def _begin_step(self) -> list[tf.Tensor]:
        """Notes the kind of the step; returns checks of its ids."""
        step = self._steps.current()
        self._weighted = step is not None and step.weighted
        return step.checks_here() if step else []

    def _run_alone(
        self, strategy: Strategy, key: Hashable, function: Callable[[], None]
    ) -> None:
        """Runs a function in a replica, outside of the program's steps.

        Args:
            strategy: the strategy.
            key: tells the function from others of the round.
            function: function that may exchange.
        """
        if key not in self._ends:
            self._ends[key] = tf.function(
                lambda: self._in_replica(strategy, function), autograph=False
            )
        self._ends[key]()

    def _in_replica(
        self, strategy: Strategy, function: Callable[[], None]
    ) -> None:
        step = calls.Step(
            *(tf.constant(1.0), self._weighted, "end of a round"),
            graph=internals.current_graph(),
            asynchronous=self.asynchronous,
        )
        collectives = self._steps.collectives
        stepping = collectives or self._steps
        with stepping.stepping(step):
            tf.distribute.Strategy.run(strategy, function)
