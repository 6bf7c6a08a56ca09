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


def check(
    context: rank.RankContext,
    trainee: loops.Trainee,
    loop: loops.CustomLoop | loops.FitLoop,
) -> dict[str, float]:
    """Trains the check's steps on both; returns the errors found."""
    data = _global_batches(context, trainee.workload)
    bystanders = _bystanders(trainee.workload, data.touched)
    rows, dense = trainee.rows(data.touched), trainee.dense()
    still = trainee.rows(bystanders)
    losses = _train(context, trainee, loop)
    want = reference.train(
        data,
        rows,
        dense,
        context.options["optimizer"],
        context.options["learning_rate"],
        trainee.workload.head,
    )
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


def _global_batches(
    context: rank.RankContext, workload: workloads.Workload
) -> reference.Compact:
    options = context.options
    steps = tuple(
        tuple(
            workloads.make_batch(
                workload, options["batch"], step, member, options["seed"]
            )
            for member in range(context.ranks)
        )
        for step in range(options["check_steps"])
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
) -> list[float]:
    count = context.options["check_steps"]
    inputs = trainee.local_inputs(context, range(count))
    _, losses = loop.run(inputs, count)
    return losses


def _loss_error(got: list[float], want: np.ndarray) -> float:
    """Largest relative error; 0 where the loop reports no local losses."""
    if not got:
        return 0.0
    return float(np.max(np.abs(np.asarray(got) - want) / np.abs(want)))
