# SPDX-License-Identifier: Apache-2.0
"""Numbers of exchanges on the wire, the same on all ranks without talking."""

from __future__ import annotations

import collections
import hashlib
import itertools
import weakref

import tensorflow as tf

from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.collectives.calls import Turns
from tfdist_ext.collectives.step import Step

# Functions within steps that have tags of their own at a time: every tag has
# buffers. Those that share them take turns.
_FUNCTIONS = 64


class Tags:
    """Names exchanges by what makes them, their label, and how often so far.

    What makes them is the function that is the step, a `tf.function` within
    it or a function of a dataset: these are numbered as they are traced, in
    the order of the program.

    Args:
        turns: of the calls outside of steps.
    """

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._labels: weakref.WeakKeyDictionary[
            tf.Graph, collections.Counter[str]
        ] = weakref.WeakKeyDictionary()
        self._functions: weakref.WeakKeyDictionary[tf.Graph, int] = (
            weakref.WeakKeyDictionary()
        )
        self._next = itertools.count()

    def place(self, step: Step | None, label: str) -> str:
        """What tells the next exchange of a label from all others.

        Args:
            step: the current one, None outside of steps.
            label: of the exchange.
        """
        return f"{self._role(step)}/{label}#{self.occurrence(step, label)}"

    def occurrence(self, step: Step | None, label: str) -> int:
        """How many exchanges had the label so far.

        Args:
            step: see `place`.
            label: of exchanges.
        """
        return self._counter(step)[label]

    def take(
        self, step: Step | None, label: str, kind: str, dtype: tf.DType
    ) -> int:
        """Even number for an exchange, which the step notes.

        Args:
            step: see `place`.
            label: of the exchange.
            kind: of the exchange.
            dtype: of what is exchanged.
        """
        place = self.place(step, label)
        if step is not None:
            own = step.inner_function() is None
            line = f"{label}#{self.occurrence(step, label)}" if own else place
            step.exchanges += [f"{line} {kind} {dtype.name}"]
        self._counter(step)[label] += 1
        # Of 2^61 numbers: among a million places two have the same with a
        # probability of 2e-7.
        digest = hashlib.blake2b(place.encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "little") >> 3) << 1

    def _role(self, step: Step | None) -> str:
        if step is None:
            return self._turns.role()
        function = step.inner_function()
        if function is None:
            return step.role
        if function not in self._functions:
            self._functions[function] = next(self._next) % _FUNCTIONS
        return f"function {self._functions[function]}"

    def _counter(self, step: Step | None) -> collections.Counter[str]:
        function = step.inner_function() if step else internals.current_graph()
        if function is not None:
            return self._labels.setdefault(function, collections.Counter())
        return step.labels if step else collections.Counter()
