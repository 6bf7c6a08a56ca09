# SPDX-License-Identifier: Apache-2.0
"""What callbacks add to a training step, around the optimizer's update.

A model is watched from the start of a `fit` to its end, failed or not. The
step is traced anew for it, so that a `fit` without such callbacks costs what
it did.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext.keras_internals import KERAS_3
from tfdist_ext.keras_internals import is_built

keras = tf.keras
Nest = Any
Pairs = Sequence[tuple[Any, Any]]
# Called with the watch, gradients of this rank with their variables, and the
# update.
Around = Callable[["UpdateWatch", Pairs, Callable[[], Any]], Any]

_APPLY = "apply" if KERAS_3 else "apply_gradients"


class UpdateWatch:
    """Calls functions around the update in every training step of a model.

    Attributes:
        data: of the step that is traced, as `train_step` gets it.
        loss: of that step, None of steps that call no `compute_loss`.
    """

    def __init__(self, model: Any) -> None:
        self.data: Nest = None
        self.loss: Any = None
        self._watched = model
        self._around: list[Around] = []
        self._optimizer = inner_optimizer(model)
        self._train_step = model.train_step
        self._compute_loss = model.compute_loss
        self._apply = getattr(self._optimizer, _APPLY)
        step = functools.wraps(self._train_step)(self._watched_step)
        # By it steps of Keras's loops are told from others.
        step.__self__ = model  # type: ignore[attr-defined]
        object.__setattr__(model, "train_step", step)
        object.__setattr__(
            model,
            "compute_loss",
            functools.wraps(self._compute_loss)(self._noted_loss),
        )
        object.__setattr__(
            self._optimizer,
            _APPLY,
            functools.wraps(self._apply)(self._watched_update),
        )
        model.train_function = None

    def end(self) -> None:
        """Leaves model and optimizer as they were."""
        for owner, name in (
            (self._watched, "train_step"),
            (self._watched, "compute_loss"),
            (self._optimizer, _APPLY),
        ):
            object.__delattr__(owner, name)
        self._watched.train_function = None

    def add(self, around: Around) -> None:
        """Calls `around` in every step, about those that came before it."""
        self._around.append(around)

    @property
    def _watched_step(self) -> Any:
        def train_step(data: Nest) -> Any:
            self.data, self.loss = data, None
            try:
                return self._train_step(data)
            finally:
                self.data = self.loss = None

        return train_step

    @property
    def _noted_loss(self) -> Any:
        def compute_loss(*args: Any, **kwargs: Any) -> Any:
            loss = self._compute_loss(*args, **kwargs)
            if self.data is not None:
                self.loss = loss
            return loss

        return compute_loss

    @property
    def _watched_update(self) -> Any:
        def update(gradients: Any, *args: Any, **kwargs: Any) -> Any:
            if self.data is None:  # a loop of the user's own
                return self._apply(gradients, *args, **kwargs)
            if KERAS_3:
                variables = args[0] if args else kwargs["trainable_variables"]
                gradients = list(gradients)
                pairs = list(zip(gradients, variables, strict=True))
            else:
                pairs = gradients = list(gradients)
            self._build(pairs)
            run = functools.partial(self._apply, gradients, *args, **kwargs)
            pairs = [pair for pair in pairs if pair[0] is not None]
            for around in self._around:
                run = functools.partial(around, self, pairs, run)
            return run()

        return update

    def _build(self, pairs: Pairs) -> None:
        """Lets the optimizer make its slots, which no branch can."""
        if is_built(self._optimizer):
            return
        if KERAS_3:
            self._optimizer.build([variable for _, variable in pairs])
            return
        with tf.init_scope():
            self._optimizer.build([v for g, v in pairs if g is not None])


def end_watch(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return original(model, *args, **kwargs)
    finally:
        watch = marks.update_watch(model)
        if watch is not None:
            watch.end()
            marks.set_update_watch(model, None)


def of(model: Any) -> UpdateWatch:
    """The watch of a model whose `fit` begins; made if there is none."""
    if marks.update_watch(model) is None:
        marks.set_update_watch(model, UpdateWatch(model))
    found: UpdateWatch = marks.update_watch(model)
    return found


def inner_optimizer(model: Any) -> Any:
    """The optimizer of a model, that within one of a loss scale."""
    return getattr(model.optimizer, "inner_optimizer", model.optimizer)


def collectives_of(model: Any) -> Any:
    """Those of the strategy of a model; None with a single process."""
    return getattr(model.distribute_strategy, "collectives", None)
