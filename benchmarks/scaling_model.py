# SPDX-License-Identifier: Apache-2.0
"""What each placement would cost on 1 to 1024 ranks, from the cost model.

    python -m benchmarks.scaling_model --workloads timelines ads criteo

No rank is started: these are computed figures. A placement pays up to the most
ranks that still bring `--gain` times the samples per second of any fewer.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from collections.abc import Sequence

from benchmarks import workloads
from tfdist_ext.tables import plan as plan_lib
from tfdist_ext.tables.table_config import FeatureConfig
from tfdist_ext.tables.table_config import TableConfig

RANKS = tuple(2**n for n in range(11))
PLACEMENTS = (
    "auto",
    "data_parallel",
    "table_wise",
    "row_wise",
    "column_wise",
    "grid",
)
_BATCH_SIZES = {"criteo": 2048}


def make_plan(
    workload: workloads.Workload,
    placement: str,
    ranks: int,
    options: argparse.Namespace,
) -> plan_lib.ShardingPlan:
    """Plans a workload with every table in the same kind of placement."""
    tables = [
        TableConfig(f"table{i}", t.rows, t.width, placement=placement)
        for i, t in enumerate(workload.tables)
    ]
    features = [
        FeatureConfig(table.name, table, (None, t.hotness), (None, t.width))
        for table, t in zip(tables, workload.tables, strict=True)
    ]
    return plan_lib.plan(
        tables,
        features,
        ranks,
        batch_size=options.batch_size or _BATCH_SIZES.get(workload.name, 256),
        wire_bytes=options.wire_bytes,
        link_bytes_per_second=1e6 * options.link,
        bytes_slack=options.bytes_slack,
        slots_per_weight=options.optimizer,
    )


def pays_up_to(
    samples_per_second: Sequence[float], ranks: Sequence[int], gain: float
) -> int:
    """The most ranks that bring so much more than any fewer do.

    Args:
        samples_per_second: of all ranks together, for each of `ranks`.
        ranks: powers of two, ascending.
        gain: least factor over the best of all fewer ranks.
    """
    last = 0
    for i, speed in enumerate(samples_per_second):
        if speed >= gain * max(samples_per_second[:i], default=0.0):
            last = i
    return ranks[last]


def lines(
    workload: workloads.Workload, options: argparse.Namespace
) -> Iterable[str]:
    """The report on one workload."""
    plans = {
        placement: [make_plan(workload, placement, n, options) for n in RANKS]
        for placement in PLACEMENTS
    }
    batch = plans["auto"][0].problem.setting.batch_size
    yield f"{workload.name}, {batch} samples per rank"
    for title, attribute, unit in (
        ("MB sent by the busiest rank per step", "bytes_per_step", 1e6),
        ("ms of exchanges and lookups per step", "seconds_per_step", 1e-3),
        ("MB of weights and slots, fullest rank", "memory", 1e6),
    ):
        yield ""
        yield f"{title:<38}" + "".join(f"{n:>9}" for n in RANKS)
        for placement, made in plans.items():
            values = [getattr(plan, attribute) / unit for plan in made]
            yield f"  {placement:<36}" + "".join(f"{v:>9.4g}" for v in values)
    yield ""
    for placement, made in plans.items():
        speed = [
            batch * n / plan.seconds_per_step
            for n, plan in zip(RANKS, made, strict=True)
        ]
        last = pays_up_to(speed, RANKS, options.gain)
        rate = speed[RANKS.index(last)]
        yield f"  {placement:<14} pays up to {last:>4} ranks, {rate:,.0f}/s"


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--workloads",
        nargs="+",
        choices=sorted(workloads.WORKLOADS),
        default=["timelines", "ads", "criteo"],
    )
    parser.add_argument("--batch-size", type=int, help="samples per rank")
    parser.add_argument("--wire-bytes", type=float, default=4.0)
    parser.add_argument("--link", type=float, default=150.0, help="MB/s")
    parser.add_argument("--bytes-slack", type=float, default=0.1)
    parser.add_argument("--optimizer", default="adagrad")
    parser.add_argument("--gain", type=float, default=1.2)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the report."""
    options = make_parser().parse_args(arguments)
    for name in options.workloads:
        print("\n".join(lines(workloads.WORKLOADS[name], options)), end="\n\n")


if __name__ == "__main__":
    main()
