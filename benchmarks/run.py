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
import dataclasses
import functools
import os
import pathlib
import platform
import signal
import sys
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

from benchmarks import cluster
from benchmarks import launch
from benchmarks import network
from benchmarks import report
from benchmarks import workloads

VARIANTS = {
    "stock-sparse": {"variant": "stock", "gradient": "indexed_slices"},
    "stock-dense": {"variant": "stock", "gradient": "dense"},
    "parameter-server": {"variant": "parameter-server"},
    "fbgemm": {"variant": "fbgemm"},
    "hybrid-row": {"variant": "hybrid", "sharding": "row"},
    "hybrid-column": {"variant": "hybrid", "sharding": "column"},
    "hybrid-table": {"variant": "hybrid", "sharding": "table"},
    "hybrid-grid": {"variant": "hybrid", "sharding": "grid"},
    "hybrid-row-dedup": {"variant": "hybrid", "sharding": "row-dedup"},
    "hybrid-table-dedup": {"variant": "hybrid", "sharding": "table-dedup"},
    "hybrid-auto": {"variant": "hybrid", "sharding": "auto"},
    "hybrid-plain": {"variant": "hybrid", "sharding": "plain"},
}
_DEFAULT_VARIANTS = ("stock-sparse", "hybrid-row", "hybrid-column")
_NO_FBGEMM = "needs --fbgemm-python, a Python with torch and fbgemm_gpu"

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
    add_setting_arguments(parser)
    add_timing_arguments(parser)
    add_network_arguments(parser)
    add_dilation_argument(parser)
    return parser


def add_setting_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what defines a training: model, batch, optimizer, wire."""

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
    choice(
        "--loop",
        ("custom", "dataset", "fit"),
        "custom",
        "custom loop on prepared tensors or on a dataset, or Keras fit",
    )
    choice("--keras", ("2", "3"), "3", "2 is tf_keras")
    choice("--input", ("ids", "ragged", "sparse"), "ids", "input of ours")
    dtypes = ("float32", "bfloat16", "float16")
    choice("--wire-dtype", dtypes, "float32", "numbers on our wire")
    choice("--gradient-dtype", dtypes, "float32", "our dense gradients there")
    parser.add_argument(
        "--wire-packing", action="store_true", help="pack them, without loss"
    )
    parser.add_argument(
        "--prefetch-ids",
        action="store_true",
        help="ids are sent a step ahead; ours, with --loop dataset or fit",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the data (0)")


def add_timing_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what all trainings ask about steps and time."""

    def number(name: str, kind: type, default: float, text: str) -> None:
        parser.add_argument(
            name, type=kind, default=default, help=f"{text} ({default})"
        )

    # The reference takes memory of its own, which would count as the rank's.
    text = "steps compared with the reference, 0 where memory is measured"
    number("--check-steps", int, 2, text)
    number("--warm-up", int, 25, "steps before the timed ones")
    number("--steps", int, 200, "timed steps at most")
    number("--seconds", float, 15.0, "time for the timed steps")
    number("--limit", float, 300.0, "wall limit per variant, seconds")
    parser.add_argument(
        "--fbgemm-python",
        metavar="PATH",
        help="interpreter of an environment with torch and fbgemm_gpu",
    )


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


def add_dilation_argument(parser: argparse.ArgumentParser) -> None:
    """Adds what makes ranks that share cores count as machines."""
    parser.add_argument(
        "--dilation",
        type=_dilation,
        default=1.0,
        help="slow links by this factor, and divide all times by it, so that "
        "ranks that share cores are timed as if each had its own; 'auto': "
        "ranks / cores (1)",
    )


def _dilation(text: str) -> float:
    """0 for "auto"."""
    value = 0.0 if text == "auto" else float(text)
    if text != "auto" and not value >= 1:
        raise argparse.ArgumentTypeError(
            f"must be 'auto' or a number of at least 1, received: {text!r}"
        )
    return value


def dilation_of(arguments: argparse.Namespace, ranks: int) -> float:
    """The factor by which links are slower and times are divided.

    A job whose links and processors are both slower by the same factor takes
    as many times longer in all its parts.

    Source: Gupta et al., To Infinity and Beyond: Time-Warped Network
    Emulation, NSDI 2006.

    Args:
        arguments: `dilation`, if the command has it; 0 for as many as ranks
            share a core.
        ranks: number of processes.
    """
    cores = len(os.sched_getaffinity(0))
    asked = getattr(arguments, "dilation", 1.0)
    return float(asked or max(1.0, ranks / cores))


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
    dilation = dilation_of(arguments, ranks)
    return network.namespaces(
        ranks, network.dilated(arguments.egress, dilation)
    )


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
    outcomes = {}
    with open_network(arguments, arguments.ranks) as net:
        for name in arguments.variants:
            print(f"{name} ...", flush=True)
            outcomes[name] = run_variant(name, arguments, net, folder / name)
    return outcomes


def run_variant(
    name: str,
    arguments: argparse.Namespace,
    net: network.Network,
    folder: pathlib.Path,
) -> launch.Outcome:
    """Runs one variant in the new `folder`; failures are in the outcome."""
    options = {**settings_of(arguments), **VARIANTS[name]}
    environment = {"TF_USE_LEGACY_KERAS": str(int(arguments.keras == "2"))}
    run_job = functools.partial(
        launch.run_job,
        options=options,
        folder=folder,
        limit_seconds=arguments.limit,
        environment=environment,
    )
    if name == "fbgemm":
        if not arguments.fbgemm_python:
            return launch.Outcome("left out", _NO_FBGEMM, (), 0.0)
        python = arguments.fbgemm_python
        return run_job(name, net=network.loopback(1), python=python)
    if name != "parameter-server":
        return run_job("training", net=net)
    environment["GRPC_FAIL_FAST"] = "use_caller"
    outcome = run_job(name, net=cluster.with_parameter_servers(net))
    merged = cluster.by_host(outcome.results) if outcome.results else ()
    return dataclasses.replace(outcome, results=merged)


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments as JSON values."""
    settings = dict(vars(arguments))
    settings["output"] = str(settings["output"])
    return settings


def main() -> None:
    """Runs, prints the table and the targets, writes JSON and a chart."""
    exit_on_signals()
    arguments = make_parser().parse_args()
    settings = settings_of(arguments)
    title = f"{arguments.workload}, {arguments.ranks} rank(s)"
    folder = new_folder(
        arguments.output, f"{arguments.workload}-{arguments.ranks}"
    )
    about = machine()
    outcomes = run_variants(arguments, folder)
    dilation = dilation_of(arguments, arguments.ranks)
    rows = [report.make_row(*item, dilation) for item in outcomes.items()]
    counted = arguments.ranks > 1 and arguments.network == "namespaces"
    if counted:
        title += f", {arguments.egress} each"
    if dilation != 1:
        title += f", times divided by {dilation:g}"
    print(f"\n{title}, {arguments.batch} samples per rank, medians")
    print(report.table(rows, counted))
    for line in report.verdicts(rows, settings):
        print(line)
    report.write_json(folder / "result.json", settings, about, outcomes)
    groups = [report.Group(title, rows)]
    draw(lambda chart: chart.draw(folder / "chart.png", groups))
    print(f"logs, result.json and chart.png: {folder}")
    sys.exit(any(row.ours and row.status != "ok" for row in rows))


def draw(call: Callable[[Any], None]) -> None:
    """Calls back with the module `chart`, or says why there is none."""
    try:
        from benchmarks import chart
    except ImportError as error:
        print(f"no chart: {error}")
        return
    call(chart)


if __name__ == "__main__":
    main()
