# SPDX-License-Identifier: Apache-2.0
"""Runs programs at some ranks and prints their verdicts.

Usage: python -m tests.numbers.run [--ranks 2] [--keras 3] [--only PATTERN]
    [--tables no|yes|both] [--batches even|uneven|both] [--wrong] [--verbose]
    [--balance 7 2 1]

Programs that are not for so many ranks are left out.

Each line: the program, the verdict that it must have, the one that it has,
the largest relative error, and where that is or what was said.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import tempfile
from collections.abc import Iterator

from tests.numbers import judging
from tests.numbers import registry
from tests.numbers.running import Runner
from tests.ranks.pool import Pools
from tests.ranks.servers import Servers

_CHOICES = {
    "tables": {"no": (False,), "yes": (True,), "both": (False, True)},
    "batches": {
        "even": ("even",),
        "uneven": ("uneven",),
        "both": registry.BATCHES,
    },
}


def main(arguments: list[str]) -> int:
    """Prints a table; returns how many verdicts are wrong."""
    options = _options(arguments)
    servers = Servers()
    pools = Pools(servers)
    wrong = 0
    try:
        with tempfile.TemporaryDirectory(prefix="tfdist") as folder:
            balance = options.balance
            shares = {} if balance is None else {"balance": balance}
            runner = Runner(pools, pathlib.Path(folder), **shares)
            for each, case in _chosen(options):
                seen = runner.seen(each, case, options.ranks)
                good = seen.verdict == each.verdict_at(options.ranks)
                wrong += not good
                if not good or not options.wrong:
                    wanted = each.verdict_at(options.ranks)
                    print(_line(case, wanted, seen, options), flush=True)
    finally:
        pools.close()
        servers.close()
    print(f"{wrong} verdicts are wrong")
    return min(wrong, 1)


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--keras", type=int, default=3, choices=(2, 3))
    parser.add_argument("--only", default="", help="a regular expression")
    for name, choices in _CHOICES.items():
        parser.add_argument(f"--{name}", default="both", choices=choices)
    parser.add_argument("--balance", nargs="+", type=float, help="shares")
    parser.add_argument("--wrong", action="store_true", help="only these")
    parser.add_argument("--verbose", action="store_true", help="whole texts")
    return parser.parse_args(arguments)


def _chosen(
    options: argparse.Namespace,
) -> Iterator[tuple[registry.Program, registry.Case]]:
    for each in registry.programs(options.only).values():
        if options.ranks not in each.sizes:
            continue
        for case in registry.settings_of(each, options.keras):
            if (
                case.tables in _CHOICES["tables"][options.tables]
                and case.batches in _CHOICES["batches"][options.batches]
            ):
                yield each, case


def _line(
    case: registry.Case,
    wanted: str,
    seen: judging.Seen,
    options: argparse.Namespace,
) -> str:
    width = 10**6 if options.verbose else 160
    texts = [seen.where, *(f"said: {text}" for text in seen.said)]
    rest = " | ".join(t if options.verbose else t[:width] for t in texts)
    rest = rest if options.verbose else rest.replace("\n", " ")
    mark = " " if seen.verdict == wanted else "!"
    return (
        f"{mark} {case!s:60} {wanted:8} {seen.verdict:10} "
        f"{seen.error:9.2e}  {rest}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
