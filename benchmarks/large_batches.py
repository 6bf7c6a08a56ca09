# SPDX-License-Identifier: Apache-2.0
"""Trains one model with growing batches, by several rules of scaling.

python -m benchmarks.large_batches

The ids are those of the workload `criteo` with at most `--rows` rows per table.
The log-odds of a click are the sum of a weight for every id and of products of
hidden traits. So the best possible AUC is known. Each run trains a new model
for the same number of epochs and prints its AUC on other samples, in one
process.

Rules, for a batch that is s times that of the reference:

- same: all rates stay.
- sqrt, linear: all rates are multiplied by the square root of s, or by s.
- cowclip: rows are clipped by `CowClip`; the rate of the tables stays and the
  L2 regularization is multiplied by s. The rate of the dense layers is
  multiplied by the square root of s. Rates of dense layers grow for one epoch.
"""

import argparse
import dataclasses
import time
from typing import Any

import numpy as np
import tensorflow as tf

import tfdist_ext
from benchmarks import workloads
from tfdist_ext import layers
from tfdist_ext import optimizers

keras = tf.keras
RULES = ("same", "sqrt", "linear", "cowclip")
WIDTH = 8
HIDDEN = (64, 32)


@dataclasses.dataclass(frozen=True)
class Data:
    """Samples with a known truth.

    Attributes:
        ids: int64 `[samples, tables]`; each table has its own range of ids.
        labels: float32 `[samples, 1]`, zeros and ones.
        odds: float32 `[samples]`, the log-odds of a one.
    """

    ids: np.ndarray
    labels: np.ndarray
    odds: np.ndarray


def tables_of(rows: int) -> list[workloads.Table]:
    """Tables of `criteo`, with at most `rows` rows each."""
    tables = workloads.WORKLOADS["criteo"].tables
    return [
        dataclasses.replace(table, rows=min(table.rows, rows))
        for table in tables
    ]


