# SPDX-License-Identifier: Apache-2.0
"""Times what a strategy adds to every step, stock's and ours.

A tiny dense Keras model trains with each strategy; `local` is one process
without any. `added` is the median step less that of `local`.
"""

import argparse
import json
import pathlib
import sys
from typing import Any

from benchmarks import launch
from benchmarks import network
from benchmarks import run

# (loop, Keras): Keras 3 `fit` fails under the stock strategy.
CASES = (("custom", "3"), ("fit", "2"), ("fit", "3"))


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overhead", description=__doc__
    )
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[2, 4], help="(2 4)"
    )
    parser.add_argument("--steps", type=int, default=300, help="timed (300)")
    parser.add_argument("--warm-up", type=int, default=30, help="steps (30)")
    parser.add_argument(
        "--limit", type=float, default=120.0, help="seconds per job (120)"
    )
    parser.add_argument(
        "--output", type=pathlib.Path, default=pathlib.Path("build/bench")
    )
    return parser


def main() -> None:
    """Runs all cases on loopback; exits with 1 where ours is not faster."""
    run.exit_on_signals()
    arguments = make_parser().parse_args()
    folder = run.new_folder(arguments.output, "overhead")
    records = []
    print(f"{'loop':<8}{'keras':>6}{'ranks':>6}  {'strategy':<9}", end="")
    print(f"{'ms/step':>9}{'p99':>9}{'added ms':>10}")
    for loop, keras in CASES:
        local = _measure(arguments, folder, loop, keras, 1, "local")
        records.append(local)
        _show(local, local)
        for ranks in arguments.ranks:
            for strategy in ("stock", "hybrid"):
                record = _measure(
                    arguments, folder, loop, keras, ranks, strategy
                )
                records.append(record)
                _show(record, local)
    (folder / "result.json").write_text(json.dumps(records, indent=2) + "\n")
    slower = slower_cases(records)
    for name in slower:
        print(f"NOT REACHED: ours is not faster than stock: {name}")
    print(f"logs and result.json: {folder}")
    sys.exit(bool(slower))


def slower_cases(records: list[dict[str, Any]]) -> list[str]:
    """Names the cases in which ours failed or stock was faster."""
    by_case = {
        (r["loop"], r["keras"], r["ranks"], r["strategy"]): r for r in records
    }
    slower = []
    for (loop, keras, ranks, strategy), ours in by_case.items():
        if strategy != "hybrid":
            continue
        stock = by_case[loop, keras, ranks, "stock"]
        if ours["status"] != "ok" or (
            stock["status"] == "ok" and ours["p50"] >= stock["p50"]
        ):
            slower.append(f"{loop} loop, Keras {keras}, {ranks} ranks")
    return slower


def _measure(
    arguments: argparse.Namespace,
    folder: pathlib.Path,
    loop: str,
    keras: str,
    ranks: int,
    strategy: str,
) -> dict[str, Any]:
    options = {"loop": loop, "strategy": strategy}
    options |= {"steps": arguments.steps, "warm_up": arguments.warm_up}
    outcome = launch.run_job(
        "overhead",
        options,
        network.loopback(ranks),
        folder / f"{loop}-keras{keras}-{ranks}-{strategy}",
        arguments.limit,
        {"TF_USE_LEGACY_KERAS": str(int(keras == "2"))},
    )
    times = [result["step_ms"] for result in outcome.results]
    return {
        "loop": loop,
        "keras": keras,
        "ranks": ranks,
        "strategy": strategy,
        "status": outcome.status,
        "reason": outcome.reason,
        "p50": max((t["p50"] for t in times), default=0.0),
        "p99": max((t["p99"] for t in times), default=0.0),
    }


def _show(record: dict[str, Any], local: dict[str, Any]) -> None:
    case = f"{record['loop']:<8}{record['keras']:>6}{record['ranks']:>6}  "
    print(f"{case}{record['strategy']:<9}", end="")
    if record["status"] != "ok":
        print(f"  {record['status']}: {record['reason'][:110]}", flush=True)
        return
    added = record["p50"] - local["p50"]
    figures = f"{record['p50']:>9.3f}{record['p99']:>9.3f}{added:>10.3f}"
    print(figures, flush=True)


if __name__ == "__main__":
    main()
