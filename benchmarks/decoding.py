# SPDX-License-Identifier: Apache-2.0
"""What it takes to decode ids: bytes that arrive, bytes of rows, and time.

A line for ids as a CPU reads them, and one for those cut into blocks for a GPU,
which a CPU reads here as well.

    python -m benchmarks.decoding

One process encodes the batches of four ranks and decodes what rank 0 gets.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import tensorflow as tf

from tfdist_ext.ops import id_ops
from tfdist_ext.tables.placement import FeaturePlacement

RANKS, FEATURES, ROWS = 4, 26, 1_000_000
NONE = np.zeros(0, np.float32)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=16384, help="of all ranks")
    parser.add_argument("--hotness", type=int, nargs="+", default=[1, 20])
    return parser


def main() -> None:
    options = make_parser().parse_args()
    print("hotness  blocks  entries  arrive MB  rows MB  decoded in ms")
    for hotness in options.hotness:
        for in_blocks in (False, True):
            show(options.batch // RANKS, hotness, in_blocks)


def show(samples: int, hotness: int, in_blocks: bool) -> None:
    """Prints one line."""
    placements = [
        FeaturePlacement(f"f{i}", ROWS, 8, RANKS, 1, tuple(range(RANKS)))
        for i in range(FEATURES)
    ]
    messages = [
        message(placements, rank, samples, hotness, in_blocks)
        for rank in range(RANKS)
    ]
    payload = tf.constant(np.concatenate(messages))
    splits = tf.constant([len(each) for each in messages], tf.int64)
    times = []
    for _ in range(9):
        begin = time.perf_counter()
        decoded = id_ops.decode_ids(
            payload, splits, placements=placements, rank=0, world_size=RANKS
        )
        times.append(time.perf_counter() - begin)
    row_splits, rows, weights = (each.numpy() for each in decoded[:3])
    print(
        f"{hotness:7} {'yes' if in_blocks else 'no':>7} {rows.size:8} "
        f"{payload.shape[0] / 1e6:10.3f} "
        f"{(row_splits.nbytes + rows.nbytes + weights.nbytes) / 1e6:8.2f} "
        f"{np.median(times) * 1e3:14.2f}"
    )


def message(
    placements: list[FeaturePlacement],
    rank: int,
    samples: int,
    hotness: int,
    in_blocks: bool,
) -> np.ndarray:
    """What a rank sends to rank 0: ids that follow Zipf(1.1)."""
    rng = np.random.default_rng(rank)
    shape = (FEATURES, samples * hotness)
    ids = rng.zipf(1.1, shape).astype(np.uint64) % np.uint64(ROWS)
    splits = np.arange(samples + 1) * hotness
    encoded = id_ops.encode_ids(
        list(ids.astype(np.int64)),
        [splits] * FEATURES,
        [NONE] * FEATURES,
        float(samples),
        placements=placements,
        rank=rank,
        world_size=RANKS,
        list_features=list(range(FEATURES)),
        out_of_range=["error"] * FEATURES,
        unique=[False] * FEATURES,
        in_blocks=in_blocks,
    )
    payload, send_splits = (each.numpy() for each in encoded[:2])
    return payload[: send_splits[0]]


if __name__ == "__main__":
    main()
