# SPDX-License-Identifier: Apache-2.0
"""Compares a variant with the single-process oracle before it is timed."""

import numpy as np

from benchmarks import loops
from benchmarks import rank
from benchmarks import reference
from benchmarks import workloads

# Largest difference from the oracle, relative to the largest change that
# training makes. fp32 sums in another order; 16-bit wires round.
TOLERANCES = {"float32": 1e-4, "bfloat16": 1e-2, "float16": 1e-2}

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
    )
    return {
        "rows": change_error(trainee.rows(data.touched), want.rows, rows),
        "dense": change_error(trainee.dense(), want.dense, dense),
        "loss": _loss_error(losses, want.losses[:, context.rank]),
        "bystanders": max(
            float(np.abs(now - then).max(initial=0.0))
            for now, then in zip(trainee.rows(bystanders), still, strict=True)
        ),
    }


def change_error(
    got: tuple[np.ndarray, ...],
    want: tuple[np.ndarray, ...],
    initial: tuple[np.ndarray, ...],
) -> float:
    """Largest |got - want| of an array over its largest |want - initial|.

    What the rounding of the values themselves explains is not an error: a
    weight of 0.1 that moves by 1e-5 keeps three digits of its change.
    """
    errors = []
    for one, other, start in zip(got, want, initial, strict=True):
        rounding = 4 * np.finfo(np.float32).eps * np.abs(other)
        excess = np.maximum(np.abs(one - other) - rounding, 0.0)
        change = np.abs(other - start).max(initial=0.0)
        # NaN must not be lost: np.maximum and max() of an array keep it.
        errors.append(excess.max(initial=0.0) / change)
    return float(np.max(errors))


def problem(errors: dict[str, float], wire_dtype: str) -> str:
    """Says which error is beyond its limit, or returns ""."""
    tolerance = TOLERANCES[wire_dtype]
    limits = dict.fromkeys(errors, tolerance) | {"bystanders": 0.0}
    for name, error in errors.items():
        # Written so that NaN fails.
        if not error <= limits[name]:
            return (
                f"differs from the single-process reference: {name} by "
                f"{error:.2g}, allowed {limits[name]:.2g}"
            )
    return ""


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
