# SPDX-License-Identifier: Apache-2.0
"""Times settings of this package against each other in one job.

All are built in the same processes and take turns of some steps, so what the
machine does besides meets all of them alike. Bytes are exact; `gain` is
against the first setting.
"""

import argparse
import json
import statistics
import sys
from typing import Any

from benchmarks import launch
from benchmarks import report
from benchmarks import run

_EXAMPLES = """\
examples:
  python -m benchmarks.settings --workload timelines --ranks 4 \\
      --egress 100mbit --settings sharding=row sharding=auto \\
      sharding=auto,wire_dtype=bfloat16
  python -m benchmarks.settings --workload timelines --ranks 2 --loop fit \\
      --settings sharding=row,timeline=none sharding=row,timeline=all
"""


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.settings",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--settings",
        nargs="+",
        type=parse_setting,
        required=True,
        metavar="NAME=VALUE,...",
        help="of `run`; besides `sharding`, the end of a variant's name, and "
        "`timeline`, what callbacks.Timeline traces: `none` is none of them, "
        "`waiting` no step, `exchanges`, `all`",
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="turns of each setting (5)"
    )
    run.add_setting_arguments(parser)
    run.add_timing_arguments(parser)
    run.add_network_arguments(parser)
    parser.set_defaults(steps=20)
    return parser


def parse_setting(text: str) -> dict[str, Any]:
    """Reads `name=value,name=value`; values are JSON or else words.

    >>> parse_setting("sharding=auto,prefetch_ids=true")
    {'sharding': 'auto', 'prefetch_ids': True}
    """
    setting = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals:
            raise argparse.ArgumentTypeError(f"NAME=VALUE, not {part!r}")
        try:
            setting[name] = json.loads(value)
        except json.JSONDecodeError:
            setting[name] = value
    return setting


def table(
    settings: list[dict[str, Any]], results: tuple[dict[str, Any], ...]
) -> str:
    """A line per setting, of several ranks the worst.

    `ms/step` is the median of the rounds, between the fastest and the slowest;
    `cpu ms` that of processor time, which others on the machine disturb less.
    """
    lines = [
        f"{'ms/step':>9}{'of':>18}{'gain':>6}{'cpu ms':>9}{'MB':>9}"
        f"{'less':>6}  setting"
    ]
    first: tuple[float, float] | None = None
    for index, setting in enumerate(settings):
        times = [
            max(r["rounds"][turn][str(index)]["p50"] for r in results)
            for turn in range(len(results[0]["rounds"]))
        ]
        sent = max(
            statistics.median(
                found[str(index)]["per_step"]["egress_bytes"]
                for found in r["rounds"]
            )
            for r in results
        )
        cpu = max(
            statistics.median(
                found[str(index)]["per_step"]["cpu_ms"] for found in r["rounds"]
            )
            for r in results
        )
        time = statistics.median(times)
        first = first or (time, sent)
        spread = f"{min(times):.2f} - {max(times):.2f}"
        less = f"{1 - sent / first[1]:.0%}" if first[1] else "-"
        name = ",".join(f"{key}={value}" for key, value in setting.items())
        lines.append(
            f"{time:>9.2f}{spread:>18}{1 - time / first[0]:>6.0%}{cpu:>9.2f}"
            f"{sent / report.MEGABYTE:>9.4f}{less:>6}  {name}"
        )
    return "\n".join(lines)


def main() -> None:
    """Runs one job, prints the table."""
    run.exit_on_signals()
    arguments = make_parser().parse_args()
    options = run.settings_of(arguments)
    name = f"settings-{arguments.workload}-{arguments.ranks}"
    folder = run.new_folder(arguments.output, name)
    with run.open_network(arguments, arguments.ranks) as net:
        outcome = launch.run_job(
            "settings",
            options,
            net,
            folder / "job",
            arguments.limit,
            {"TF_USE_LEGACY_KERAS": str(int(arguments.keras == "2"))},
        )
    if outcome.status != "ok":
        sys.exit(f"{outcome.status}: {outcome.reason}; logs: {folder}")
    (folder / "result.json").write_text(
        json.dumps({"settings": options, "results": outcome.results}, indent=2)
    )
    print(
        f"{arguments.workload}, {arguments.ranks} ranks, {arguments.egress} "
        f"each, {arguments.batch} samples per rank"
    )
    print(table(arguments.settings, outcome.results))


if __name__ == "__main__":
    main()
