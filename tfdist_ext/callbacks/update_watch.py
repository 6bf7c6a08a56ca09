# SPDX-License-Identifier: Apache-2.0
"""Functions that callbacks run around the optimizer's update of a step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.embedding.key_shard import KeyShard
from tfdist_ext.keras_internals import KERAS_3
from tfdist_ext.keras_internals import is_built
from tfdist_ext.keras_internals import value_of
from tfdist_ext.optimizers.row_gradients import without_duplicates
from tfdist_ext.type_names import Gradient
from tfdist_ext.type_names import Logs
from tfdist_ext.type_names import Model
from tfdist_ext.type_names import Nest
from tfdist_ext.type_names import Optimizer
from tfdist_ext.type_names import Original
from tfdist_ext.type_names import StageFunction
from tfdist_ext.type_names import T
from tfdist_ext.type_names import TensorOrSlices
from tfdist_ext.type_names import Variable

keras = tf.keras
Pairs = Sequence[tuple[TensorOrSlices, Variable]]
# Called with the watch, this rank's gradients with their variables, and the
# update.
Around = Callable[["UpdateWatch", Pairs, Callable[[], object]], object]

_APPLY = "apply" if KERAS_3 else "apply_gradients"


class UpdateWatch:
    """Calls functions around the update in every training step of a model.

    Attributes:
        data: data of the step that is traced, as `train_step` gets it.
        loss: loss of that step; None if the step calls no `compute_loss`.
    """

    def __init__(self, model: Model) -> None:
        self.data: Nest = None
        self.loss: tf.Tensor | None = None
        self._watched = model
        self._around: list[Around] = []
        self._optimizer = inner_optimizer(model)
        self._train_step = model.train_step
        self._compute_loss = model.compute_loss
        self._apply = getattr(self._optimizer, _APPLY)
        step = functools.wraps(self._train_step)(self._watched_step)
        # The strategy recognizes a step of Keras's loops by its `__self__`.
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
        """Restores the methods of the model and the optimizer."""
        for owner, name in (
            (self._watched, "train_step"),
            (self._watched, "compute_loss"),
            (self._optimizer, _APPLY),
        ):
            object.__delattr__(owner, name)
        self._watched.train_function = None

    def add(self, around: Around) -> None:
        """Calls `around` in every step, around those that were added before."""
        self._around.append(around)

    @property
    def _watched_step(self) -> Callable[[Nest], Logs]:
        def train_step(data: Nest) -> Logs:
            self.data, self.loss = data, None
            try:
                return self._train_step(data)
            finally:
                self.data = self.loss = None

        return train_step

    @property
    def _noted_loss(self) -> Callable[..., tf.Tensor]:
        def compute_loss(*args: Any, **kwargs: Any) -> tf.Tensor:
            loss = self._compute_loss(*args, **kwargs)
            if self.data is not None:
                self.loss = loss
            return loss

        return compute_loss

    @property
    def _watched_update(self) -> StageFunction:
        def update(gradients: Any, *args: Any, **kwargs: Any) -> Any:
            if self.data is None:  # a training loop of the user
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
        """Creates the optimizer's slots, which cannot be done in a branch."""
        if is_built(self._optimizer):
            return
        if KERAS_3:
            self._optimizer.build([variable for _, variable in pairs])
            return
        with tf.init_scope():
            self._optimizer.build([v for g, v in pairs if g is not None])


def end_watch(
    original: Original[T], model: Model, *args: Any, **kwargs: Any
) -> T:
    try:
        return original(model, *args, **kwargs)
    finally:
        watch = marks.update_watch(model)
        if watch is not None:
            watch.end()
            marks.set_update_watch(model, None)


def watch_of(model: Model) -> UpdateWatch:
    """The watch of a model whose `fit` begins; created if there is none."""
    if marks.update_watch(model) is None:
        marks.set_update_watch(model, UpdateWatch(model))
    found: UpdateWatch = marks.update_watch(model)
    return found


def inner_optimizer(model: Model) -> Optimizer:
    """The optimizer of a model, without a loss scale optimizer around it."""
    return getattr(model.optimizer, "inner_optimizer", model.optimizer)


def collectives_of(model: Model) -> Collectives | None:
    """The collectives of a model's strategy; None in one process."""
    return getattr(model.distribute_strategy, "collectives", None)


_OF_THIS_RANK = {
    "trainable": False,
    "synchronization": tf.VariableSynchronization.NONE,
}


