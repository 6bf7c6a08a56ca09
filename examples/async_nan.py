# SPDX-License-Identifier: Apache-2.0
"""Why asynchronous training diverges, and what says so before it does.

Workers of a parameter server do not wait for each other: a gradient is of
weights that others have changed meanwhile. On ids as skewed as those of ads
all of them push the same rows the same way, and the steps add up. Here the
workers take turns in one process, so that every run is the same.

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

ROWS, DIM, IDS, BATCH = 2000, 16, 20, 64


def data(steps: int) -> tf.data.Dataset:
    """Samples of ids, a few of which are in most of them, with clicks."""
    rng = np.random.default_rng(1)
    ids = rng.zipf(1.2, [steps * BATCH, IDS]) % ROWS
    taste = rng.normal(size=ROWS)
    chance = 1 / (1 + np.exp(-taste[ids].mean(axis=1) * 4))
    clicks = (rng.random(len(ids)) < chance).astype(np.float32)
    whole = tf.data.Dataset.from_tensor_slices((ids, clicks[:, None]))
    return whole.batch(BATCH, drop_remainder=True)


def make_model(rate: float) -> keras.Model:
    """A table whose rows are summed by sample, and a tower."""
    table = tfdist_ext.TableConfig(
        "ads",
        ROWS,
        DIM,
        initializer=keras.initializers.RandomUniform(-0.1, 0.1, seed=2),
        combiner="sum",
    )
    feature = tfdist_ext.FeatureConfig("ads", table, (None, IDS), (None, DIM))
    ids = keras.Input([IDS], dtype="int64")
    hidden = tfdist_ext.layers.DistributedEmbedding(feature, name="sparse")(ids)
    for seed in (3, 4):
        start = keras.initializers.GlorotUniform(seed=seed)
        hidden = keras.layers.Dense(
            32, activation="relu", kernel_initializer=start
        )(hidden)
    start = keras.initializers.GlorotUniform(seed=5)
    model = keras.Model(
        ids, keras.layers.Dense(1, kernel_initializer=start)(hidden)
    )
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(tfdist_ext.optimizers.SGD(rate), loss)
    return model


def train_asynchronously(rate: float, workers: int, steps: int) -> list[float]:
    """Losses of steps whose gradients are of older weights.

    Args:
        rate: of SGD.
        workers: that compute at once; a gradient is as many steps old.
        steps: of all of them together.

    Returns:
        The losses up to the first that is not finite.
    """
    model, losses, waiting = make_model(rate), [], []

    @tf.function
    def gradients(ids: tf.Tensor, clicks: tf.Tensor) -> tuple:
        with tf.GradientTape() as tape:
            loss = model.loss(clicks, model(ids, training=True))
        return loss, tape.gradient(loss, model.trainable_variables)

    for ids, clicks in data(steps):
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


def described(losses: list[float]) -> str:
    """What has become of a training."""
    for step, loss in enumerate(losses):
        if not np.isfinite(loss):
            return f"loss {losses[0]:.3f}, not finite after {step} steps"
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
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    logging.basicConfig(format="  %(message)s", stream=sys.stdout)
    strategy = tfdist_ext.HybridParallelStrategy()

    def show(text: str) -> None:
        if strategy.rank == 0:
            print(text, flush=True)

    steps = options.steps
    losses = train_asynchronously(options.rate, options.workers, steps)
    show(f"{options.workers} workers, rate {options.rate}: {described(losses)}")
    watch = [EmbeddingMonitor(every=1), NanGuard(every=5, factor=0.1)]
    for times, more in ((1, []), (3, []), (3, watch)):
        rate = times * options.rate
        with strategy.scope():
            model = make_model(rate)
        losses = Losses()
        watched = " and watched" if more else ""
        show(f"In step{watched}, rate {rate}:")
        model.fit(data(steps), verbose=0, callbacks=[*more, losses])
        show(f"  {described(losses.all)}")


if __name__ == "__main__":
    main()
