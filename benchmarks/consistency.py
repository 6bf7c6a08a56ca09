# SPDX-License-Identifier: Apache-2.0
"""Compares the modes of `consistency` where ranks or links are slow.

    python -m benchmarks.consistency                 all settings, 4 ranks
    python -m benchmarks.consistency --settings slow --modes 'BSP()' 'SSP(4)'
    python -m benchmarks.consistency --settings quality --ranks 2 4 --seeds 5
    python -m benchmarks.consistency --settings clicks --ml-100k FOLDER

Every rank sleeps for each of its samples as if it computed, so more ranks than
cores can be timed. What a step computes besides takes its time from the cores:
with --dilation auto, sleeps are longer and links slower by ranks per core, and
times are divided by it, as if each rank had a core. Settings:

- equal: ranks and links are fast.
- slow: the last rank takes three times as long for a sample.
- pauses: a step takes half a second, and each rank pauses for 2 seconds after
  a share of its steps (--pauses), at random. SSP(4) can hide pauses of 4 steps.
- link150, link15, link5: each rank sends at most so many MB/s.
- quality: no rank sleeps; the AUC after equal samples, with several seeds.
- clicks: as quality, for clicks of ml-100k. FOLDER has the files that the
  package `recbole` 1.2.1 ships (`ml-100k.inter`, `.user` and `.item`).

Columns: steps per second, and samples per second of the job, in the last part;
kB that a rank sends in a step (- on loopback); AUC after all steps; seconds
until the AUC that the worst mode reaches; shares of the ranks; and the share of
updates that are stale by 1 step or more. `benchmarks.consistency_chart` draws
charts of `result.json`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import statistics
import sys
from typing import Any

from benchmarks import launch
from benchmarks import network
from benchmarks import run

MODES: dict[str, dict[str, Any]] = {
    "BSP()": {"mode": ["BSP", {}]},
    "BSP(), measured": {"mode": ["BSP", {}], "balance": "measured"},
    "Accumulate(4)": {"mode": ["Accumulate", {"k": 4}]},
    "LocalSteps(8)": {"mode": ["LocalSteps", {"k": 8}]},
    "LocalSteps(8, Nesterov)": {
        "mode": ["LocalSteps", {"k": 8, "outer": ["Nesterov", {}]}]
    },
    "LocalSteps(8, rows)": {"mode": ["LocalSteps", {"k": 8, "tables": True}]},
    "LocalSteps(8, cache)": {
        "mode": ["LocalSteps", {"k": 8, "tables": True, "row_cache": True}]
    },
    "ASP(0.01)": {"mode": ["ASP", {"significance": 0.01}]},
    "SSP(4)": {"mode": ["SSP", {"staleness": 4}]},
    "SSP(8)": {"mode": ["SSP", {"staleness": 8}]},
    "SSP(8, cache)": {"mode": ["SSP", {"staleness": 8, "row_cache": True}]},
    "BAP()": {"mode": ["BAP", {}]},
    "BAP(), measured": {"mode": ["BAP", {}], "balance": "measured"},
    "BAP('inverse')": {"mode": ["BAP", {"stale_scale": "inverse"}]},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "equal": {},
    "slow": {"slower": 3.0},
    "pauses": {"microseconds": 8000.0},
    "link150": {"egress": "150mbps"},
    "link15": {"egress": "15mbps"},
    "link5": {"egress": "5mbps"},
    "quality": {"microseconds": 0.0},
    "clicks": {"microseconds": 0.0},
}
# Settings that are run with several seeds, and not timed.
UNTIMED = ("quality", "clicks")
_WITHOUT_DATA = [name for name in SETTINGS if name != "clicks"]
# Options of the command that the task reads.
_OF_TASK = (
    *("batch", "microseconds", "steps", "parts", "warm_up", "optimizer"),
    *("learning_rate", "hidden", "rows", "samples", "ml_100k"),
)
_HEAD = (
    f"{'mode':<25}{'steps/s':>9}{'samples/s':>11}{'kB/step':>9}{'of rows':>9}"
    f"{'AUC':>9}{'s to AUC':>10}  {'shares':<16}{'stale':>6}"
)


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--settings", nargs="+", choices=SETTINGS, default=_WITHOUT_DATA)
    add("--modes", nargs="+", choices=MODES, default=list(MODES))
    add("--ranks", type=int, nargs="+", default=[4])
    add("--batch", type=int, default=64, help="samples of a rank")
    add("--microseconds", type=float, default=400.0, help="for a sample")
    add("--pauses", type=float, default=0.1, help="share of steps (0.1)")
    add("--steps", type=int, default=150, help="between two tests")
    add("--parts", type=int, default=6, help="tests")
    add("--warm-up", type=int, default=10, help="steps")
    add("--optimizer", default="Adagrad")
    add("--learning-rate", type=float, default=0.05)
    add("--hidden", type=int, nargs="+", default=[256, 128])
    add("--rows", type=int, default=300, help="of each table, at most")
    add("--samples", type=int, default=2**18)
    add("--seeds", type=int, default=1, help="runs of an untimed setting")
    add("--ml-100k", metavar="FOLDER", help="data of `clicks`")
    add("--limit", type=float, default=600.0, help="seconds of a job")
    run.add_dilation_argument(parser)
    add("--output", type=pathlib.Path, default=pathlib.Path("build/bench"))
    return parser


def options_of(
    arguments: argparse.Namespace, setting: str, mode: str, dilation: float = 1
) -> dict[str, Any]:
    """The options of a job; see `consistency_rank`.

    Args:
        arguments: those of the command line.
        setting: one of `SETTINGS`.
        mode: one of `MODES`.
        dilation: factor by which sleeps are longer and links slower.
    """
    options = {name: getattr(arguments, name) for name in _OF_TASK}
    if setting != "clicks":
        options["ml_100k"] = None
    seeds = arguments.seeds if setting in UNTIMED else 1
    pauses = arguments.pauses if setting == "pauses" else 0.0
    options |= {"slower": 1.0, "pauses": pauses, "pause_seconds": 2 * dilation}
    options |= {"balance": "equal", "seeds": list(range(seeds))}
    options |= SETTINGS[setting] | MODES[mode]
    options["microseconds"] *= dilation
    if "egress" in options:
        options["egress"] = network.dilated(options["egress"], dilation)
    return options


def _run(
    arguments: argparse.Namespace,
    folder: pathlib.Path,
    setting: str,
    mode: str,
    ranks: int,
) -> list[dict[str, Any]]:
    """Runs a job; returns a record for each of its seeds."""
    dilation = run.dilation_of(arguments, ranks)
    options = options_of(arguments, setting, mode, dilation)
    rate = options.pop("egress", None)
    place = folder / f"{setting}-{len(list(folder.iterdir()))}"
    task = ("consistency", options)
    if rate is None:
        net = network.loopback(ranks)
        outcome = launch.run_job(*task, net, place, arguments.limit)
    else:
        with network.namespaces(ranks, rate) as net:
            outcome = launch.run_job(*task, net, place, arguments.limit)
    return [
        {
            "setting": setting,
            "mode": mode,
            "seed": seed,
            "batch": options["batch"] * ranks,
            "steps": options["steps"],
            "status": outcome.status,
            "reason": outcome.reason,
            "dilation": dilation,
            "ranks": [
                undilated(result["runs"][i], dilation)
                for result in outcome.results
            ],
        }
        for i, seed in enumerate(options["seeds"])
    ]


def undilated(result: dict[str, Any], dilation: float) -> dict[str, Any]:
    """What a rank has measured, with its times divided by the dilation."""
    return result | {
        "curve": [[seconds / dilation, auc] for seconds, auc in result["curve"]]
    }


def last_rate(curve: list[list[float]], steps: int) -> float:
    """Steps per second of the last part: shares have then been measured."""
    before = curve[-2][0] if len(curve) > 1 else 0.0
    return steps / (curve[-1][0] - before)


def seconds_to(curve: list[list[float]], auc: float) -> float:
    """Seconds after which a run has reached an AUC; infinite if it has not.

    Between two tests the AUC is taken to grow evenly.
    """
    before, lower = 0.0, 0.5
    for seconds, found in curve:
        if found >= auc:
            share = (auc - lower) / (found - lower) if found > lower else 1.0
            return before + max(share, 0.0) * (seconds - before)
        before, lower = seconds, found
    return float("inf")


def show(records: list[dict[str, Any]]) -> None:
    """Prints the runs of a setting."""
    fine = [record for record in records if record["status"] == "ok"]
    aucs = [record["ranks"][0]["curve"][-1][1] for record in fine]
    goal = min(aucs, default=0.0)
    print(_HEAD)
    for record in records:
        if record["status"] != "ok":
            print(f"{record['mode']:<25}  {record['reason'][:90]}")
            continue
        ranks = record["ranks"]
        first = ranks[0]
        rate = min(last_rate(each["curve"], record["steps"]) for each in ranks)
        sent = max(each["bytes_per_step"] for each in ranks)
        rows = max(each["row_bytes_per_step"] for each in ranks)
        stale = sum(
            count
            for each in ranks
            for steps, count in each["staleness"].items()
            if int(steps) > 0
        )
        updates = sum(sum(each["staleness"].values()) for each in ranks)
        shares = "/".join(f"{100 * share:.0f}" for share in first["shares"])
        size = f"{sent / 1e3:.1f}" if sent else "-"
        old = f"{100 * stale / updates:.0f} %" if updates else "-"
        print(
            f"{record['mode']:<25}{rate:>9.2f}"
            f"{rate * record['batch']:>11.0f}{size:>9}{rows / 1e3:>9.1f}"
            f"{first['curve'][-1][1]:>9.4f}"
            f"{seconds_to(first['curve'], goal):>10.1f}  {shares:<16}{old:>6}",
            flush=True,
        )


def aucs_of(records: list[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """AUC of the runs that ended well, by mode and seed."""
    found: dict[str, dict[int, float]] = {}
    for record in records:
        aucs = found.setdefault(record["mode"], {})
        if record["status"] == "ok":
            aucs[record["seed"]] = record["ranks"][0]["curve"][-1][1]
    return found


def differences(records: list[dict[str, Any]]) -> dict[str, list[float]]:
    """AUC of each mode less that of the first one, with the same seed."""
    found = aucs_of(records)
    first = next(iter(found.values()))
    return {
        mode: [aucs[seed] - first[seed] for seed in aucs if seed in first]
        for mode, aucs in found.items()
    }


def show_quality(records: list[dict[str, Any]]) -> None:
    """Prints the AUC of each mode, and its differences to the first mode.

    Differences are of runs with the same seed; the last number is their
    standard deviation.
    """
    print(f"{'mode':<25}{'runs':>5}{'AUC':>10}{'spread':>10}{'to first':>10}")
    to_first = differences(records)
    for mode, aucs in aucs_of(records).items():
        found, pairs = list(aucs.values()), to_first[mode]
        if not found:
            print(f"{mode:<25}{0:>5}")
            continue
        spread = statistics.stdev(found) if len(found) > 1 else 0.0
        mean = statistics.fmean(pairs) if pairs else float("nan")
        of_pairs = statistics.stdev(pairs) if len(pairs) > 1 else 0.0
        print(
            f"{mode:<25}{len(found):>5}{statistics.fmean(found):>10.4f}"
            f"{spread:>10.4f}{mean:>+10.4f} +- {of_pairs:.4f}",
            flush=True,
        )


def main() -> None:
    """Runs all settings and modes; exits with 1 if a run fails."""
    run.exit_on_signals()
    parser = make_parser()
    arguments = parser.parse_args()
    if "clicks" in arguments.settings and arguments.ml_100k is None:
        parser.error("the setting clicks needs --ml-100k FOLDER")
    folder = run.new_folder(arguments.output, "consistency")
    everything = []
    for setting, ranks in itertools.product(
        arguments.settings, arguments.ranks
    ):
        print(f"\n{setting}, {ranks} ranks", flush=True)
        records = []
        for mode in arguments.modes:
            records += _run(arguments, folder, setting, mode, ranks)
        everything += records
        (show_quality if setting in UNTIMED else show)(records)
        text = json.dumps({"machine": run.machine(), "runs": everything})
        (folder / "result.json").write_text(text + "\n")
    print(f"\nlogs and result.json: {folder}")
    sys.exit(any(record["status"] != "ok" for record in everything))


if __name__ == "__main__":
    main()