class GradientNorms:
    """Records the sums of squares of the gradients of some variables.

    Args:
        watch: the model's update watch.
        find: returns the variables, of TensorFlow or Keras, once the model is
            built.
        collectives: collectives of the strategy; None in one process.
    """

    def __init__(
        self,
        watch: UpdateWatch,
        find: Callable[[], Sequence[Variable]],
        collectives: Collectives | None,
    ) -> None:
        self._collectives = collectives
        self._find = find
        self._places: dict[int, int] = {}
        self._wanted = tf.Variable(False, **_OF_THIS_RANK)
        self._squares: Any = None
        watch.add(self._around)

    def want(self, wanted: bool) -> None:
        """Sets whether the following steps record the sums."""
        self._wanted.assign(wanted)

    def squares(self) -> np.ndarray:
        """float64 `[variables]`, of the last step that recorded the sums.

        A shard's sum is over this rank's part of the table. The sums are 0
        before the first step. They are NaN where ranks step alone, as no rank
        has the gradient of all samples.
        """
        if self._squares is None:
            return np.zeros([len(self._find())])
        return self._squares.numpy()

    def _around(
        self, watch: UpdateWatch, pairs: Pairs, update: Callable[[], T]
    ) -> T:
        if self._squares is None:
            variables = self._find()
            self._places = {id(value_of(v)): i for i, v in enumerate(variables)}
            with tf.init_scope():
                zeros = tf.zeros([len(variables)], tf.float64)
                self._squares = tf.Variable(zeros, **_OF_THIS_RANK)

        def note() -> bool:
            squares = [tf.zeros([], tf.float64)] * len(self._places)
            for gradient, variable in pairs:
                place = self._places.get(id(value_of(variable)))
                if place is not None:
                    squares[place] = self._square(gradient)
            self._squares.assign(tf.stack(squares))
            return True

        tf.cond(self._wanted, note, lambda: True)
        return update()

    def _square(self, gradient: Gradient) -> tf.Tensor:
        step = self._collectives.step if self._collectives else None
        if step is not None and step.asynchronous:
            return tf.constant(np.nan, tf.float64)
        if marks.gradient_spec(gradient) is None:
            gradient = self._of_all_ranks(gradient)
        gradient = without_duplicates(gradient)
        values = getattr(gradient, "values", gradient)
        # Squares of diverging numbers soon overflow float32.
        return tf.reduce_sum(tf.square(tf.cast(values, tf.float64)))

    def _of_all_ranks(self, gradient: Gradient) -> TensorOrSlices:
        """The gradient over all ranks of an unpartitioned variable."""
        collectives = self._collectives
        if collectives is None:
            return gradient
        label = "gradient norms of tables"
        if not isinstance(gradient, tf.IndexedSlices):
            return collectives.all_reduce([gradient], label, weighted=True)[
                0
            ] / float(collectives.group.world_size)
        share = collectives.share_of_samples(label)
        assert share is not None
        part = share / collectives.group.world_size
        values = gradient.values * tf.cast(part, gradient.values.dtype)
        return tf.IndexedSlices(
            collectives.all_gather(values, f"{label}/rows"),
            collectives.all_gather(gradient.indices, f"{label}/indices"),
            gradient.dense_shape,
        )


class Snapshot:
    """A copy of what the model and the optimizer have on this rank.

    Args:
        model: model whose optimizer is built.
    """

    def __init__(self, model: Model) -> None:
        self._values = [
            (variable, np.array(variable.numpy()))
            for variable in _variables(model)
        ]
        self._keys = [(keys, keys.copy()) for keys in _vocabularies(model)]

    def put_back(self) -> None:
        """Restores the model and the optimizer from the copy."""
        for variable, value in self._values:
            variable.assign(value)
        for keys, copied in self._keys:
            keys.put_back(copied)


class StepState:
    """A copy of what a step changes besides its update: metrics, means.

    Args:
        model: model whose metrics may be built or not.
    """

    def __init__(self, model: Model) -> None:
        self._trained = model
        variables = [
            each
            for each in map(local_variable, model.non_trainable_variables)
            if each.dtype.is_floating
        ]
        variables += map(local_variable, _of_metrics(model))
        self._values = [
            (each, np.array(each.numpy()))
            for each in filter(_is_number, variables)
        ]

    def put_back(self) -> None:
        """Restores the values; metrics created since then are reset."""
        known = {id(variable) for variable, _ in self._values}
        for metric in self._trained.metrics:
            own = [local_variable(each) for each in metric.variables]
            if any(_is_number(v) and id(v) not in known for v in own):
                metric.reset_state()
        for variable, value in self._values:
            variable.assign(value)


def _of_metrics(model: Model) -> list[Variable]:
    return [each for metric in model.metrics for each in metric.variables]


def variables_of_optimizer(optimizer: Optimizer) -> list[Variable]:
    """All variables of an optimizer and of the optimizers of single tables."""
    found = optimizer.variables
    found = list(found() if callable(found) else found)
    for own in getattr(optimizer, "table_optimizers", ()):
        found += variables_of_optimizer(own)
    return found


def _variables(model: Model) -> list[tf.Variable]:
    variables = [*model.weights, *variables_of_optimizer(model.optimizer)]
    inner = inner_optimizer(model)
    if inner is not model.optimizer:
        variables += variables_of_optimizer(inner)
    unique = {id(each): each for each in map(local_variable, variables)}
    return [each for each in unique.values() if _is_number(each)]


def _is_number(variable: tf.Variable) -> bool:
    return bool(variable.dtype.is_numpy_compatible)


def local_variable(variable: Variable) -> tf.Variable:
    """The TensorFlow variable that has a variable's value on this rank."""
    native = value_of(variable)
    strategy = getattr(native, "distribute_strategy", None)
    if strategy is None:
        return native
    return strategy.experimental_local_results(native)[0]


def _vocabularies(model: Model) -> list[KeyShard]:
    found = map(marks.keys_of, model.trainable_variables)
    return [keys for keys in found if keys is not None]
