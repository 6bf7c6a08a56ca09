# SPDX-License-Identifier: Apache-2.0
"""Dynamic vocabularies: what a key costs, and how full they get.

    python -m benchmarks.vocabulary [--capacity 25000000] [--steps 200]
    python -m benchmarks.vocabulary --capacity 0 --ranks 2 --egress 150mbps

Trains `timelines` on fixed and on dynamic tables in turns, without and with
`prefetch_ids`. Fills one rank's share of a vocabulary of 4 ranks, looks its
keys up, and evicts them; then prints at which share of the capacity the first
bucket of a vocabulary is full.
"""

import argparse
import contextlib
import pathlib
import statistics
import sys
import time

import numpy as np
import tensorflow as tf

from benchmarks import launch
from benchmarks import network
from benchmarks import run
from benchmarks.vocabulary_rank import KINDS
from tfdist_ext.ops import vocabulary_ops
from tfdist_ext.tables.table_config import DynamicVocabulary

_RANKS = 4
_HASH_KEY = tf.constant([1, 2], tf.int64)
_BATCH = 100_000


def _keys(first: int, count: int) -> tf.Tensor:
    """Keys without an order: an odd factor permutes the 64-bit numbers."""
    numbers = np.arange(first, first + count, dtype=np.uint64)
    scattered = (numbers * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)
    return tf.constant(scattered)


def _learn(handle: tf.Tensor, keys: tf.Tensor) -> tf.Tensor:
    (rows,), _ = vocabulary_ops.local_rows(
        [handle], [keys], [0], learn=True, advance=True
    )
    return rows


def time_of_keys(capacity: int, steps: int) -> dict[str, float]:
    """Nanoseconds of a key: new, known, not learned, and in another's place.

    Args:
        capacity: of the rank's share.
        steps: batches that are timed of each kind but new ones.
    """
    config = DynamicVocabulary(capacity, evict="lru")
    handle = vocabulary_ops.vocabulary("t", config, _HASH_KEY, 0, 1)
    full = int(capacity * 0.9) // _BATCH
    found: dict[str, float] = {}

    def timed(kind: str, batches: list[int], learn: bool = True) -> None:
        seconds = 0.0
        for batch in batches:
            keys = _keys(batch * _BATCH, _BATCH)
            start = time.process_time()
            vocabulary_ops.local_rows(
                [handle], [keys], [0], learn=learn, advance=learn
            )
            seconds += time.process_time() - start
        found[kind] = seconds * 1e9 / _BATCH / len(batches)

    known = np.random.default_rng(1).integers(0, full, steps).tolist()
    timed("new", list(range(full)))
    timed("known", known)
    timed("not learned", known, learn=False)
    over = int(capacity * 1.1) // _BATCH
    timed("until full", list(range(full, over)))
    timed("evicting", list(range(over, over + steps)))
    return found


def fill_of_first(capacity: int) -> float:
    """The share of a capacity at which a new key finds no row."""
    config = DynamicVocabulary(capacity)
    handle = vocabulary_ops.vocabulary("t", config, _HASH_KEY, 0, 1)
    step = max(capacity // 500, 1)
    for first in range(0, capacity + step, step):
        try:
            _learn(handle, _keys(first, step))
        except tf.errors.FailedPreconditionError:
            break
    return int(vocabulary_ops.vocabulary_counts(handle)[0]) / capacity


def cost_of_step(
    ranks: int,
    options: dict[str, int],
    egress: str | None,
    output: pathlib.Path,
) -> dict[str, list[dict[str, float]]]:
    """Measures steps of each kind of table.

    Args:
        ranks: processes.
        options: "batch", "warm_up", "steps" and "rounds" of each kind.
        egress: limit of each rank's link, see `network.namespaces`; None for
            loopback.
        output: folder in which the folder of the job is created.

    Returns:
        For each of `vocabulary_rank.KINDS`, means over the ranks in every
        round, see `measure.per_step`.

    Raises:
        SystemExit: if a rank fails.
    """
    place = contextlib.nullcontext(network.loopback(ranks))
    with network.namespaces(ranks, egress) if egress else place as net:
        outcome = launch.run_job(
            "vocabulary",
            {"workload": "timelines", "seed": 0, **options},
            net,
            run.new_folder(output, f"vocabulary-{ranks}") / "job",
            600.0,
        )
    if outcome.status != "ok":
        sys.exit(f"{outcome.status}: {outcome.reason}")
    rounds = list(
        zip(*(result["rounds"] for result in outcome.results), strict=True)
    )
    return {
        kind: [
            {
                name: statistics.mean(turn[kind][name] for turn in of_ranks)
                for name in ("cpu_ms", "wall_ms")
            }
            for of_ranks in rounds
        ]
        for kind in KINDS
    }


def print_cost(ranks: int, found: dict[str, list[dict[str, float]]]) -> None:
    """Prints medians of the rounds, and those of quotients in a round."""
    for kind, rounds in found.items():
        line = f"  {ranks:5d}  {kind:15s}"
        fixed = found["fixed, ahead" if "ahead" in kind else "fixed"]
        for name in ("cpu_ms", "wall_ms"):
            value = statistics.median(turn[name] for turn in rounds)
            more = statistics.median(
                turn[name] / base[name]
                for turn, base in zip(rounds, fixed, strict=True)
            )
            line += f"{value:10.2f}" + (
                f"{more - 1:8.0%}" if rounds is not fixed else " " * 8
            )
        print(line)


def main() -> None:
    """Prints the cost of a step, of a key, and how full tables get."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--output", type=pathlib.Path, default=pathlib.Path("build/bench")
    )
    parser.add_argument(
        "--capacity", type=int, default=25_000_000, help="0: steps only"
    )
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument(
        "--egress",
        help="limit of each rank's link, such as 150mbps; none: loopback",
    )
    options = parser.parse_args()
    turns = {"batch": 256, "warm_up": 40, "steps": 30, "rounds": options.rounds}
    print("a step of `timelines`: milliseconds of a rank's processor time and")
    print("of the clock, and how many more than with fixed tables")
    print("  ranks  tables         processor    more     clock    more")
    for ranks in options.ranks:
        egress = options.egress if ranks > 1 else None
        print_cost(ranks, cost_of_step(ranks, turns, egress, options.output))
    if not options.capacity:
        return
    print(f"one of {_RANKS} ranks, {options.capacity} keys of its own:")
    print("nanoseconds of a processor per key")
    for kind, nanoseconds in time_of_keys(
        options.capacity, options.steps
    ).items():
        print(f"  {kind:12s} {nanoseconds:8.1f}")
    print("share of the capacity at which the first bucket is full")
    for capacity in (10_000, 100_000, 1_000_000, 10_000_000):
        print(f"  {capacity:12d} {fill_of_first(capacity):8.3f}")


if __name__ == "__main__":
    main()
