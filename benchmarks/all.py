# SPDX-License-Identifier: Apache-2.0
"""Times all workloads under all variants: one table, a chart of each.

Sizes fit a machine with 24 GB. Every outcome is written as soon as it is
there (build/bench/NAME/result.json); a second start with the same settings
runs only what is missing or has failed.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import shutil
import sys
from typing import Any

from benchmarks import launch
from benchmarks import report
from benchmarks import run
from benchmarks import summary

_ALONE = ("stock-sparse", "fbgemm", "hybrid-row")
_OURS = ("hybrid-row", "hybrid-column", "hybrid-auto")
_STOCK = ("stock-sparse", "stock-dense", "parameter-server")

_RESULT = "result.json"

# What may differ between two runs that measure the same.
_IRRELEVANT = ("limit", "output", "variants", "fbgemm_python")


@dataclasses.dataclass(frozen=True)
class Size:
    """Variants that run on one workload with as many ranks."""

    workload: str
    ranks: int
    variants: tuple[str, ...]
    batch: int = 256

    @property
    def title(self) -> str:
        """Names the size in the table and in the chart."""
        many = f"{self.ranks} ranks" if self.ranks > 1 else "1 process"
        return f"{self.workload}, {many}, {self.batch} samples per rank"


# Stock holds every table on every rank several times over: `ads` and `criteo`
# on 2 ranks take what the machine has, and their dense gradients, as large as
# the tables, do not fit. Columns of a table of width 1 cannot be shared.
_SIZES = (
    Size("timelines", 1, _ALONE),
    Size("timelines", 4, _STOCK + _OURS),
    Size("ads", 1, _ALONE),
    Size("ads", 2, ("stock-sparse", "parameter-server", *_OURS)),
    Size("criteo", 1, _ALONE, 2048),
    Size("criteo", 2, ("stock-sparse", "parameter-server", *_OURS), 2048),
    Size("criteo", 4, ("parameter-server", *_OURS), 2048),
    Size("movielens", 1, _ALONE),
    Size("movielens", 4, _STOCK + _OURS),
    Size("a9a", 1, _ALONE),
    Size("a9a", 4, (*_STOCK, "hybrid-row", "hybrid-auto")),
    Size("criteo_sample", 1, _ALONE),
    Size("criteo_sample", 4, _STOCK + _OURS),
)

_WHOLE_ROWS = ("hybrid-row", "hybrid-table", "hybrid-row-dedup",
               "hybrid-table-dedup", "hybrid-auto")  # fmt: skip
_EVERY = ("hybrid-column", "hybrid-grid", *_WHOLE_ROWS)

# What the planner's choice is held against.
_PLACEMENTS = (
    Size("timelines", 4, _EVERY),
    Size("ads", 4, _EVERY),
    Size("criteo", 4, _EVERY, 2048),
    Size("movielens", 4, _EVERY),
    Size("a9a", 4, _WHOLE_ROWS),
    Size("criteo_sample", 4, _EVERY),
)


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.all", description=__doc__
    )
    names = sorted({size.workload for size in _SIZES})
    parser.add_argument("--workloads", nargs="+", choices=names, metavar="NAME")
    parser.add_argument("--variants", nargs="+", choices=run.VARIANTS)
    parser.add_argument("--optimizer", choices=("sgd", "adagrad"))
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="forget what has been measured of these workloads",
    )
    parser.add_argument(
        "--placements",
        action="store_true",
        help="ours alone, in every placement: does the planner send least?",
    )
    run.add_timing_arguments(parser)
    run.add_network_arguments(parser)
    parser.set_defaults(ranks=None, optimizer="sgd", seconds=8.0)
    return parser


def choose(arguments: argparse.Namespace) -> list[Size]:
    """Returns the sizes asked for; `--ranks` replaces all of several ranks."""
    chosen: dict[Size, None] = {}
    for size in _PLACEMENTS if arguments.placements else _SIZES:
        if size.workload not in (arguments.workloads or [size.workload]):
            continue
        ranks = size.ranks
        if ranks > 1 and arguments.ranks:
            ranks = arguments.ranks
        wanted = arguments.variants or size.variants
        variants = tuple(v for v in size.variants if v in wanted)
        if variants:
            size = dataclasses.replace(size, ranks=ranks, variants=variants)
            chosen[size] = None
    return list(chosen)


def measure(size: Size, arguments: argparse.Namespace) -> report.Group:
    """Runs what is missing of `size`; keeps outcomes in its result file."""
    folder = arguments.output.resolve() / size.workload
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _RESULT
    kept = json.loads(path.read_text()) if path.exists() else {}
    settings = _settings_of(size, arguments)
    about = run.settings_of(settings)
    missing = [
        name
        for name in size.variants
        if not _finished(kept.get(f"{name}@{size.ranks}"), about)
    ]
    if missing:
        with run.open_network(settings, size.ranks) as net:
            for name in missing:
                key = f"{name}@{size.ranks}"
                print(f"{size.workload}, {key} ...", flush=True)
                shutil.rmtree(folder / key, ignore_errors=True)
                machine = run.machine()
                outcome = run.run_variant(name, settings, net, folder / key)
                kept[key] = {
                    "settings": about,
                    "machine": machine,
                    "outcome": dataclasses.asdict(outcome),
                }
                _write(path, kept)
    rows = [
        report.make_row(
            name, launch.Outcome(**kept[f"{name}@{size.ranks}"]["outcome"])
        )
        for name in size.variants
    ]
    return report.Group(size.title, rows)


def _settings_of(
    size: Size, arguments: argparse.Namespace
) -> argparse.Namespace:
    """Arguments of `benchmarks.run` for `size`."""
    defaults = vars(run.make_parser().parse_args([]))
    given = {k: v for k, v in vars(arguments).items() if k in defaults}
    sizes = {k: v for k, v in vars(size).items() if k in defaults}
    return argparse.Namespace(**{**defaults, **given, **sizes})


def _finished(entry: dict[str, Any] | None, settings: dict[str, Any]) -> bool:
    if entry is None or entry["outcome"]["status"] != "ok":
        return False
    return _relevant(entry["settings"]) == _relevant(settings)


def _relevant(settings: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in settings.items() if k not in _IRRELEVANT}


def _write(path: pathlib.Path, content: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    partial.rename(path)


def main() -> None:
    """Runs all sizes, prints the table, draws the charts."""
    run.exit_on_signals()
    arguments = make_parser().parse_args()
    if os.getloadavg()[0] > 1:
        print("Others are computing on this machine: times will be too long.")
    sizes = choose(arguments)
    if not sizes:
        sys.exit("None of these workloads has one of these variants")
    folder = arguments.output.resolve()
    if arguments.fresh:
        for size in sizes:
            (folder / size.workload / _RESULT).unlink(missing_ok=True)
    groups = [measure(size, arguments) for size in sizes]
    table = summary.table(groups)
    print(f"\nMedians, of several ranks the worst; {arguments.egress} each")
    if arguments.placements:
        table += "\n\n" + "\n".join(map(summary.planned, groups))
    print(table)
    (folder / "table.txt").write_text(table + "\n")
    run.draw(lambda chart: chart.draw_workloads(folder, groups))
    print(f"\nlogs, results, table.txt and charts: {folder}")
    ours = [row for group in groups for row in group.rows if row.ours]
    sys.exit(any(row.status != "ok" for row in ours))


if __name__ == "__main__":
    main()
