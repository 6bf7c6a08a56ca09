# SPDX-License-Identifier: Apache-2.0
"""Times a workload under stock strategies and ours, side by side.

Every rank runs in a network namespace of its own whose egress and ingress are
limited (needs root and iproute2). Each variant's results are checked against
a single-process reference before it is timed; a variant that fails is
reported with its reason and the others go on. Bytes come from the interface
counters around the timed steps.
"""

import argparse
import contextlib
import os
import pathlib
import platform
import signal
import sys
import time
from importlib import metadata
from typing import Any

from benchmarks import launch
from benchmarks import network
from benchmarks import report
from benchmarks import workloads

VARIANTS = {
    "stock-sparse": {"variant": "stock", "gradient": "indexed_slices"},
    "stock-dense": {"variant": "stock", "gradient": "dense"},
    "hybrid-row": {"variant": "hybrid", "sharding": "row"},
    "hybrid-column": {"variant": "hybrid", "sharding": "column"},
    "hybrid-auto": {"variant": "hybrid", "sharding": "auto"},
}
_DEFAULT_VARIANTS = ("stock-sparse", "hybrid-row", "hybrid-column")

_EXAMPLES = """\
examples:
  python -m benchmarks.run --workload timelines --ranks 4 --egress 150mbps
  python -m benchmarks.run --workload ads --ranks 2 --variants hybrid-row
  python -m benchmarks.run --workload smoke --ranks 2 --network loopback

variants: """ + ", ".join(VARIANTS)


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=VARIANTS,
        default=_DEFAULT_VARIANTS,
        metavar="VARIANT",
        help=f"what to run (default: {' '.join(_DEFAULT_VARIANTS)})",
    )
    _add_setting_arguments(parser)
    _add_timing_arguments(parser)
    add_network_arguments(parser)
    return parser


def _add_setting_arguments(parser: argparse.ArgumentParser) -> None:
    def choice(name: str, options: Any, default: str, text: str) -> None:
        parser.add_argument(
            name,
            choices=sorted(options),
            default=default,
            help=f"{text} (default: {default})",
        )

    choice("--workload", workloads.WORKLOADS, "timelines", "model and ids")
    parser.add_argument(
        "--batch", type=int, default=256, help="samples per rank (256)"
    )
    choice("--optimizer", ("sgd", "adagrad"), "sgd", "optimizer of all")
    parser.add_argument(
        "--learning-rate", type=float, default=0.1, help="its rate (0.1)"
    )
    choice("--loop", ("custom", "fit"), "custom", "custom loop or Keras fit")
    choice("--keras", ("2", "3"), "3", "2 is tf_keras")
    choice("--input", ("ids", "ragged", "sparse"), "ids", "input of ours")
    dtypes = ("float32", "bfloat16", "float16")
    choice("--wire-dtype", dtypes, "float32", "numbers on our wire")
    parser.add_argument("--seed", type=int, default=0, help="of the data (0)")


def _add_timing_arguments(parser: argparse.ArgumentParser) -> None:
    def number(name: str, kind: type, default: float, text: str) -> None:
        parser.add_argument(
            name, type=kind, default=default, help=f"{text} ({default})"
        )

    number("--check-steps", int, 2, "steps compared with the reference")
    number("--warm-up", int, 5, "steps before the timed ones")
    number("--steps", int, 200, "timed steps at most")
    number("--seconds", float, 15.0, "time for the timed steps")
    number("--limit", float, 300.0, "wall limit per variant, seconds")


def add_network_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what all benchmarks ask about ranks, network and output."""
    parser.add_argument(
        "--ranks", type=int, default=4, help="number of processes (4)"
    )
    parser.add_argument(
        "--egress",
        default="150mbps",
        help="limit of each rank's egress and of its ingress in tc's units, "
        "where mbps is megabytes per second; 'none': no limit (150mbps)",
    )
    parser.add_argument(
        "--network",
        choices=("namespaces", "loopback"),
        default="namespaces",
        help="loopback needs no root, but has no limits and no byte counts",
    )
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        default=pathlib.Path("build/bench"),
        help="folder that gets a new folder for this run (build/bench)",
    )


def open_network(
    arguments: argparse.Namespace, ranks: int
) -> contextlib.AbstractContextManager[network.Network]:
    """Returns the context in which the ranks' network exists.

    Raises:
        SystemExit: namespaces are asked for and cannot be made here.
    """
    if ranks == 1 or arguments.network == "loopback":
        return contextlib.nullcontext(network.loopback(ranks))
    reason = network.reason_unavailable()
    if reason:
        sys.exit(f"{reason}; as an alternative use --network loopback")
    if arguments.egress == "none":
        return network.namespaces(ranks, None)
    return network.namespaces(ranks, network.check_rate(arguments.egress))


def new_folder(output: pathlib.Path, name: str) -> pathlib.Path:
    """Makes a new folder for one run below `output`."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = output.resolve() / f"{name}-{stamp}-{os.getpid()}"
    folder.mkdir(parents=True)
    return folder


def machine() -> dict[str, Any]:
    """Describes this machine and its load before the run."""
    return {
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "tensorflow": metadata.version("tensorflow"),
        "kernel": platform.release(),
    }


def exit_on_signals() -> None:
    """Makes SIGTERM and SIGINT unwind the stack, so the network goes away.

    SIGINT too: shells start background jobs with SIGINT ignored.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))


def run_variants(
    arguments: argparse.Namespace, folder: pathlib.Path
) -> dict[str, launch.Outcome]:
    """Runs the variants one after another in one network."""
    environment = {"TF_USE_LEGACY_KERAS": str(int(arguments.keras == "2"))}
    outcomes = {}
    with open_network(arguments, arguments.ranks) as net:
        for name in arguments.variants:
            print(f"{name} ...", flush=True)
            options = {**_settings(arguments), **VARIANTS[name]}
            outcomes[name] = launch.run_job(
                "training",
                options,
                net,
                folder / name,
                arguments.limit,
                environment,
            )
    return outcomes


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    settings = dict(vars(arguments))
    settings["output"] = str(settings["output"])
    return settings


def main() -> None:
    """Runs, prints the table and the targets, writes JSON and a chart."""
    exit_on_signals()
    arguments = make_parser().parse_args()
    settings = _settings(arguments)
    title = f"{arguments.workload}, {arguments.ranks} rank(s)"
    folder = new_folder(
        arguments.output, f"{arguments.workload}-{arguments.ranks}"
    )
    about = machine()
    outcomes = run_variants(arguments, folder)
    rows = [report.make_row(*item) for item in outcomes.items()]
    counted = arguments.ranks > 1 and arguments.network == "namespaces"
    if counted:
        title += f", {arguments.egress} each"
    print(f"\n{title}, {arguments.batch} samples per rank, medians")
    print(report.table(rows, counted))
    for line in report.verdicts(rows, settings):
        print(line)
    report.write_json(folder / "result.json", settings, about, outcomes)
    _draw(folder / "chart.png", title, rows)
    print(f"logs, result.json and chart.png: {folder}")
    ours = [row for row in rows if row.variant.startswith("hybrid")]
    sys.exit(any(row.status != "ok" for row in ours))


def _draw(path: pathlib.Path, title: str, rows: list[report.Row]) -> None:
    try:
        from benchmarks import chart
    except ImportError as error:
        print(f"no chart: {error}")
        return
    chart.draw(path, title, rows)


if __name__ == "__main__":
    main()
