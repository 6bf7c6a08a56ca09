# SPDX-License-Identifier: Apache-2.0
"""A linear model whose rows are clipped by CowClip, and what NumPy trains."""

import contextlib

import numpy as np
import tensorflow as tf

import tfdist_ext
from tfdist_ext.layers import FullSparse
from tfdist_ext.optimizers import CowClip

keras = tf.keras
ROWS, UNITS, BATCH, SAMPLES, LISTS = 30, 6, 16, 49, 4
RATE = 0.5
CLIP = CowClip(ratio=0.15, floor=0.3, l2=0.02)
LARGE = 20_000  # rows of 480 kB, whose gradients are sent by row
KINDS = (
    "row_wise",
    "column_wise",
    "table_wise",
    "data_parallel",
    "row_wise, unique rows",
    "column_wise, unique rows",
    "two calls",
    "large",
    "eager",
)


def data():
    """Ids `[SAMPLES, LISTS]`, some twice in a sample, and targets."""
    rng = np.random.default_rng(2)
    ids = (ROWS * rng.random([SAMPLES, LISTS]) ** 2).astype(np.int64)
    return ids, rng.normal(size=[SAMPLES, 1]).astype(np.float32)


def direction():
    return np.linspace(0.5, 1.5, UNITS).astype(np.float32)[:, None]


def sharding_of(kind, ranks):
    if kind in ("data_parallel", "large"):
        return "data_parallel"
    if "unique" not in kind:
        return kind if "_wise" in kind else "row_wise"
    parts = "row_parts" if kind.startswith("row") else "column_parts"
    return tfdist_ext.TablePlacement(
        **{parts: ranks}, ranks=tuple(range(ranks)), deduplicate=True
    )


def train(strategy, folder, kind):
    """The table before and after training, `[ROWS, UNITS]` each."""
    del folder
    with strategy.scope() if strategy else contextlib.nullcontext():
        table = FullSparse(
            UNITS,
            LARGE if kind == "large" else ROWS,
            use_bias=False,
            kernel_initializer=keras.initializers.RandomNormal(
                seed=4, stddev=1
            ),
            sharding=sharding_of(kind, strategy.world_size if strategy else 1),
        )
        ids = keras.Input([LISTS], dtype="int64")
        sums = table(ids)
        if kind == "two calls":
            sums = table(ids[:, :1]) + table(ids[:, 1:])
        last = keras.layers.Dense(
            1,
            use_bias=False,
            trainable=False,
            kernel_initializer=keras.initializers.Constant(direction()),
        )
        model = keras.Model(ids, last(sums))
        model.compile(
            tfdist_ext.optimizers.SGD(RATE, row_clip=CLIP),
            "mse",
            run_eagerly=kind == "eager",
        )
    dataset = tf.data.Dataset.from_tensor_slices(data()).batch(BATCH)

    def rows():
        if strategy is None:
            return table.get_weights()[0][:ROWS]
        return strategy.gather_table(table)[:ROWS]

    before = rows()
    if strategy:
        strategy.collectives.check = "error"
    model.fit(dataset, epochs=2, verbose=0)
    if strategy:
        strategy.collectives.check = "auto"
    return before, rows()


def by_numpy(kind, before):
    """What `train` returns, and which gradients were clipped how."""
    table = before.astype(np.float64)
    ids, targets = data()
    clipped = []
    for _ in range(2):
        for first in range(0, SAMPLES, BATCH):
            batch = ids[first : first + BATCH]
            outputs = table[batch].sum(axis=1) @ direction()
            errors = 2 * (outputs - targets[first : first + BATCH])
            errors /= len(batch)
            gradients, counts = np.zeros_like(table), np.zeros(ROWS)
            for sample, error in zip(batch, errors, strict=True):
                for row in sample:
                    gradients[row] += error * direction()[:, 0]
                calls = [sample]
                if kind == "two calls":
                    calls = [sample[:1], sample[1:]]
                for call in calls:
                    counts[np.unique(call)] += 1
            for row in np.flatnonzero(counts):
                weight = table[row].copy()
                length = CLIP.ratio * np.linalg.norm(weight)
                limit = counts[row] * max(length, CLIP.floor)
                norm = np.linalg.norm(gradients[row])
                clipped.append((norm > limit, length > CLIP.floor))
                if norm > limit:
                    gradients[row] *= limit / norm
                table[row] -= RATE * (gradients[row] + CLIP.l2 * weight)
    return table, clipped