def make_data(rows: int, samples: int, seed: int) -> Data:
    """Draws samples; all seeds have the same truth.

    Args:
        rows: largest number of rows of a table.
        samples: number of samples.
        seed: seed of the samples.
    """
    tables = tables_of(rows)
    truth = np.random.default_rng(17)
    drawn = np.random.default_rng((18, seed))
    ids = np.concatenate(
        [workloads.draw_ids(drawn, samples, table) for table in tables], 1
    )
    first = 0
    odds = np.full([samples], -1.0)
    hidden = np.zeros([samples, 4])
    for column, table in enumerate(tables):
        weights = truth.normal(0.0, 0.3, table.rows)
        traits = truth.normal(0.0, 0.12, [table.rows, hidden.shape[1]])
        odds += weights[ids[:, column]]
        chosen = traits[ids[:, column]]
        odds -= (chosen**2).sum(axis=1) / 2
        hidden += chosen
        ids[:, column] += first
        first += table.rows
    odds += (hidden**2).sum(axis=1) / 2
    labels = drawn.random(samples) < 1 / (1 + np.exp(-odds))
    return Data(ids, labels[:, None].astype(np.float32), odds)


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Area under the ROC curve, by the ranks of the positive samples.

    Args:
        scores: float `[n]`; equal scores get the mean of their ranks.
        labels: zeros and ones, `[n]`.
    """
    _, places, counts = np.unique(
        scores, return_inverse=True, return_counts=True
    )
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    positive = labels > 0
    ones, zeros = positive.sum(), (~positive).sum()
    above = ranks[positive].sum() - ones * (ones + 1) / 2
    return float(above / (ones * zeros))


def make_model(arguments: argparse.Namespace, rule: str, batch: int) -> Any:
    """A compiled model for batches of a size.

    Args:
        arguments: of the command line.
        rule: one of `RULES`.
        batch: samples in a batch.
    """
    scale = batch / arguments.reference
    table_rate, dense_rate = arguments.table_rate, arguments.dense_rate
    clip = None
    of_dense = {"same": 1.0, "linear": scale}.get(rule, scale**0.5)
    if rule == "cowclip":
        clip = optimizers.CowClip(
            arguments.ratio, arguments.floor, arguments.l2 * scale
        )
    else:
        table_rate *= of_dense
    rate: Any = dense_rate * of_dense
    if rule == "cowclip" and scale > 1:
        steps = arguments.samples // batch
        rate = tfdist_ext.scaled_rate(
            dense_rate, arguments.reference, batch, "sqrt", warmup_steps=steps
        )
    tables = tables_of(arguments.rows)
    # One table for all features, whose ids do not overlap.
    table = layers.TableConfig(
        "rows",
        sum(table.rows for table in tables),
        WIDTH,
        keras.initializers.RandomNormal(0.0, 0.01, seed=1),
        optimizer=optimizers.Adam(table_rate, row_clip=clip),
        combiner=None,
    )
    shape = (None, len(tables))
    feature = layers.FeatureConfig("ids", table, shape, (*shape, WIDTH))
    inputs = keras.Input([len(tables)], dtype="int64")
    x = layers.DistributedEmbedding(feature)(inputs)
    x = keras.layers.Flatten()(x)
    for width in HIDDEN:
        x = keras.layers.Dense(width, "relu")(x)
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(optimizers.Adam(rate), loss)
    return model


def batches(data: Data, batch: int, seed: int) -> tf.data.Dataset:
    """Full batches of one epoch, in an order of the seed."""
    order = np.random.default_rng(seed).permutation(len(data.ids))
    ids, labels = tf.constant(data.ids), tf.constant(data.labels)
    places = tf.constant(order[: len(order) // batch * batch])
    dataset = tf.data.Dataset.from_tensor_slices(
        tf.reshape(places, [-1, batch])
    )
    return dataset.map(
        lambda chosen: (tf.gather(ids, chosen), tf.gather(labels, chosen))
    ).prefetch(2)


def run(
    arguments: argparse.Namespace, rule: str, batch: int, data: Data, test: Data
) -> tuple[float, float]:
    """Trains a model; returns its AUC and the seconds of training."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(arguments.seed)
    model = make_model(arguments, rule, batch)
    seconds = -time.perf_counter()
    for epoch in range(arguments.epochs):
        model.fit(batches(data, batch, arguments.seed + epoch), verbose=0)
    seconds += time.perf_counter()
    scores = model.predict(test.ids, batch_size=8192, verbose=0)[:, 0]
    return auc(scores, test.labels[:, 0]), seconds


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--batches", type=int, nargs="+", default=[1024, 4096, 16384, 65536])
    add("--rules", nargs="+", choices=RULES, default=list(RULES))
    add("--rows", type=int, default=2000)
    add("--samples", type=int, default=2**20)
    add("--test-samples", type=int, default=2**18)
    add("--epochs", type=int, default=2)
    add("--reference", type=int, default=1024, help="batch of the rates")
    add("--table-rate", type=float, default=1e-3)
    add("--dense-rate", type=float, default=1e-3)
    add("--l2", type=float, default=1e-5)
    add("--ratio", type=float, default=1.0)
    add("--floor", type=float, default=1e-5)
    add("--seed", type=int, default=0)
    return parser


def main() -> None:
    arguments = make_parser().parse_args()
    data = make_data(arguments.rows, arguments.samples, 0)
    test = make_data(arguments.rows, arguments.test_samples, 1)
    best = auc(test.odds, test.labels[:, 0])
    print(f"AUC of the truth: {best:.5f}; of zeros: 0.5", flush=True)
    print("| rule | batch | steps | seconds | AUC |")
    print("|---|---|---|---|---|", flush=True)
    for rule in arguments.rules:
        for batch in arguments.batches:
            found, seconds = run(arguments, rule, batch, data, test)
            steps = arguments.samples // batch * arguments.epochs
            print(
                f"| {rule} | {batch} | {steps} | {seconds:.0f} | {found:.5f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
