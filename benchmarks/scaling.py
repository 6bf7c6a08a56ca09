# SPDX-License-Identifier: Apache-2.0
"""Time, bytes and memory against the number of ranks.

Every placement runs on 1, 2, 4, ... ranks with the same batch per rank (weak
scaling), is checked as in `benchmarks.run`, and drawn into scaling.png. With
--dilation auto, ranks that share cores are timed as if each had its own. With
--memory, peak memory is held against the rank's share of tables and slots. With
--others, "x stock" is the time of the fastest synchronous one of them over
ours, drawn into speedup.svg. --recorded prints and draws the results.jsonl of
earlier runs.
"""

import argparse
import json
import pathlib
import sys

from benchmarks import launch
from benchmarks import report
from benchmarks import run
from benchmarks import workloads

_PREFIX = "hybrid-"
_PLACEMENTS = [v.removeprefix(_PREFIX) for v in run.VARIANTS if _PREFIX in v]

# Arrays of the tables' size that an optimizer keeps beside them.
_SLOTS = {"sgd": 0, "adagrad": 1}

# What a rank may need: this many times its share, and what TensorFlow takes.
_SHARE_LIMIT = 1.15
_BASE_LIMIT = 1e9


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling",
        description=__doc__,
        conflict_handler="resolve",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_setting_arguments(parser)
    run.add_timing_arguments(parser)
    run.add_network_arguments(parser)
    run.add_dilation_argument(parser)
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        default=[1, 2, 4, 8],
        help="numbers of processes (1 2 4 8)",
    )
    parser.add_argument(
        "--placements",
        nargs="*",
        choices=_PLACEMENTS,
        default=["row", "column", "auto"],
        help="of our tables (row column auto)",
    )
    others = [v for v in run.VARIANTS if _PREFIX not in v]
    parser.add_argument(
        "--others", nargs="*", choices=others, default=[], help="drawn too"
    )
    parser.add_argument(
        "--memory", action="store_true", help="judge peak memory"
    )
    parser.add_argument(
        "--recorded",
        type=pathlib.Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="run nothing, read these; later files replace rows of earlier",
    )
    return parser


def measure(arguments: argparse.Namespace, folder: pathlib.Path) -> report.Rows:
    """Runs every variant on every number of ranks."""
    variants = [_PREFIX + name for name in arguments.placements]
    variants += arguments.others
    rows: report.Rows = {}
    for ranks in arguments.ranks:
        settings = argparse.Namespace(**{**vars(arguments), "ranks": ranks})
        with run.open_network(settings, ranks) as net:
            for name in variants:
                place = folder / f"{name}@{ranks}"
                print(f"{name}, {ranks} rank(s) ...", flush=True)
                outcome = run.run_variant(name, settings, net, place)
                dilation = run.dilation_of(arguments, ranks)
                rows[name, ranks] = report.make_row(name, outcome, dilation)
                job = {"variant": name, "ranks": ranks, "dilation": dilation}
                with (folder / "results.jsonl").open("a") as file:
                    file.write(json.dumps({**job, **vars(outcome)}) + "\n")
    return rows


def read(paths: list[pathlib.Path]) -> report.Rows:
    """Returns the rows of files that `measure` has written."""
    rows: report.Rows = {}
    for path in paths:
        for line in path.read_text().splitlines():
            record = json.loads(line)
            name, ranks = record.pop("variant"), record.pop("ranks")
            dilation = record.pop("dilation")
            outcome = launch.Outcome(**record)
            rows[name, ranks] = report.make_row(name, outcome, dilation)
    return rows


def speedups(rows: report.Rows) -> dict[str, dict[int, float]]:
    """Times of the fastest other variant over ours: variant -> ranks -> factor.

    Asynchronous variants do not count, as they train other numbers. Numbers of
    ranks at which no other variant ran are left out.
    """
    others: dict[int, float] = {}
    for (_, ranks), row in rows.items():
        if row.status == "ok" and not (row.ours or row.asynchronous):
            known = others.get(ranks, row.milliseconds)
            others[ranks] = min(known, row.milliseconds)
    found: dict[str, dict[int, float]] = {}
    for (name, ranks), row in rows.items():
        if row.status == "ok" and row.ours and ranks in others:
            factor = others[ranks] / row.milliseconds
            found.setdefault(name, {})[ranks] = factor
    return found


