# SPDX-License-Identifier: Apache-2.0
"""Why asynchronous training diverges, and what says so before it does.

Workers of a parameter server do not wait for each other: a gradient is of
weights that others have changed meanwhile. On ids as skewed as those of ads
all of them push the same rows the same way, and the steps add up. Here the
workers take turns in one process, so that every run is the same.

The model is `ads` of the benchmarks with fewer rows; `--rows 2097152` is all of
it, 1.9 GB. A step has a batch of every worker, in all trainings.

    python examples/async_nan.py
    tfdist-run -n 2 examples/async_nan.py
"""

import argparse
import logging
import sys

import numpy as np
import tensorflow as tf

import tfdist_ext
from tfdist_ext.callbacks import EmbeddingMonitor
from tfdist_ext.callbacks import NanGuard

keras = tf.keras

TABLES, DIM, IDS = ("ads", "users"), 114, 150
BATCH = 64  # of a worker


def data(rows: int, batches: int) -> tf.data.Dataset:
    """Samples of ids, a few of which are in all of them, with clicks."""
    rng = np.random.default_rng(1)
    shape = [batches * BATCH, IDS]
    ids = {name: rng.zipf(1.1, shape) * 2654435761 % rows for name in TABLES}
    taste = rng.normal(size=rows)
    likes = sum(taste[each].mean(axis=1) for each in ids.values())
    chance = 1 / (1 + np.exp(-3 * (likes - likes.mean()) / likes.std()))
    clicks = (rng.random(len(chance)) < chance).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((ids, clicks[:, None]))


def make_model(rows: int, rate: float) -> keras.Model:
    """Two tables, whose rows are summed by sample, and a tower."""
    features, inputs = {}, {}
    for seed, name in enumerate(TABLES):
        table = tfdist_ext.TableConfig(
            name,
            rows,
            DIM,
            initializer=keras.initializers.RandomUniform(-0.01, 0.01, seed),
            combiner="sum",
        )
        features[name] = tfdist_ext.FeatureConfig(
            name, table, (None, IDS), (None, DIM)
        )
        inputs[name] = keras.Input([IDS], dtype="int64", name=name)
    sparse = tfdist_ext.layers.DistributedEmbedding(features, name="sparse")
    found = sparse(inputs)
    hidden = keras.layers.Concatenate()([found[name] for name in TABLES])
    for seed, units, active in ((3, 128, "relu"), (4, 1, None)):
        hidden = keras.layers.Dense(
            units,
            active,
            kernel_initializer=keras.initializers.GlorotUniform(seed),
        )(hidden)
    model = keras.Model(inputs, hidden)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(tfdist_ext.optimizers.SGD(rate), loss)
    return model


def train_asynchronously(
    model: keras.Model, batches: tf.data.Dataset, workers: int
) -> list[float]:
    """Losses of steps whose gradients are of older weights.

    Args:
        model: to train.
        batches: one for each gradient.
        workers: that compute at once; a gradient is as many steps old.

    Returns:
        The losses up to the first that is not finite.
    """
    losses, waiting = [], []

    @tf.function
    def gradients(ids: tf.Tensor, clicks: tf.Tensor) -> tuple:
        with tf.GradientTape() as tape:
            loss = model.loss(clicks, model(ids, training=True))
        return loss, tape.gradient(loss, model.trainable_variables)

    for ids, clicks in batches:
        loss, found = gradients(ids, clicks)
        losses.append(float(loss))
        if not np.isfinite(losses[-1]):
            break
        waiting.append(found)
        if len(waiting) == workers:
            oldest = waiting.pop(0)
            pairs = zip(oldest, model.trainable_variables, strict=True)
            model.optimizer.apply_gradients(pairs)
    return losses


def described(losses: list[float], of_a_step: int = 1) -> str:
    """What has become of a training.

    Args:
        losses: of its batches.
        of_a_step: how many they are.
    """
    for i, loss in enumerate(losses):
        if not np.isfinite(loss):
            steps = i // of_a_step
            return f"loss {losses[0]:.3f}, not finite after {steps} steps"
    return f"loss {losses[0]:.3f} -> {losses[-1]:.3f}"


class Losses(keras.callbacks.Callback):
    """Keeps the loss of every batch, not the mean of those so far."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[float] = []

    def on_train_batch_begin(
        self, batch: int, logs: dict | None = None
    ) -> None:
        self.model.reset_metrics()

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self.all.append(float(logs["loss"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=20000, help="of a table")
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=25)
    options = parser.parse_args()
    logging.basicConfig(format="  %(message)s", stream=sys.stdout)
    strategy = tfdist_ext.HybridParallelStrategy()

    def show(text: str) -> None:
        if strategy.rank == 0:
            print(text, flush=True)

    workers = options.workers
    samples = data(options.rows, options.steps * workers)
    alone = make_model(options.rows, options.rate)
    losses = train_asynchronously(alone, samples.batch(BATCH), workers)
    what = described(losses, workers)
    show(f"{workers} workers, rate {options.rate}: {what}")
    batches = samples.batch(BATCH * workers)
    watch = [EmbeddingMonitor(["ads"], every=1), NanGuard(every=5, factor=0.1)]
    for times, more in ((1, []), (3, []), (3, watch)):
        rate = round(times * options.rate, 9)
        with strategy.scope():
            model = make_model(options.rows, rate)
        losses = Losses()
        watched = " and watched" if more else ""
        show(f"In step{watched}, rate {rate}:")
        model.fit(batches, verbose=0, callbacks=[*more, losses])
        show(f"  {described(losses.all)}")


if __name__ == "__main__":
    main()
