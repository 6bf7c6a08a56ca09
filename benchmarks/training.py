# SPDX-License-Identifier: Apache-2.0
"""The task of a rank: build a variant, check its results, then time it."""

import importlib
import math
from typing import Any

import numpy as np

from benchmarks import check
from benchmarks import errors
from benchmarks import loops
from benchmarks import measure
from benchmarks import rank
from benchmarks import workloads

_VARIANTS = {
    "stock": ("benchmarks.stock", "StockVariant"),
    "hybrid": ("benchmarks.hybrid", "HybridVariant"),
}

# Batches are made before the steps and used in turn.
DISTINCT_BATCHES = 16

# Steps of the check come first; timed steps see other batches.
FIRST_TIMED_STEP = 1000


def run_rank(context: rank.RankContext) -> dict[str, Any]:
    """Returns this rank's errors, step times, bytes and memory.

    Raises:
        rank.CheckError: our results are wrong. Where stock's are wrong
            (Keras 3 squares the gradient of a duplicate row once per
            duplicate), the result says so and stock is still timed.
    """
    options = context.options
    workload = workloads.WORKLOADS[options["workload"]]
    context.barrier("started")
    trainee = loops.Trainee(
        _make_variant(context), workload, options["batch"] * context.ranks
    )
    context.barrier("built")
    loop = loops.LOOPS[options["loop"]](trainee)
    found = {}
    if options["check_steps"]:
        found = check.check(context, trainee, loop)
    problem = errors.problem(
        found, options["wire_dtype"], options["gradient_dtype"]
    )
    if problem and options["variant"] == "hybrid":
        raise rank.CheckError(f"{problem} ({found})")
    context.barrier("checked")
    figures = _time(context, trainee, loop)
    return {
        **figures,
        "errors": found,
        "problem": problem,
        "peak_rss_bytes": measure.peak_rss_bytes(),
    }


def _make_variant(context: rank.RankContext) -> loops.Variant:
    module, name = _VARIANTS[context.options["variant"]]
    variant = getattr(importlib.import_module(module), name)
    return variant(context.options, context.ranks)


def _time(
    context: rank.RankContext,
    trainee: loops.Trainee,
    loop: loops.CustomLoop | loops.FitLoop,
) -> dict[str, Any]:
    options = context.options
    inputs = trainee.local_inputs(
        context,
        range(FIRST_TIMED_STEP, FIRST_TIMED_STEP + DISTINCT_BATCHES),
    )
    context.barrier("prepared")
    warm_up, _ = loop.run(inputs, options["warm_up"])
    steps = context.agree(
        "steps",
        measure.steps_in_budget(
            warm_up[1:] or warm_up, options["seconds"], options["steps"]
        ),
    )
    context.barrier("warm")
    before = measure.sample(context.interface)
    seconds, losses = loop.run(inputs, steps)
    context.barrier("timed")
    after = measure.sample(context.interface)
    if losses and not math.isfinite(np.sum(losses)):
        raise rank.CheckError(f"Loss is not finite after {steps} steps")
    return {
        "steps": steps,
        "step_ms": measure.quantiles_ms(seconds),
        "per_step": measure.per_step(before, after, steps),
    }
