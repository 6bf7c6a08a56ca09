# SPDX-License-Identifier: Apache-2.0
"""Compares a variant with the single-process oracle before it is timed."""

import numpy as np

from benchmarks import errors
from benchmarks import loops
from benchmarks import rank
from benchmarks import reference
from benchmarks import workloads

# Rows outside the batches that must stay bitwise as they were.
_BYSTANDERS = 1000

# An input of a ReLU may have another sign in another order of summation if it
# is smaller than this, relative to the largest one.
_ROUNDING = 5e-7
_ATTEMPTS = 20


def check(
    context: rank.RankContext,
    trainee: loops.Trainee,
    loop: loops.CustomLoop | loops.FitLoop,
) -> dict[str, float]:
    """Trains the check's steps on both; returns the errors found.

    The batches are such that no hidden unit is at the kink of its ReLU. There,
    rounding decides whether the unit has a gradient.
    """
    dense = trainee.dense()
    for attempt in range(_ATTEMPTS):
        data = _global_batches(context, trainee.workload, attempt)
        rows = trainee.rows(data.touched)
        want = reference.train(
            data,
            rows,
            dense,
            context.options["optimizer"],
            context.options["learning_rate"],
            trainee.workload.head,
        )
        if want.kink > _ROUNDING:
            break
    bystanders = _bystanders(trainee.workload, data.touched)
    still = trainee.rows(bystanders)
    losses = _train(context, trainee, loop, attempt)
    return {
        "rows": errors.change_error(
            trainee.rows(data.touched), want.rows, rows
        ),
        "dense": errors.change_error(trainee.dense(), want.dense, dense),
        "loss": _loss_error(losses, want.losses[:, context.rank]),
        "bystanders": max(
            float(np.abs(now - then).max(initial=0.0))
            for now, then in zip(trainee.rows(bystanders), still, strict=True)
        ),
    }


def _steps(context: rank.RankContext, attempt: int) -> range:
    """Numbers of the check's batches; timed steps have others."""
    count = context.options["check_steps"]
    return range(attempt * count, (attempt + 1) * count)


def _global_batches(
    context: rank.RankContext, workload: workloads.Workload, attempt: int
) -> reference.Compact:
    options = context.options
    steps = tuple(
        tuple(
            workloads.make_batch(
                workload, options["batch"], step, member, options["seed"]
            )
            for member in range(context.ranks)
        )
        for step in _steps(context, attempt)
    )
    return reference.compact(steps, len(workload.tables))


def _bystanders(
    workload: workloads.Workload, touched: tuple[np.ndarray, ...]
) -> tuple[np.ndarray, ...]:
    generator = np.random.default_rng(0)
    return tuple(
        np.setdiff1d(generator.integers(0, table.rows, _BYSTANDERS), ids)
        for table, ids in zip(workload.tables, touched, strict=True)
    )


def _train(
    context: rank.RankContext,
    trainee: loops.Trainee,
    loop: loops.CustomLoop | loops.FitLoop,
    attempt: int,
) -> list[float]:
    steps = _steps(context, attempt)
    inputs = trainee.local_inputs(context, steps)
    _, losses = loop.run(inputs, len(steps))
    return losses


def _loss_error(got: list[float], want: np.ndarray) -> float:
    """Largest relative error; 0 where the loop reports no local losses."""
    if not got:
        return 0.0
    return float(np.max(np.abs(np.asarray(got) - want) / np.abs(want)))
