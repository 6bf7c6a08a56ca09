# SPDX-License-Identifier: Apache-2.0
"""Vocabularies that grow: what a key costs, and how full they get.

    python -m benchmarks.vocabulary [--capacity 25000000] [--steps 200]

Fills one rank's share of a vocabulary of 4 ranks, looks its keys up, and lets
others evict them; then tells at which share of the capacity the first bucket
of a vocabulary is full.
"""

import argparse
import time

import numpy as np
import tensorflow as tf

from tfdist_ext.ops import vocabulary_ops
from tfdist_ext.tables.dynamic_vocabulary import DynamicVocabulary

_RANKS = 4
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
    handle = vocabulary_ops.vocabulary("t", config, 0, 1)
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
    handle = vocabulary_ops.vocabulary("t", DynamicVocabulary(capacity), 0, 1)
    step = max(capacity // 500, 1)
    for first in range(0, capacity + step, step):
        try:
            _learn(handle, _keys(first, step))
        except tf.errors.FailedPreconditionError:
            break
    return int(vocabulary_ops.vocabulary_counts(handle)[0]) / capacity


def main() -> None:
    """Prints both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capacity", type=int, default=25_000_000)
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
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
