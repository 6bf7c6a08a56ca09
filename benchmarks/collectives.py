# SPDX-License-Identifier: Apache-2.0
"""Times collectives on loopback, stock TensorFlow's and ours in turns.

Results are checked (values are small integers, so the error must be 0), then
stock and ours take turns in the same processes. `all_reduce` is the replica
context's on both sides; `all_to_all` is compared with TF's collective runtime.

    algbw = bytes / time             bytes of a rank's whole input
    busbw = algbw * 2 (n - 1) / n    all_reduce: what a rank must send
            algbw * (n - 1) / n      all_to_all: all but its own slice
"""

import argparse
import json
import pathlib
import sys
from typing import Any

from benchmarks import launch
from benchmarks import network
from benchmarks import run

_BYTES_PER_NUMBER = 4

# Numbers per rank (all_reduce) or per peer (all_to_all).
SWEEP = {
    "all_reduce": (4, 2**8, 2**12, 2**16, 2**18, 2**20, 2**22, 2**24),
    "all_to_all": (4, 2**8, 2**12, 2**16, 2**18, 2**20, 2**22),
}

# (collective, from this many numbers on, times stock's rate)
TARGETS = (
    ("all_reduce", 0, 1.0),
    ("all_reduce", 2**24, 2.0),
    ("all_to_all", 2**20, 2.0),
)


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.collectives",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[2, 4], help="(2 4)"
    )
    parser.add_argument(
        "--sides",
        nargs="+",
        choices=("stock", "hybrid"),
        default=["stock", "hybrid"],
        help="(stock hybrid)",
    )
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="per size and side (3)"
    )
    parser.add_argument(
        "--turns", type=int, default=4, help="alternations per size (4)"
    )
    parser.add_argument(
        "--limit", type=float, default=400.0, help="seconds per job (400)"
    )
    parser.add_argument(
        "--output", type=pathlib.Path, default=pathlib.Path("build/bench")
    )
    return parser


def main() -> None:
    """Runs all sizes; exits with 1 if a target is missed or a job fails."""
    run.exit_on_signals()
    arguments = make_parser().parse_args()
    folder = run.new_folder(arguments.output, "collectives")
    content: dict[str, Any] = {"machine": run.machine()}
    missed = False
    for ranks in arguments.ranks:
        outcome = _measure(arguments, folder / f"{ranks}ranks", ranks)
        print(f"\n{ranks} ranks, loopback")
        if outcome.status != "ok":
            print(f"{outcome.status}: {outcome.reason}")
            missed = True
            continue
        records = worst_ranks([r["records"] for r in outcome.results])
        content[f"{ranks} ranks"] = records
        print("\n".join(table(records, ranks)))
        lines = verdicts(records)
        print("\n".join(lines))
        missed |= any(line.startswith("NOT") for line in lines)
    (folder / "result.json").write_text(json.dumps(content, indent=2) + "\n")
    print(f"logs and result.json: {folder}")
    sys.exit(missed)


def _measure(
    arguments: argparse.Namespace, folder: pathlib.Path, ranks: int
) -> launch.Outcome:
    options = {
        "sides": arguments.sides,
        "seconds": arguments.seconds,
        "turns": arguments.turns,
        "sweep": [
            (name, numbers)
            for name, sizes in SWEEP.items()
            for numbers in sizes
        ],
    }
    net = network.loopback(ranks)
    return launch.run_job("collectives", options, net, folder, arguments.limit)


def worst_ranks(by_rank: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Merges the ranks' records: of every duration the slowest rank's."""
    merged = []
    for records in zip(*by_rank, strict=True):
        record = dict(records[0])
        for side in ("stock", "hybrid"):
            if side in record:
                record[side] = {
                    key: max(other[side][key] for other in records)
                    for key in record[side]
                }
        merged.append(record)
    return merged


def bandwidths(
    collective: str, numbers: int, ranks: int, milliseconds: float
) -> tuple[float, float]:
    """Returns algbw and busbw in GB/s."""
    count = numbers * (ranks if collective == "all_to_all" else 1)
    algbw = count * _BYTES_PER_NUMBER / milliseconds / 1e6
    share = (ranks - 1) / ranks
    return algbw, algbw * share * (2 if collective == "all_reduce" else 1)


def table(records: list[dict[str, Any]], ranks: int) -> list[str]:
    """Formats one line per collective, size and side."""
    lines = [
        f"{'collective':<11}{'numbers':>9}{'type':>7}  {'side':<7}{'min ms':>9}"
        f"{'p50 ms':>9}{'p99 ms':>9}{'algbw':>8}{'busbw':>8}{'error':>6}"
        f"{'x stock':>9}"
    ]
    for record in records:
        name, numbers = record["collective"], record["numbers"]
        for side in ("stock", "hybrid"):
            if side not in record:
                continue
            times = record[side]
            rates = bandwidths(name, numbers, ranks, times["p50"])
            ratio = f"{_speed_up(record):>9.2f}" if side == "hybrid" else ""
            lines.append(
                f"{name:<11}{numbers:>9}{'float':>7}  {side:<7}"
                f"{times['min']:>9.3f}{times['p50']:>9.3f}"
                f"{times['p99']:>9.3f}{rates[0]:>8.3f}{rates[1]:>8.3f}"
                f"{record['error']:>6.0f}{ratio}"
            )
    return lines


def verdicts(records: list[dict[str, Any]]) -> list[str]:
    """Says of every target whether it is reached at all its sizes."""
    lines = []
    for collective, least, factor in TARGETS:
        speed_ups = [
            (_speed_up(record), record["numbers"])
            for record in records
            if record["collective"] == collective
            and record["numbers"] >= least
            and {"stock", "hybrid"} <= record.keys()
        ]
        if not speed_ups:
            continue
        worst, numbers = min(speed_ups)
        verdict = "reached" if worst >= factor else "NOT REACHED"
        lines.append(
            f"{verdict:<12}{collective} from {least} numbers on: {factor:g} "
            f"times stock's rate (least: {worst:.2f} at {numbers})"
        )
    return lines


def _speed_up(record: dict[str, Any]) -> float:
    if "stock" not in record:
        return 0.0
    return float(record["stock"]["p50"] / record["hybrid"]["p50"])


if __name__ == "__main__":
    main()
