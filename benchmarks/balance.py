# SPDX-License-Identifier: Apache-2.0
"""Step time of uneven ranks and of sequences, by the strategy's `balance`.

    tfdist-run -n 4 -m benchmarks.balance
    tfdist-run -n 4 -m benchmarks.balance --sequences --samples 16

Every rank sleeps in the forward pass for each of its samples, and the last rank
three times as long. Sleeping needs no core, so more ranks than cores can be
timed, and busy machines give the same figures. The first setting has equal
ranks. First each setting is checked: losses and rows of its first steps are
those of one process of stock Keras.

With `--sequences` all ranks are equal, and sleep for each of their ids. The
samples have 1 to 1000 ids, whose number is drawn from a log-normal distribution
with a median of 33 and a mean of 69.

Columns: median milliseconds of a step, the ratio to equal ranks, and the shares
of the ranks at the end. No division of samples is faster than `least`, the
ratio of the sums of speeds.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import Any

import numpy as np
import tensorflow as tf

import tfdist_ext

keras = tf.keras
ROWS, IDS, CHECKED, SLOWER, RATE = 1000, 4, 20, 3, 0.01


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is timed.

    Attributes:
        name: printed name.
        balance: argument of the strategy.
        slower: how much slower the last rank is.
    """

    name: str
    balance: Any
    slower: float


class Sleep(keras.layers.Layer):
    """The identity, which sleeps for each sample that is trained."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def call(self, inputs: tf.Tensor, training: Any = None) -> tf.Tensor:
        if not training:
            return inputs

        def sleep(samples: Any) -> Any:
            time.sleep(self._seconds * int(samples))
            return samples

        slept = tf.numpy_function(sleep, [tf.shape(inputs)[0]], tf.int32)
        with tf.control_dependencies([slept]):
            return tf.identity(inputs)


class Timer(keras.callbacks.Callback):
    """Keeps the time of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._began = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.losses.append(float(logs["loss"]))
        self.seconds.append(time.perf_counter() - self._began)


def make_data(batch: int, sequences: bool) -> tf.data.Dataset:
    rng = np.random.default_rng(0)
    samples = CHECKED * batch
    lengths = np.full([samples], IDS)
    if sequences:
        lengths = rng.lognormal(3.5, 1.3, samples).clip(1, 1000).astype(int)
    flat = rng.integers(0, ROWS, lengths.sum())
    starts = np.cumsum(lengths) - lengths
    totals = np.add.reduceat(flat, starts)[:, None]
    labels = (totals % 7 / 7).astype(np.float32)
    ids = tf.RaggedTensor.from_row_lengths(flat, lengths)
    if not sequences:
        ids = ids.to_tensor()
    slices = tf.data.Dataset.from_tensor_slices((ids, labels))
    return slices.batch(batch, drop_remainder=True).cache().repeat()


