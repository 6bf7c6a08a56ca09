# SPDX-License-Identifier: Apache-2.0
"""Runs a step as one process and as the ranks, and compares the results.

The first step of `fit` is checked before it is trained. `check_step` checks
the step of a custom loop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import random
import warnings
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext import keras_internals
from tfdist_ext.comm import calls
from tfdist_ext.numbers import check_report
from tfdist_ext.numbers import check_runs
from tfdist_ext.numbers import model_state
from tfdist_ext.numbers.check_runs import CannotCheck
from tfdist_ext.type_names import EpochIterator
from tfdist_ext.type_names import Logs
from tfdist_ext.type_names import Model
from tfdist_ext.type_names import Nest
from tfdist_ext.type_names import Optimizer
from tfdist_ext.type_names import Original
from tfdist_ext.type_names import Strategy
from tfdist_ext.type_names import TrainFunction
from tfdist_ext.type_names import Variable

keras = tf.keras
_LOG = logging.getLogger("tfdist_ext")


@dataclasses.dataclass(frozen=True)
class Subject:
    """The step that is checked.

    Attributes:
        name: name of the step in the report.
        step: function of a batch of this rank, as passed to `strategy.run`.
        models: models whose variables the step may change, as far as known.
        optimizers: optimizers that are not attributes of the models.
        of_keras: whether it is a step of Keras's loops.
        eager: whether it runs without a graph.
        limits_memory: whether the check is skipped if it needs much memory.
    """

    name: str
    step: Callable[[Nest], Nest]
    models: tuple[Model, ...] = ()
    optimizers: tuple[Optimizer, ...] = ()
    of_keras: bool = True
    eager: bool = False
    limits_memory: bool = True


def check(
    strategy: Strategy, subject: Subject, batch: Nest, signature: Nest
) -> check_report.CheckReport:
    """Compares one step; all ranks must call this, and get the same report.

    Args:
        strategy: strategy of several ranks.
        subject: the step that is checked.
        batch: batch of this rank.
        signature: specs of the batch with which the step is traced to train.

    Raises:
        CannotCheck: the step cannot be compared; raised on all ranks.
    """
    layers = [
        layer
        for model in subject.models
        for layer in keras_internals.layers_of(model)
    ]
    with _same_generators(), keras_internals.same_seeds(layers):
        return _compared(strategy, subject, batch, signature)


@contextlib.contextmanager
def _same_generators() -> Iterator[None]:
    """Restores Python's and NumPy's generators, which a trace may use."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def _compared(
    strategy: Strategy, subject: Subject, batch: Nest, signature: Nest
) -> check_report.CheckReport:
    collectives = strategy.collectives
    all_of_it = check_runs.whole_batch_of(batch, collectives)
    of_keras = subject.of_keras
    opened = check_runs.signature_of(all_of_it)
    whole = check_runs.Run(strategy, subject.step, opened, True, of_keras)
    traced: list[check_runs.Run] = [whole]
    if subject.eager:
        ranks: check_runs.EagerRun | check_runs.Run = check_runs.EagerRun(
            strategy, subject.step, of_keras
        )
    else:
        ranks = check_runs.Run(
            strategy, subject.step, signature, False, of_keras
        )
        traced.append(ranks)
    snapshot = model_state.Snapshot(_held(strategy, subject, traced))
    try:
        wholes = [whole(all_of_it, snapshot)]
        if whole.is_random:
            snapshot.restore(random=False)
            wholes.append(whole(all_of_it, snapshot))
        snapshot.restore(random=False)
        outcome = ranks(batch, snapshot)
    finally:
        snapshot.restore(random=True)
    sums = [] if of_keras else sorted(outcome.logs)
    compared = check_report.compare(
        wholes, outcome, snapshot, sums, collectives
    )
    changed = {snapshot.held[i].name for i in wholes[0].changed}
    shown = _shown_metrics(subject, changed)
    judged = [
        each
        for each in compared
        if not (each.kind == "log" and each.name in shown)
    ]
    found = check_report.findings(
        judged, _circumstances(strategy, subject, whole)
    )
    return check_report.report_of(
        subject.name, strategy.world_size, compared, found
    )