def table(rows: report.Rows) -> str:
    """Formats the rows, one variant after the other."""
    columns = (
        "ranks",
        "ms/step",
        "steps/s",
        "egress MB",
        "ingress MB",
        "RSS MB",
        "x stock",
    )
    lines = [_line("variant", columns)]
    factors = speedups(rows)
    for (name, ranks), row in report.by_variant(rows):
        factor = factors.get(name, {}).get(ranks)
        if row.status != "ok":
            lines.append(f"{name:<18}{ranks:>6}  {row.status}: {row.reason}")
            continue
        cells = (
            str(ranks),
            f"{row.milliseconds:.2f}",
            f"{row.steps_per_second:.2f}",
            f"{row.egress / report.MEGABYTE:.3f}",
            f"{row.ingress / report.MEGABYTE:.3f}",
            f"{row.peak_rss / report.MEGABYTE:.0f}",
            f"{factor:.1f}" if factor else "-",
        )
        lines.append(_line(name, cells))
    return "\n".join(lines)


def share_bytes(
    workload: workloads.Workload, optimizer: str, ranks: int
) -> float:
    """Bytes of a rank's even share of all tables and their slots."""
    return 4 * workload.weights * (1 + _SLOTS[optimizer]) / ranks


def limit_bytes(share: float) -> float:
    """The most memory that a rank with that share should need."""
    return _SHARE_LIMIT * share + _BASE_LIMIT


def memory_table(
    rows: report.Rows, workload: workloads.Workload, optimizer: str
) -> str:
    """Holds the peak memory of our rows against share and limit."""
    columns = ("ranks", "RSS MB", "share MB", "limit MB")
    lines = [_line("memory", columns)]
    for (name, ranks), row in report.by_variant(rows):
        if row.status != "ok" or not row.ours:
            continue
        share = share_bytes(workload, optimizer, ranks)
        figures = (row.peak_rss, share, limit_bytes(share))
        cells = [f"{value / report.MEGABYTE:.0f}" for value in figures]
        verdict = "reached" if figures[0] <= figures[2] else "NOT REACHED"
        lines.append(f"{_line(name, (str(ranks), *cells))}  {verdict}")
    return "\n".join(lines)


def _line(name: str, cells: tuple[str, ...]) -> str:
    first, *others = cells
    return f"{name:<18}{first:>6}" + "".join(f"{c:>12}" for c in others)


def main() -> None:
    """Runs, prints the tables, draws scaling.png."""
    run.exit_on_signals()
    arguments = make_parser().parse_args()
    workload = workloads.WORKLOADS[arguments.workload]
    folder = run.new_folder(arguments.output, f"scaling-{workload.name}")
    rows = read(arguments.recorded) or measure(arguments, folder)
    title = f"{workload.name}, {arguments.batch} samples per rank"
    if arguments.dilation != 1:
        title += ", times divided by the ranks of a core"
    print(f"\n{title}, {arguments.egress} each, medians\n{table(rows)}")
    limits = {}
    if arguments.memory:
        print(f"\n{memory_table(rows, workload, arguments.optimizer)}")
        limits = {
            ranks: limit_bytes(
                share_bytes(workload, arguments.optimizer, ranks)
            )
            for ranks in arguments.ranks
        }
    path = folder / "scaling.png"
    run.draw(lambda chart: chart.draw_scaling(path, title, rows, limits))
    factors = speedups(rows)
    if factors:
        path = folder / "speedup.svg"
        run.draw(lambda chart: chart.draw_speedups(path, title, factors))
    print(f"logs, results.jsonl and charts: {folder}")
    sys.exit(any(row.ours and row.status != "ok" for row in rows.values()))


if __name__ == "__main__":
    main()