class Ours(keras.Model):  # type: ignore[name-defined]
    """A dense layer of the sum of a sample's rows; it sleeps in training."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.table = tfdist_ext.layers.FullSparse(
            16,
            ROWS,
            use_bias=False,
            kernel_initializer=keras.initializers.RandomNormal(0, 0.01, seed=1),
        )
        self.sleep = Sleep(seconds)
        self.last = keras.layers.Dense(
            1, kernel_initializer=keras.initializers.GlorotUniform(seed=2)
        )

    def call(self, ids: Any, training: bool = False) -> tf.Tensor:
        if isinstance(ids, tf.RaggedTensor):
            flat = self.sleep(ids.flat_values, training=training)
            return self.last(self.table(ids.with_flat_values(flat)))
        return self.last(self.sleep(self.table(ids), training=training))


class Stock(keras.Model):  # type: ignore[name-defined]
    """The same model, of Keras's layers.

    Args:
        table: initial rows.
    """

    def __init__(self, table: np.ndarray) -> None:
        super().__init__()
        self.table = keras.layers.Embedding(
            *table.shape, embeddings_initializer=lambda *_, **__: table
        )
        self.last = keras.layers.Dense(
            1, kernel_initializer=keras.initializers.GlorotUniform(seed=2)
        )

    def call(self, ids: Any) -> tf.Tensor:
        if isinstance(ids, tf.RaggedTensor):
            rows = ids.with_flat_values(self.table(ids.flat_values))
            return self.last(tf.reduce_sum(rows, axis=1))
        return self.last(tf.reduce_sum(self.table(ids), axis=1))


def stock_losses(table: np.ndarray, data: tf.data.Dataset) -> list[float]:
    """Losses of one process of stock Keras, from the same table."""
    model, timer = Stock(table), Timer()
    model.compile(keras.optimizers.SGD(RATE), "mse")
    model.fit(data, steps_per_epoch=CHECKED, verbose=0, callbacks=[timer])
    return timer.losses


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of a setting.

    Attributes:
        seconds: median of a step.
        shares: shares of the ranks at the end.
        rank: rank of this process.
    """

    seconds: float
    shares: tuple[float, ...]
    rank: int


def run(setting: Setting, options: argparse.Namespace) -> Result:
    """Checks and times a setting; all ranks call this."""
    with tfdist_ext.HybridParallelStrategy(balance=setting.balance) as strategy:
        last = strategy.rank == strategy.world_size - 1
        factor = setting.slower if last else 1.0
        batch = options.samples * strategy.world_size
        data = make_data(batch, options.sequences)
        with strategy.scope():
            model = Ours(factor * options.microseconds / 1e6)
            model.compile(tfdist_ext.optimizers.SGD(RATE), "mse")
            model(next(iter(data))[0][:1])
        table = strategy.gather_table(model.table)
        check, timer = Timer(), Timer()
        model.fit(data, steps_per_epoch=CHECKED, verbose=0, callbacks=[check])
        expected = stock_losses(table, data)
        np.testing.assert_allclose(check.losses, expected, rtol=1e-4)
        model.fit(
            data, steps_per_epoch=options.steps, verbose=0, callbacks=[timer]
        )
        return Result(
            float(np.median(timer.seconds[-options.timed :])),
            strategy.statistics().get("shares", (1.0,)),
            strategy.rank,
        )


def settings_of(options: argparse.Namespace) -> list[Setting]:
    """What is timed; the first one is what the others are compared to."""
    if options.sequences:
        return [
            Setting("sequences, ids", "ids", 1),
            Setting("sequences, equal", "equal", 1),
        ]
    return [
        Setting("equal ranks, equal", "equal", 1),
        Setting("equal ranks, measured", "measured", 1),
        Setting("a slow rank, equal", "equal", SLOWER),
        Setting("a slow rank, measured", "measured", SLOWER),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--samples", type=int, default=64, help="per rank")
    add("--microseconds", type=float, help="400; 50 for an id of --sequences")
    add("--sequences", action="store_true", help="samples of 1 to 1000 ids")
    add("--steps", type=int, default=1000, help="trained")
    add("--timed", type=int, default=300, help="the last ones")
    options = parser.parse_args()
    if options.microseconds is None:
        options.microseconds = 50.0 if options.sequences else 400.0
    base = 0.0
    for setting in settings_of(options):
        result = run(setting, options)
        base = base or result.seconds
        ranks = len(result.shares)
        if result.rank == 0:
            shares = "/".join(f"{100 * share:.0f}" for share in result.shares)
            print(
                f"{setting.name:24} {1e3 * result.seconds:8.1f} ms "
                f"{result.seconds / base:6.2f}   {shares} %",
                flush=True,
            )
    if result.rank == 0 and not options.sequences:
        least = ranks / (ranks - 1 + 1 / SLOWER)
        print(f"{'least':24} {'':11} {least:6.2f}")


if __name__ == "__main__":
    main()
