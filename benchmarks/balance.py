# SPDX-License-Identifier: Apache-2.0
"""Step time with one slow rank, by the strategy's `balance`.

    tfdist-run -n 4 -m benchmarks.balance

Every rank sleeps in the forward pass for each of its samples, and the last rank
three times as long. Sleeping needs no core, so more ranks than cores can be
timed, and busy machines give the same figures. The first setting has equal
ranks. First each setting is checked: losses and rows of its first steps are
those of one process of stock Keras.

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
ROWS, IDS, CHECKED, SLOWER = 1000, 4, 20, 3


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


def make_data(batch: int) -> tf.data.Dataset:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, ROWS, [CHECKED * batch, IDS])
    labels = (ids.sum(1, keepdims=True) % 7 / 7).astype(np.float32)
    slices = tf.data.Dataset.from_tensor_slices((ids, labels))
    return slices.batch(batch, drop_remainder=True).cache().repeat()


def make_model(seconds: float) -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input([IDS], dtype="int64"),
            tfdist_ext.layers.FullSparse(
                16,
                ROWS,
                use_bias=False,
                kernel_initializer=keras.initializers.RandomNormal(seed=1),
            ),
            Sleep(seconds),
            keras.layers.Dense(
                1, kernel_initializer=keras.initializers.GlorotUniform(seed=2)
            ),
        ]
    )
    model.compile(tfdist_ext.optimizers.SGD(0.1), "mse")
    return model


def stock_losses(table: np.ndarray, batch: int) -> list[float]:
    """Losses of one process of stock Keras, from the same table."""
    model = keras.Sequential(
        [
            keras.Input([IDS], dtype="int64"),
            keras.layers.Embedding(ROWS, table.shape[1], name="table"),
            keras.layers.Lambda(lambda rows: tf.reduce_sum(rows, axis=1)),
            keras.layers.Dense(
                1, kernel_initializer=keras.initializers.GlorotUniform(seed=2)
            ),
        ]
    )
    model.get_layer("table").set_weights([table])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    timer = Timer()
    model.fit(
        make_data(batch), steps_per_epoch=CHECKED, verbose=0, callbacks=[timer]
    )
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
        with strategy.scope():
            model = make_model(factor * options.microseconds / 1e6)
        table = strategy.gather_table(model.layers[0])
        data, check, timer = make_data(batch), Timer(), Timer()
        model.fit(data, steps_per_epoch=CHECKED, verbose=0, callbacks=[check])
        expected = stock_losses(table, batch)
        np.testing.assert_allclose(check.losses, expected, rtol=1e-4)
        model.fit(
            data, steps_per_epoch=options.steps, verbose=0, callbacks=[timer]
        )
        return Result(
            float(np.median(timer.seconds[-options.timed :])),
            strategy.statistics().get("shares", (1.0,)),
            strategy.rank,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=64, help="per rank")
    parser.add_argument("--microseconds", type=float, default=400.0)
    parser.add_argument("--steps", type=int, default=1000, help="trained")
    parser.add_argument("--timed", type=int, default=300, help="the last ones")
    options = parser.parse_args()
    settings = [
        Setting("equal ranks, equal", "equal", 1),
        Setting("equal ranks, measured", "measured", 1),
        Setting("a slow rank, equal", "equal", SLOWER),
        Setting("a slow rank, measured", "measured", SLOWER),
    ]
    base = 0.0
    for setting in settings:
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
    if result.rank == 0:
        least = ranks / (ranks - 1 + 1 / SLOWER)
        print(f"{'least':24} {'':11} {least:6.2f}")


if __name__ == "__main__":
    main()
