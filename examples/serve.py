# SPDX-License-Identifier: Apache-2.0
"""Trains and serves side by side: REST, many clients, and how stale it is.

python examples/serve.py
tfdist-run -n 2 examples/serve.py --clients 100

A server of its own (`server.py`, plain TensorFlow) answers many clients at once
(`load.py`) while the ranks go on training, and gets a delta after each round.
Prints how long clients wait and how old the numbers are that they get.
"""

import argparse
import contextlib
import json
import pathlib
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from command_line import make_parser

import tfdist_ext

keras = tf.keras
HERE = pathlib.Path(__file__).parent
STATUS = "/v1/models/model"


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--rows", type=int, default=1_000_000, help="of the table")
    add("--dim", type=int, default=16, help="columns of the table")
    add("--hotness", type=int, default=20, help="ids of a sample")
    add("--batch-size", type=int, default=1024, help="over all ranks")
    add("--steps", type=int, default=20, help="of a round")
    add("--rounds", type=int, default=10, help="each ends with a delta")
    add("--table-dtype", default="float32", help="in which it is served")
    add("--folder", default="serving", help="is made anew; of all ranks")
    add("--clients", type=int, default=100, help="that ask at once")
    add("--seconds", type=float, default=10.0, help="that they ask for")
    return parser.parse_args()


def build_model(arguments: argparse.Namespace) -> Any:
    model = keras.Sequential(
        [
            keras.Input((arguments.hotness,), dtype="int64", name="ids"),
            tfdist_ext.layers.FullSparse(
                arguments.dim, arguments.rows, activation="relu"
            ),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile(tfdist_ext.optimizers.Adagrad(0.1), "binary_crossentropy")
    return model


def dataset(arguments: argparse.Namespace, seed: int) -> tf.data.Dataset:
    """A round's samples: popular ids, and clicks that depend on them."""
    rng = np.random.default_rng(seed)
    shape = [arguments.batch_size * arguments.steps, arguments.hotness]
    ids = np.floor(arguments.rows ** rng.random(shape)).astype(np.int64) - 1
    liked = np.sin(ids.astype(np.float64)).sum(1, keepdims=True)
    clicks = (liked > rng.logistic(size=liked.shape)).astype(np.float32)
    samples = tf.data.Dataset.from_tensor_slices((ids, clicks))
    return samples.batch(arguments.batch_size)


@contextlib.contextmanager
def server(folder: pathlib.Path) -> Iterator[str]:
    """A server in a process of its own; its address."""
    program = [sys.executable, str(HERE / "server.py"), str(folder / "model")]
    options = ["--port", "0", "--deltas", str(folder / "deltas")]
    with subprocess.Popen(
        [*program, *options], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def status(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url + STATUS, timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def predictions(url: str, ids: np.ndarray) -> np.ndarray:
    body = json.dumps({"instances": [{"ids": row.tolist()} for row in ids]})
    request = urllib.request.Request(
        f"{url}{STATUS}:predict", body.encode(), method="POST"
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return np.array(json.load(answer)["predictions"])


def load(url: str, ids: np.ndarray, arguments: argparse.Namespace) -> Any:
    """Starts many clients, in a process of their own."""
    program = [sys.executable, str(HERE / "load.py"), url]
    question = json.dumps({"ids": ids.tolist()})
    options = ["--clients", str(arguments.clients)]
    options += ["--seconds", str(arguments.seconds)]
    return subprocess.Popen(
        [*program, question, *options], stdout=subprocess.PIPE, text=True
    )


def train(
    model: Any, arguments: argparse.Namespace, folder: pathlib.Path
) -> None:
    """Rounds of training, each with a delta at its end; on all ranks."""
    for number in range(1, arguments.rounds + 1):
        model.fit(dataset(arguments, number), shuffle=False, verbose=0)
        tfdist_ext.export_delta(model, folder / "deltas" / str(number))


def compare(url: str, model_says: np.ndarray, ids: np.ndarray) -> None:
    """Prints how old served numbers were, and whether they are right now."""
    now = status(url)
    ages, delays = now["ages"], now["delays"]
    difference = abs(predictions(url, ids) - model_says).max()
    print(
        f"{len(delays)} deltas, in use {np.median(delays):.3f} s after they "
        f"were written, {max(delays):.3f} s at most"
    )
    print(
        f"staleness: {np.median(ages):.2f} s when a delta came, "
        f"{max(ages):.2f} s at most"
    )
    print(f"difference to predict(): {difference:.1e}", flush=True)


def main() -> None:
    arguments = parse_arguments()
    strategy = tfdist_ext.HybridParallelStrategy()
    keras.utils.set_random_seed(0)
    first = strategy.rank == 0
    folder = pathlib.Path(arguments.folder)
    if first:  # The others do nothing there before they meet rank 0.
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "deltas").mkdir(parents=True)
    with strategy.scope():
        model = build_model(arguments)
    model.fit(dataset(arguments, 0), shuffle=False, verbose=0)
    samples = dataset(arguments, 0).take(1)
    dtype = arguments.table_dtype
    tfdist_ext.export(model, folder / "model", dtype, deltas=True)
    if not first:
        train(model, arguments, folder)
        model.predict(samples, verbose=0)
        return
    ids = next(iter(samples))[0].numpy()
    with server(folder) as url:
        print(f"serving at {url}", flush=True)
        beside = load(url, ids[0], arguments)
        train(model, arguments, folder)
        model_says = model.predict(samples, verbose=0)
        print("beside the training,", beside.communicate()[0].strip())
        while status(url)["delta"] < arguments.rounds:
            time.sleep(0.05)
        compare(url, model_says, ids)
        alone = load(url, ids[0], arguments)
        print("alone,", alone.communicate()[0].strip())


if __name__ == "__main__":
    main()