def _held(
    strategy: Strategy, subject: Subject, traced: Sequence[check_runs.Run]
) -> list[model_state.Held]:
    """Variables that the runs may change, if memory allows to copy them."""
    slots = [v for m in subject.models for v in model_state.slots_of(m)]
    for optimizer in subject.optimizers:
        slots += model_state.variables_of_optimizer(optimizer)
    held = model_state.held_by(
        [handle for run in traced for handle in run.handles],
        [v for m in subject.models for v in _variables_of(m)],
        slots,
        [variable for run in traced for variable in run.variables],
    )
    if subject.limits_memory:
        how = "Force it with check='always'."
        check_runs.require_memory(held, strategy.collectives, how)
    return held


def _circumstances(
    strategy: Strategy, subject: Subject, whole: check_runs.Run
) -> check_report.Circumstances:
    return check_report.Circumstances(
        strategy.world_size,
        max(
            check_runs.tolerance_of(model, strategy.collectives)
            for model in subject.models or (None,)
        ),
        [n for m in subject.models for n in check_runs.unsynchronized(m)],
        whole.is_random,
        subject.of_keras,
    )


def _shown_metrics(subject: Subject, changed: set[str]) -> set[str]:
    """Names of metrics that the step has updated.

    The result of a single step is only displayed. The results of an epoch
    are computed from the metrics' states, and the states are compared.
    """
    shown: set[str] = set()
    for model in subject.models:
        shown.update(model.get_metrics_result())  # Also of nested metrics.
        for metric in model.metrics:
            if not changed.intersection(
                map(model_state.label_of, metric.variables)
            ):
                shown.discard(metric.name)
    return shown


def _variables_of(model: Model) -> Iterable[Variable]:
    yield from model.variables
    for metric in model.metrics:
        yield from metric.variables


def attempt(
    strategy: Strategy,
    subject: Subject,
    batch: Nest,
    signature: Nest,
    required: bool,
) -> check_report.CheckReport | None:
    """Checks a step and logs the result; None if it cannot be checked.

    An error in a check that is not required does not end the training.

    Args:
        strategy: see `check`.
        subject: see `check`.
        batch: see `check`.
        signature: see `check`.
        required: whether a step that cannot be checked is an error.

    Raises:
        ValueError: the check is required and the step cannot be checked.
    """
    try:
        found = check(strategy, subject, batch, signature)
    except CannotCheck as reason:
        _skip(strategy, subject, str(reason), required)
        return None
    except Exception as error:
        # All ranks get here, by their own error or by another rank's.
        strategy.collectives.give_up(f"check of {subject.name}", error)
        text = " ".join(str(error).split())[-300:]
        _skip(strategy, subject, f"{type(error).__name__}: {text}", required)
        return None
    check_report.show(found, strategy.rank)
    return found


def _skip(
    strategy: Strategy, subject: Subject, reason: str, required: bool
) -> None:
    if required:
        raise ValueError(
            f"check='error': {subject.name} cannot be compared with one "
            f"process, as {reason}. Use check='auto' to train unchecked."
        )
    if strategy.rank == 0:
        _LOG.info(
            "not checked: %s on %d ranks against one process, as %s",
            *(subject.name, strategy.world_size, reason),
        )


def check_first_step(
    original: Original[TrainFunction], model: Model, *args: Any, **kwargs: Any
) -> TrainFunction:
    before = model.train_function
    result = original(model, *args, **kwargs)
    function = model.train_function
    strategy = model.distribute_strategy
    several = getattr(strategy, "collectives", None) is not None
    if not several or function is before or strategy.collectives.check == "off":
        return result
    if strategy.collectives.group.rank == 0:
        _warn_of_normalization(model)
    first = _First(model, function)
    model.train_function = first
    return first if result is function else result


def _warn_of_normalization(model: Model) -> None:
    """Warns of layers that train differently from one process."""
    names = check_runs.unsynchronized(model)
    if names:
        warnings.warn(
            f"BatchNormalization of {', '.join(names[:3])}"
            f"{' and others' if len(names) > 3 else ''} "
            "normalizes by the samples of each rank, while one process "
            "normalizes by all samples. Pass synchronized=True to normalize "
            "by the whole batch.",
            stacklevel=2,
        )


