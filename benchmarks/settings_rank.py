# SPDX-License-Identifier: Apache-2.0
"""The task of a rank: alternates between settings in the same processes."""

import dataclasses
from typing import Any

import tfdist_ext
from benchmarks import check
from benchmarks import errors
from benchmarks import hybrid
from benchmarks import loops
from benchmarks import measure
from benchmarks import rank
from benchmarks import training
from benchmarks import workloads


def run_rank(context: rank.RankContext) -> dict[str, Any]:
    """Returns per setting and round this rank's median step and bytes.

    Raises:
        rank.CheckError: the results of a setting are wrong.
    """
    context.barrier("started")
    strategy = tfdist_ext.HybridParallelStrategy(
        gradient_dtype=context.options["gradient_dtype"]
    )
    timed = [
        _prepare(context, strategy, setting)
        for setting in context.options["settings"]
    ]
    steps = context.options["steps"]
    rounds = []
    for turn in range(context.options["rounds"]):
        # Forth and back: none always comes after the same other one.
        order = list(enumerate(timed))[:: -1 if turn % 2 else 1]
        found = {}
        for index, (loop, inputs) in order:
            loop.run(inputs, 3)
            context.barrier(f"turn {turn}.{index}")
            before = measure.sample(context.interface)
            seconds, _ = loop.run(inputs, steps)
            context.barrier(f"turned {turn}.{index}")
            after = measure.sample(context.interface)
            per_step = measure.per_step(before, after, steps)
            if isinstance(loop, loops.FitLoop):
                # Without what `fit` does before and after.
                cpu = measure.quantiles_ms(loop.cpu_seconds)["p50"]
                per_step["cpu_ms"] = cpu
            found[str(index)] = {
                "p50": measure.quantiles_ms(seconds)["p50"],
                "per_step": per_step,
            }
        rounds.append(found)
    return {"rounds": rounds}


def _prepare(
    context: rank.RankContext,
    strategy: tfdist_ext.HybridParallelStrategy,
    setting: dict[str, Any],
) -> tuple[loops.CustomLoop | loops.FitLoop, list[loops.Inputs]]:
    """Builds, checks and warms up one setting."""
    context = dataclasses.replace(context, options=context.options | setting)
    options = context.options
    trainee = loops.Trainee(
        hybrid.HybridVariant(options, context.ranks, strategy),
        workloads.WORKLOADS[options["workload"]],
        options["batch"] * context.ranks,
    )
    loop = loops.LOOPS[options["loop"]](trainee)
    if "timeline" in setting:
        timeline = _timeline(context, setting["timeline"])
        if not isinstance(loop, loops.FitLoop):
            raise ValueError(f"{setting} needs --loop fit: it is a callback")
        loop.callbacks = timeline
    if options["check_steps"]:
        found = check.check(context, trainee, loop)
        problem = errors.problem(
            found, options["wire_dtype"], options["gradient_dtype"]
        )
        if problem:
            raise rank.CheckError(f"{setting}: {problem} ({found})")
    first = training.FIRST_TIMED_STEP
    inputs = trainee.local_inputs(
        context, range(first, first + training.DISTINCT_BATCHES)
    )
    loop.run(inputs, options["warm_up"])
    return loop, inputs


def _timeline(
    context: rank.RankContext, what: str
) -> list[tfdist_ext.callbacks.Timeline]:
    """The callback that traces all steps or, `waiting`, none of them."""
    if what == "none":
        return []
    first = {"waiting": 10**9, "exchanges": 0, "all": 0}[what]
    return [
        tfdist_ext.callbacks.Timeline(
            context.folder / "trace.json",
            (first, 2 * 10**9),
            kernels=what != "exchanges",
        )
    ]
