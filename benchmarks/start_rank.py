# SPDX-License-Identifier: Apache-2.0
"""A process that `benchmarks.start` starts and measures.

Usage: start_rank.py FOLDER [--stock] [--quick]. Trains a small model for a few
steps and notes the time of each event in FOLDER/events-RANK.
"""

import sys

if "--quick" in sys.argv:  # what a program may do: docs/cluster.md
    import gc

    gc.disable()

import contextlib
import json
import os
import pathlib
import time
from typing import Any

import numpy as np
import tensorflow as tf

import tfdist_ext

keras = tf.keras
_ = keras.Sequential  # Keras is imported at its first use
if "--quick" in sys.argv:
    gc.freeze()
    gc.enable()

_ROWS, _DIM, _HOTNESS, _BATCH, _STEPS = 1000, 8, 4, 64, 5


class _FirstStep(keras.callbacks.Callback):  # type: ignore[name-defined]
    """Notes the end of the first step."""

    def __init__(self, note: Any) -> None:
        super().__init__()
        self._note = note

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 0:
            self._note("first step")


def _make_model(stock: bool) -> Any:
    table: type[Any] = tfdist_ext.layers.Embedding
    optimizer: type[Any] = tfdist_ext.optimizers.Adagrad
    if stock:
        table, optimizer = keras.layers.Embedding, keras.optimizers.Adagrad
    model = keras.Sequential(
        [table(_ROWS, _DIM), keras.layers.Flatten(), keras.layers.Dense(1)]
    )
    model.compile(optimizer(0.05), "mse")
    return model


def _make_data() -> tf.data.Dataset:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, _ROWS, [_BATCH * _STEPS, _HOTNESS])
    labels = rng.normal(size=[_BATCH * _STEPS, 1]).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((ids, labels)).batch(_BATCH)


def main() -> None:
    folder, stock = pathlib.Path(sys.argv[1]), "--stock" in sys.argv
    config = json.loads(os.environ.get("TF_CONFIG", "{}"))
    rank = config.get("task", {}).get("index", 0)
    scope: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    with (folder / f"events-{rank}").open("w") as file:

        def note(event: str) -> None:
            seconds = {"wall": time.monotonic(), "cpu": time.process_time()}
            file.write(json.dumps({"event": event, **seconds}) + "\n")

        note("imported")
        if not stock:
            scope = tfdist_ext.HybridParallelStrategy().scope()
            note("met")
        with scope:
            model = _make_model(stock)
        model.fit(_make_data(), verbose=0, callbacks=[_FirstStep(note)])
        note("trained")


if __name__ == "__main__":
    main()