class _First:
    """Keras's train function, with a check before its first batch.

    Args:
        model: Keras model.
        function: train function, which takes an iterator.
    """

    def __init__(self, model: Model, function: TrainFunction) -> None:
        self._trained = model
        self._function = function
        self._is_first = True

    def __call__(self, iterator: EpochIterator) -> Logs:
        if self._trained.train_function is self:
            self._trained.train_function = self._function
        if self._is_first:
            self._is_first = False
            iterator = _checked(self._trained, iterator)
        return self._function(iterator)


def _checked(model: Model, iterator: EpochIterator) -> EpochIterator:
    """Checks the first batch, and returns an iterator of the read batches."""
    strategy = model.distribute_strategy
    mode = strategy.collectives.check
    wanted = mode in ("always", "error")
    if not isinstance(iterator, tf.data.Iterator) or not (
        wanted or check_runs.needs_check(model)
    ):
        return iterator
    batches = []
    for _ in range(keras_internals.steps_of_call(model)):
        try:
            batches.append(next(iterator))
        except (StopIteration, tf.errors.OutOfRangeError):
            break
    if not batches:
        return iterator
    subject = Subject(
        f"step 1 of `{type(model).__name__}`",
        model.train_step,
        (model,),
        eager=model.run_eagerly,
        limits_memory=not wanted,
    )
    spec = iterator.element_spec
    required = mode == "error"
    found = attempt(strategy, subject, batches[0], spec, required)
    if found is not None and not found.ok and required:
        raise ValueError(str(found))
    return _again(batches, spec)


def _again(batches: list[Nest], element_spec: Nest) -> tf.data.Iterator:
    """An iterator of the read batches, of the same type as the first one."""
    dataset = _single(batches[0], element_spec)
    for batch in batches[1:]:
        dataset = dataset.concatenate(_single(batch, element_spec))
    return iter(dataset)


def _single(batch: Nest, element_spec: Nest) -> tf.data.Dataset:
    values = tf.nest.flatten(batch, expand_composites=True)
    # Missing sample weights have a spec without components.
    values = [value for value in values if value is not None]
    specs = tf.nest.flatten(element_spec, expand_composites=True)

    def read(_: tf.Tensor) -> Nest:
        # Placeholders have the dataset's shapes, which may be partly unknown.
        opened = [
            tf.compat.v1.placeholder_with_default(value, spec.shape)
            for value, spec in zip(values, specs, strict=True)
        ]
        return tf.nest.pack_sequence_as(
            element_spec, opened, expand_composites=True
        )

    return tf.data.Dataset.from_tensors(0).map(read)


def check_step(
    strategy: Strategy, step: Callable[[Nest], Nest], batch: Nest
) -> check_report.CheckReport:
    """Compares a step with that of one process; see the strategy's method.

    Args:
        strategy: strategy of several ranks.
        step: function of a batch.
        batch: batch of this rank.
    """
    used = list(_used_by(step, depth=3))
    subject = Subject(
        f"`{calls.role_of(step).rpartition('.')[-1]}`",
        step,
        tuple(each for each in used if isinstance(each, keras.Model)),
        tuple(each for each in used if model_state.is_optimizer(each)),
        of_keras=False,
        limits_memory=False,
    )
    try:
        found = check(strategy, subject, batch, batch)
    except CannotCheck as reason:
        raise ValueError(f"check_step cannot compare: {reason}.") from reason
    check_report.show(found, strategy.rank)
    return found


def _used_by(function: Callable[..., object], depth: int) -> Iterator[object]:
    """Objects that a function, and the functions it calls, refer to."""
    function = inspect.unwrap(getattr(function, "python_function", function))
    owner = getattr(function, "__self__", None)
    code = getattr(function, "__code__", None)
    if code is None or not depth:
        return
    found = [] if owner is None else [owner, *vars(owner).values()]
    for cell in getattr(function, "__closure__", None) or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # The variable has no value yet.
            continue
    names = getattr(function, "__globals__", {})
    found += [names[name] for name in code.co_names if name in names]
    for each in found:
        yield each
        yield from _used_by(each, depth - 1)
