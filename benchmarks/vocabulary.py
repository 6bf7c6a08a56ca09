# SPDX-License-Identifier: Apache-2.0
"""Vocabularies that grow: what a key costs, and how full they get.

    python -m benchmarks.vocabulary [--capacity 25000000] [--steps 200]

Trains `timelines` on fixed tables and on tables that grow, in turns. Fills one
rank's share of a vocabulary of 4 ranks, looks its keys up, and lets others
evict them; then tells at which share of the capacity the first bucket of a
vocabulary is full.
"""

import argparse
import pathlib
import statistics
import sys
import time

import numpy as np
import tensorflow as tf

from benchmarks import launch
from benchmarks import network
from benchmarks import run
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
    ranks: int, options: dict[str, int], output: pathlib.Path
) -> tuple[float, float, float]:
    """Milliseconds of a processor that a rank takes for a step.

    Args:
        ranks: processes.
        options: "batch", "warm_up", "steps" and "rounds" of each kind.
        output: where the folder of the job is made.

    Returns:
        Medians of the rounds: with fixed tables, with tables that grow, and
        the quotient.

    Raises:
        SystemExit: if a rank fails.
    """
    outcome = launch.run_job(
        "vocabulary",
        {"workload": "timelines", "seed": 0, **options},
        network.loopback(ranks),
        run.new_folder(output, f"vocabulary-{ranks}") / "job",
        600.0,
    )
    if outcome.status != "ok":
        sys.exit(f"{outcome.status}: {outcome.reason}")
    rounds = [
        [
            statistics.mean(turn[name]["cpu_ms"] for turn in of_ranks)
            for name in ("fixed", "growing")
        ]
        for of_ranks in zip(
            *(result["rounds"] for result in outcome.results), strict=True
        )
    ]
    fixed, growing = zip(*rounds, strict=True)
    quotients = [b / a for a, b in rounds]
    return (
        statistics.median(fixed),
        statistics.median(growing),
        statistics.median(quotients),
    )


def main() -> None:
    """Prints all three."""
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
    options = parser.parse_args()
    turns = {"batch": 256, "warm_up": 40, "steps": 30, "rounds": options.rounds}
    print("a rank's step of `timelines`, milliseconds of a processor")
    print("  ranks   fixed tables   that grow    more")
    for ranks in options.ranks:
        fixed, growing, more = cost_of_step(ranks, turns, options.output)
        print(f"  {ranks:5d}{fixed:15.2f}{growing:12.2f}{more - 1:8.0%}")
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
