# SPDX-License-Identifier: Apache-2.0
"""When the steps begin that a growing vocabulary counts.

A step may look up several times, in graphs that know nothing of each other:
eagerly, in branches, in functions. Keys of a step must not be evicted before
their gradients are applied. So a lookup that a gradient tape records begins a
step if an optimizer has applied gradients since the last one did.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.patching import Need
from tfdist_ext.patching import hold

keras = tf.keras


class KeySteps:
    """The steps of one vocabulary on this rank."""

    def __init__(self) -> None:
        with tf.init_scope():
            # Of this rank, and on the host.
            self._pending = tf.Variable(
                False,
                trainable=False,
                synchronization=tf.VariableSynchronization.NONE,
                name="pending_keys",
            )
        self._traced: Any = None
        _alive.add(self)
        hold(Need.VOCABULARY, self)

    def may_begin(self) -> bool:
        """Whether a lookup that is traced now is the first of its graph."""
        graph = internals.current_graph()
        if graph is None:
            return True
        if self._traced is not None and self._traced() is graph:
            return False
        self._traced = weakref.ref(graph)
        return True

    def is_pending(self) -> tf.Tensor:
        """bool scalar: keys of the step wait for their gradients."""
        return tf.convert_to_tensor(self._pending)

    def set_pending(self, pending: Any) -> None:
        """Says whether keys of the step wait for their gradients.

        Args:
            pending: bool scalar.
        """
        self._pending.assign(pending)


_alive: weakref.WeakSet[KeySteps] = weakref.WeakSet()


def end_steps(original: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(*args, **kwargs)
    for steps in list(_alive):
        steps.set_pending(False)
    return result


def in_step(
    vocabularies: list[KeySteps],
    learn: bool,
    look_up: Callable[[bool], Any],
) -> Any:
    """Looks up keys, and begins a step first if that is due.

    Args:
        vocabularies: of all keys.
        learn: whether they learn from the lookup.
        look_up: is called with whether a step begins; returns tensors.

    Returns:
        What it returns.
    """
    if not learn:
        return look_up(False)
    first = [each.may_begin() for each in vocabularies]  # all are told
    pending = [each.is_pending() for each in vocabularies]
    if not all(first):
        found = look_up(False)
    elif tf.executing_eagerly():
        found = look_up(not any(map(bool, pending)))
    else:
        found = tf.cond(
            tf.reduce_any(tf.stack(pending)),
            lambda: look_up(False),
            lambda: look_up(True),
        )
    if internals.is_recording():
        for each in vocabularies:
            each.set_pending(True)
    return found
