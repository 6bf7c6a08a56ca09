# SPDX-License-Identifier: Apache-2.0
"""What it takes to come back to a place in a dataset; started on every rank.

    tfdist-run -n 2 -m benchmarks.place_in_data

Reads 100 batches of 256 samples, as `callbacks.Resume` does to come to a place,
and compares with TensorFlow's checkpoint of the iterator: seconds to write and
to read one, and its megabytes; or why there is none.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

import tfdist_ext

SAMPLES, BATCH, BATCHES, SHUFFLED = 100_000, 256, 100, 50_000


def make_datasets() -> Iterator[tuple[str, tf.data.Dataset]]:
    ids = np.random.default_rng(0).integers(0, 1000, [SAMPLES, 16])
    data = tf.data.Dataset.from_tensor_slices(ids)
    yield "slices", data
    yield "mapped", data.map(lambda each: each + 1)
    yield "shuffled", data.shuffle(SHUFFLED, seed=1)
    yield "filtered", data.filter(lambda each: each[0] >= 0)
    yield (
        "generator",
        tf.data.Dataset.from_generator(
            lambda: iter(ids), output_signature=data.element_spec
        ),
    )


def measure(dataset: tf.data.Dataset, path: str) -> list[str]:
    """Seconds to read up to a place, to write it, to read it; megabytes."""
    iterator = iter(dataset)
    start = time.monotonic()
    for _ in range(BATCHES):
        next(iterator)
    found = [time.monotonic() - start]
    try:
        start = time.monotonic()
        tf.train.Checkpoint(iterator=iterator).write(path)
        found.append(time.monotonic() - start)
        again = iter(dataset)
        start = time.monotonic()
        tf.train.Checkpoint(iterator=again).read(path).assert_consumed()
        found.append(time.monotonic() - start)
    except tf.errors.OpError as error:
        return [f"{found[0]:.2f}", error.message.rpartition("}} ")[2]]
    np.testing.assert_array_equal(next(again), next(iterator))
    size = sum(map(os.path.getsize, tf.io.gfile.glob(f"{path}.*")))
    return [*(f"{each:.2f}" for each in found), f"{size / 1e6:.1f}"]


def main() -> None:
    strategy = tfdist_ext.HybridParallelStrategy()
    cells = ["", "reads", "writes", "restores", "MB"]
    with tempfile.TemporaryDirectory() as folder:
        for name, data in make_datasets():
            if strategy.rank == 0:
                print(*(f"{cell:>10}" for cell in cells), flush=True)
            dataset = strategy.experimental_distribute_dataset(
                data.batch(BATCH)
            )
            cells = [name, *measure(dataset, f"{folder}/{name}")]
    if strategy.rank == 0:
        print(*(f"{cell:>10}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
