# SPDX-License-Identifier: Apache-2.0
"""Trains a stream without end, and serves rows that are seconds old.

python examples/online.py
tfdist-run -n 2 examples/online.py --steps 1000

A process appends samples to files (`data/`). The ranks train each sample once,
with a checkpoint now and then (`run/`); started again with `--keep`, they
continue there. About every second all ranks write a delta of the rows that
have changed (`deltas/`), which a server (`server.py`) applies. Prints how old
the served rows were.
"""

import argparse
import contextlib
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import serve
import tensorflow as tf
from command_line import make_parser

import tfdist_ext

keras = tf.keras
FILE_RECORDS = 200_000  # of a file, after which another one begins
BLOCK = 2000  # records that are appended at once
# Steps between two looks at the clock of rank 0.
CLOCK_STEPS = 4


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--rows", type=int, default=1_000_000, help="of the table")
    add("--dim", type=int, default=16, help="columns of the table")
    add("--hotness", type=int, default=20, help="ids of a sample")
    add("--batch-size", type=int, default=1024, help="over all ranks")
    add("--steps", type=int, default=1000, help="to train")
    add(
        "--rate", type=int, default=50_000, help="samples that come in a second"
    )
    add("--publish", type=float, default=0.4, help="seconds between deltas")
    add("--save", type=int, default=500, help="steps between checkpoints")
    add("--folder", default="online", help="of all ranks; is made anew")
    add("--keep", action="store_true", help="continue with the folder's files")
    add("--write", action="store_true", help="only append samples")
    return parser.parse_args()


def samples(arguments: argparse.Namespace, rng: np.random.Generator) -> Any:
    """Records of popular ids, and clicks that depend on them, as int64."""
    shape = [BLOCK, arguments.hotness]
    ids = np.floor(arguments.rows ** rng.random(shape)).astype(np.int64) - 1
    liked = np.sin(ids.astype(np.float64)).sum(1, keepdims=True)
    clicks = (liked > rng.logistic(size=liked.shape)).astype(np.int64)
    return np.concatenate([ids, clicks], 1)


def write(arguments: argparse.Namespace, folder: pathlib.Path) -> None:
    """Appends samples at a rate, until the process is ended."""
    rng = np.random.default_rng()
    begun, written = time.time(), 0
    while True:
        path = folder / f"{time.time():.3f}.tfrecord"
        with tf.io.TFRecordWriter(str(path)) as file:
            for _ in range(FILE_RECORDS // BLOCK):
                for record in samples(arguments, rng):
                    file.write(record.tobytes())
                file.flush()
                written += BLOCK
                ahead = written / arguments.rate - (time.time() - begun)
                time.sleep(max(ahead, 0))


@contextlib.contextmanager
def writer(arguments: argparse.Namespace) -> Iterator[None]:
    """A process that appends samples."""
    options = ["--write", "--folder", arguments.folder]
    for name in ("rows", "hotness", "rate"):
        options += [f"--{name}", str(getattr(arguments, name))]
    with subprocess.Popen([sys.executable, __file__, *options]) as process:
        try:
            yield
        finally:
            process.terminate()


class Publish(keras.callbacks.Callback):  # type: ignore[name-defined]
    """Writes a delta after some seconds, on all ranks after the same step."""

    def __init__(
        self, strategy: Any, folder: pathlib.Path, seconds: float
    ) -> None:
        super().__init__()
        self.strategy, self.folder, self.seconds = strategy, folder, seconds
        self.took: list[float] = []
        self.steps, self.last = 0, time.monotonic()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Asks rank 0 whether it is time."""
        self.steps += 1
        if self.steps % CLOCK_STEPS:
            return
        over = time.monotonic() - self.last >= self.seconds
        told = self.strategy.gather(tf.constant([int(over)]), axis=0)
        if int(told[0]):
            self.publish()

    def on_train_end(self, logs: Any = None) -> None:
        """Publishes the last steps."""
        self.publish()

    def publish(self) -> None:
        """Writes a delta."""
        self.last = time.monotonic()
        path = self.folder / str(len(self.took) + 1)
        tfdist_ext.export_delta(self.model, path)
        self.took.append(time.monotonic() - self.last)


def train(
    strategy: Any, model: Any, arguments: argparse.Namespace
) -> tuple[Publish, float]:
    """Trains, and returns what was published, and samples per second."""
    folder = pathlib.Path(arguments.folder)
    width = arguments.hotness + 1

    def parse(records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        # A rank may have no records of a batch.
        values = tf.reshape(tf.io.decode_raw(records, tf.int64), [-1, width])
        return values[:, :-1], tf.cast(values[:, -1:], tf.float32)

    stream = tfdist_ext.data.PositionedDataset.from_files(
        folder / "data", "tfrecord"
    )
    data = stream.batches(arguments.batch_size, wait=300.0, linger=0.5)
    publish = Publish(strategy, folder / "deltas", arguments.publish)
    saved = tfdist_ext.callbacks.Resume(
        folder / "run", every=arguments.save, deltas=9
    )
    begun = time.monotonic()
    model.fit(
        data.map(parse).prefetch(4),
        epochs=1,
        steps_per_epoch=arguments.steps,
        verbose=0,
        callbacks=[publish, saved],
    )
    speed = arguments.steps * arguments.batch_size / (time.monotonic() - begun)
    return publish, speed


def ages_of_rows(told: dict[str, Any], took: list[float]) -> np.ndarray:
    """Ages of the served rows in seconds, at equal distances in time.

    Rows have the age of the step before their delta. A delta of number n
    replaces rows that are `told["ages"][n]` old, since they were written, and
    `took[n - 1]` seconds before that they were read from the model.
    """
    found = []
    for n in range(1, len(told["ages"])):
        youngest = told["delays"][n - 1] + took[n - 1]
        oldest = told["ages"][n] + took[n - 1]
        found.append(np.arange(youngest, oldest, 0.01))
        found.append(np.array([oldest]))
    return np.concatenate(found)


def main() -> None:
    arguments = parse_arguments()
    folder = pathlib.Path(arguments.folder)
    if arguments.write:
        write(arguments, folder / "data")
        return
    strategy = tfdist_ext.HybridParallelStrategy()
    keras.utils.set_random_seed(0)
    first = strategy.rank == 0
    if first:  # The others do nothing there before they meet rank 0.
        if not arguments.keep:
            shutil.rmtree(folder, ignore_errors=True)
        for name in ("data", "deltas"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        for old in (folder / "deltas").iterdir():
            old.unlink()
    with strategy.scope():
        model = serve.build_model(arguments)
    tfdist_ext.export(model, folder / "model", deltas=True)
    if not first:
        train(strategy, model, arguments)
        return
    with writer(arguments), serve.server(folder) as url:
        publish, speed = train(strategy, model, arguments)
        while serve.status(url)["delta"] < len(publish.took):
            time.sleep(0.05)
        told = serve.status(url)
    print(f"{speed:.0f} samples/s, {len(publish.took)} deltas")
    if len(publish.took) < 2:  # of the only one, no time of use is known
        return
    ages = ages_of_rows(told, publish.took)
    print(
        f"age of the served rows: p50 {np.median(ages):.2f} s, "
        f"p99 {np.quantile(ages, 0.99):.2f} s, max {ages.max():.2f} s"
    )


if __name__ == "__main__":
    main()
