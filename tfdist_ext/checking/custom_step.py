# SPDX-License-Identifier: Apache-2.0
"""Checks a step of a loop that a program has written itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist_ext.checking import check
from tfdist_ext.checking import report
from tfdist_ext.checking import state
from tfdist_ext.checking.skipping import CannotCheck
from tfdist_ext.collectives import calls

keras = tf.keras
Nest = Any


def check_step(
    strategy: Any, step: Callable[[Nest], Nest], batch: Nest
) -> report.CheckReport:
    """Compares a step with that of one process; see the strategy's method.

    Args:
        strategy: of several ranks.
        step: takes a batch.
        batch: of this rank.
    """
    used = list(_used_by(step, depth=3))
    subject = check.Subject(
        f"`{calls.role_of(step).rpartition('.')[-1]}`",
        step,
        tuple(each for each in used if isinstance(each, keras.Model)),
        tuple(each for each in used if state.is_optimizer(each)),
        of_keras=False,
        limits_memory=False,
    )
    try:
        found = check.check(strategy, subject, batch, batch)
    except CannotCheck as reason:
        raise ValueError(f"check_step cannot compare: {reason}.") from reason
    report.show(found, strategy.rank)
    return found


def _used_by(function: Any, depth: int) -> Iterator[Any]:
    """What a function, and those it calls, get from around them."""
    function = inspect.unwrap(getattr(function, "python_function", function))
    owner = getattr(function, "__self__", None)
    code = getattr(function, "__code__", None)
    if code is None or not depth:
        return
    found = [] if owner is None else [owner, *vars(owner).values()]
    for cell in getattr(function, "__closure__", None) or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # of a name that is not given yet
            continue
    names = getattr(function, "__globals__", {})
    found += [names[name] for name in code.co_names if name in names]
    for each in found:
        yield each
        yield from _used_by(each, depth - 1)
