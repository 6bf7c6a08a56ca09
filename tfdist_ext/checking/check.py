# SPDX-License-Identifier: Apache-2.0
"""Runs a step as one process and as the ranks do, and compares."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import random
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdist_ext import keras_internals
from tfdist_ext.checking import causes
from tfdist_ext.checking import choosing
from tfdist_ext.checking import comparing
from tfdist_ext.checking import gathering
from tfdist_ext.checking import report
from tfdist_ext.checking import runs
from tfdist_ext.checking import state
from tfdist_ext.checking.skipping import CannotCheck

Nest = Any
_LOG = logging.getLogger("tfdist_ext")


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is checked.

    Attributes:
        name: in the report.
        step: as `strategy.run` is given it: takes a batch of this rank.
        models: whose variables the step may change, as far as known.
        optimizers: that are no attributes of the models.
        of_keras: whether it is a step of Keras's loops.
        eager: whether it is run without a graph.
        limits_memory: whether to leave out what needs much memory.
    """

    name: str
    step: Callable[[Nest], Nest]
    models: tuple[Any, ...] = ()
    optimizers: tuple[Any, ...] = ()
    of_keras: bool = True
    eager: bool = False
    limits_memory: bool = True


def check(
    strategy: Any, subject: Subject, batch: Nest, signature: Nest
) -> report.CheckReport:
    """Compares one step; all ranks must call, and get the same.

    Args:
        strategy: of several ranks.
        subject: what is checked.
        batch: of this rank.
        signature: of that, as the step is traced to train.

    Raises:
        CannotCheck: of something that cannot be compared, on all ranks.
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
    """A trace may draw of Python's and NumPy's generators."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def _compared(
    strategy: Any, subject: Subject, batch: Nest, signature: Nest
) -> report.CheckReport:
    collectives = strategy.collectives
    all_of_it = gathering.whole_batch_of(batch, collectives)
    of_keras = subject.of_keras
    opened = gathering.signature_of(all_of_it)
    whole = runs.Run(strategy, subject.step, opened, True, of_keras)
    traced: list[runs.Run] = [whole]
    if subject.eager:
        ranks: Any = runs.EagerRun(strategy, subject.step, of_keras)
    else:
        ranks = runs.Run(strategy, subject.step, signature, False, of_keras)
        traced.append(ranks)
    snapshot = state.Snapshot(_held(strategy, subject, traced))
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
    compared = comparing.compare(wholes, outcome, snapshot, sums, collectives)
    changed = {snapshot.held[i].name for i in wholes[0].changed}
    shown = _shown_metrics(subject, changed)
    judged = [
        each
        for each in compared
        if not (each.kind == "log" and each.name in shown)
    ]
    found = causes.findings(judged, _circumstances(strategy, subject, whole))
    return report.report_of(subject.name, strategy.world_size, compared, found)


def _held(
    strategy: Any, subject: Subject, traced: Sequence[runs.Run]
) -> list[state.Held]:
    """What the runs may change, if memory allows to copy it."""
    slots = [v for m in subject.models for v in state.slots_of(m)]
    for optimizer in subject.optimizers:
        slots += state.variables_of_optimizer(optimizer)
    held = state.held_by(
        [handle for run in traced for handle in run.handles],
        [v for m in subject.models for v in _variables_of(m)],
        slots,
        [variable for run in traced for variable in run.variables],
    )
    if subject.limits_memory:
        how = "Force it with check='always'."
        choosing.require_memory(held, strategy.collectives, how)
    return held


def _circumstances(
    strategy: Any, subject: Subject, whole: runs.Run
) -> causes.Circumstances:
    return causes.Circumstances(
        strategy.world_size,
        max(
            choosing.tolerance_of(model, strategy.collectives)
            for model in subject.models or (None,)
        ),
        [n for m in subject.models for n in choosing.unsynchronized(m)],
        whole.is_random,
        subject.of_keras,
    )


def _shown_metrics(subject: Subject, changed: set[str]) -> set[str]:
    """Names of metrics that the step has updated.

    The result of one step is shown only while an epoch runs. The states, of
    which that of the epoch is made, are compared.
    """
    shown: set[str] = set()
    for model in subject.models:
        shown.update(model.get_metrics_result())  # of nested ones, too
        for metric in model.metrics:
            if not changed.intersection(map(state.label_of, metric.variables)):
                shown.discard(metric.name)
    return shown


def _variables_of(model: Any) -> Iterable[Any]:
    yield from model.variables
    for metric in model.metrics:
        yield from metric.variables


def attempt(
    strategy: Any,
    subject: Subject,
    batch: Nest,
    signature: Nest,
    required: bool,
) -> report.CheckReport | None:
    """Checks a step and says what was found; None if it cannot be checked.

    What goes wrong in a check does not end a training that goes well, unless
    the check is required.

    Args:
        strategy: as of `check`.
        subject: as of `check`.
        batch: as of `check`.
        signature: as of `check`.
        required: whether a step that cannot be checked is an error.

    Raises:
        ValueError: for a required check that cannot be made.
    """
    try:
        found = check(strategy, subject, batch, signature)
    except CannotCheck as reason:
        _skip(strategy, subject, str(reason), required)
        return None
    except Exception as error:
        # All ranks come to this, by their own error or by that of another.
        strategy.collectives.give_up(f"check of {subject.name}", error)
        text = " ".join(str(error).split())[-300:]
        _skip(strategy, subject, f"{type(error).__name__}: {text}", required)
        return None
    report.show(found, strategy.rank)
    return found


def _skip(strategy: Any, subject: Subject, reason: str, required: bool) -> None:
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
