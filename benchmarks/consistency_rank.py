# SPDX-License-Identifier: Apache-2.0
"""The task of a rank in `consistency`: trains and tests models.

The data are those of `large_batches`, whose truth is known, or clicks of
ml-100k. Every rank sleeps in the forward pass for each of its samples, as if it
computed so long.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import sys
import time
from typing import Any

import numpy as np
import tensorflow as tf

import tfdist_ext
from benchmarks import large_batches
from benchmarks import measure
from benchmarks import rank
from benchmarks.balance import Sleep
from tfdist_ext import layers
from tfdist_ext import optimizers

keras = tf.keras
WIDTH = 8


@dataclasses.dataclass(frozen=True)
class Data:
    """Samples, in the order of training.

    Attributes:
        ids: int64 `[samples, features]`, rows of one table.
        labels: float32 `[samples, 1]`, zeros and ones.
        test_ids: as `ids`, for the test.
        test_labels: as `labels`, for the test.
        rows: rows of the table.
    """

    ids: np.ndarray
    labels: np.ndarray
    test_ids: np.ndarray
    test_labels: np.ndarray
    rows: int


def planted(options: dict[str, Any], seed: int) -> Data:
    """Ids like those of `criteo`; the seed is that of the order."""
    rows = options["rows"]
    train = large_batches.make_data(rows, options["samples"], 0)
    test = large_batches.make_data(rows, 8192, 1)
    order = np.random.default_rng(seed).permutation(len(train.ids))
    count = sum(table.rows for table in large_batches.tables_of(rows))
    ids, labels = train.ids[order], train.labels[order]
    return Data(ids, labels, test.ids, test.labels, count)


def ml_100k(folder: str, seed: int) -> Data:
    """Ratings of 4 and 5 as clicks; the seed is that of split and order.

    Args:
        folder: has the files that the package `recbole` ships.
        seed: draws 80 % for training and 10 % for the test.
    """
    examples = str(pathlib.Path(__file__).parents[1] / "examples")
    if examples not in sys.path:
        sys.path.append(examples)
    from quality import clicks
    from quality import files
    from quality import splits

    data = files.read(pathlib.Path(folder))
    features = clicks.features_of(data)
    labels = (data.scores >= 4).astype(np.float32)[:, None]
    train, _, test = splits.at_random(len(labels), seed)
    ids, count = features.single, features.count
    return Data(ids[train], labels[train], ids[test], labels[test], count)


class Pause(keras.callbacks.Callback):
    """Sleeps at random steps, others on each rank."""

    def __init__(self, seed: int, share: float, seconds: float) -> None:
        super().__init__()
        self._random = np.random.default_rng(seed)
        self._share, self._seconds = share, seconds

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._random.random() < self._share:
            time.sleep(self._seconds)


def consistency(described: list[Any]) -> Any:
    """An object of `tfdist_ext.consistency`: its class, and its arguments."""
    name, options = described
    given = {
        key: consistency(value) if isinstance(value, list) else value
        for key, value in options.items()
    }
    return getattr(tfdist_ext.consistency, name)(**given)


def make_model(
    options: dict[str, Any], data: Data, sleep: float, seed: int
) -> keras.Model:
    """A table for all features, and dense layers; a click is predicted."""
    features = data.ids.shape[1]
    normal = keras.initializers.RandomNormal
    table = layers.TableConfig(
        "rows",
        data.rows,
        WIDTH,
        normal(0.0, 0.01, seed=1 + seed),
        combiner=None,
        placement="row",
    )
    shape = (None, features)
    feature = layers.FeatureConfig("ids", table, shape, (*shape, WIDTH))
    inputs = keras.Input([features], dtype="int64")
    x = layers.DistributedEmbedding(feature)(inputs)
    x = Sleep(sleep)(keras.layers.Flatten()(x))
    for i, width in enumerate(options["hidden"]):
        x = keras.layers.Dense(
            width,
            "relu",
            kernel_initializer=keras.initializers.GlorotUniform(seed=seed + i),
        )(x)
    x = keras.layers.Dense(
        1, kernel_initializer=keras.initializers.GlorotUniform(seed=seed + 9)
    )(x)
    model = keras.Model(inputs, x)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    kind = getattr(optimizers, options["optimizer"])
    model.compile(kind(options["learning_rate"]), loss)
    return model


def batches(data: Data, batch: int, first: int, steps: int) -> tf.data.Dataset:
    """Steps of the global batch, from sample `first` on."""
    places = (first + np.arange(steps * batch)) % len(data.ids)
    slices = tf.data.Dataset.from_tensor_slices(
        (data.ids[places], data.labels[places])
    )
    return slices.batch(batch, drop_remainder=True)


def run_rank(context: rank.RankContext) -> dict[str, Any]:
    """Trains a model with each seed, see `train`; `runs` has the results."""
    options = context.options
    strategy = tfdist_ext.HybridParallelStrategy(
        timeout=300,
        check="off",
        consistency=consistency(options["mode"]),
        balance=options["balance"],
    )
    runs = [train(context, strategy, seed) for seed in options["seeds"]]
    return {"runs": runs}


def train(
    context: rank.RankContext, strategy: Any, seed: int
) -> dict[str, Any]:
    """Trains part by part, and tests after each.

    Returns:
        Seconds and AUC after each part; bytes per step, all and those of
        rows; the share of rows that this rank had copies of, since the start;
        shares of the ranks; updates by their staleness.
    """
    options = context.options
    slow = context.rank == context.ranks - 1 and options["slower"] > 1
    sleep = options["microseconds"] / 1e6 * (options["slower"] if slow else 1)
    keras.utils.set_random_seed(seed)
    folder = options["ml_100k"]
    data = ml_100k(folder, seed) if folder else planted(options, seed)
    with strategy.scope():
        model = make_model(options, data, sleep, seed)
    batch = options["batch"] * context.ranks
    pause = Pause(context.rank, options["pauses"], options["pause_seconds"])
    stale = collections.Counter(strategy.statistics().get("staleness", {}))
    warm = batches(data, batch, 0, options["warm_up"])
    model.fit(warm, verbose=0)
    first, seconds, curve = options["warm_up"] * batch, 0.0, []
    sent = rows = 0.0
    for _ in range(options["parts"]):
        part = batches(data, batch, first, options["steps"])
        first += options["steps"] * batch
        context.barrier(f"begin {seed} {first}")
        before = measure.sample(context.interface)
        rows -= _bytes_of_rows(strategy)
        began = time.perf_counter()
        model.fit(part, verbose=0, callbacks=[pause])
        seconds += time.perf_counter() - began
        rows += _bytes_of_rows(strategy)
        sent += _bytes_between(before, measure.sample(context.interface))
        scores = model.predict(data.test_ids, batch_size=2048, verbose=0)
        found = large_batches.auc(scores[:, 0], data.test_labels[:, 0])
        curve.append((seconds, found))
    check_equal(strategy, model)
    steps = options["steps"] * options["parts"]
    statistics = strategy.statistics()
    updates = collections.Counter(statistics.get("staleness", {}))
    updates.subtract(stale)
    return {
        "curve": curve,
        "bytes_per_step": sent / steps,
        "row_bytes_per_step": rows / steps,
        "row_cache_hits": statistics.get("row_cache_hits"),
        "shares": list(statistics.get("shares", ())),
        "staleness": dict(updates),
    }


def check_equal(strategy: Any, model: keras.Model) -> None:
    """Raises a CheckError if the ranks have different dense weights."""
    for layer in model.layers:
        if not isinstance(layer, keras.layers.Dense):
            continue
        mine = tf.reshape(tf.convert_to_tensor(layer.kernel), [1, -1])
        everyone = strategy.gather(mine, axis=0).numpy()
        if (everyone != everyone[0]).any():
            raise rank.CheckError(f"{layer.name} differs between ranks")


def _bytes_between(before: Any, after: Any) -> float:
    return float(measure.per_step(before, after, 1)["egress_bytes"])


def _bytes_of_rows(strategy: Any) -> float:
    """Bytes sent so far for rows: their ids, values and gradients."""
    labels = strategy.statistics().get("labels", {})
    return float(
        sum(
            each[1]
            for label, each in labels.items()
            if label.startswith(("rows/", "consistency/rows"))
            or "distributed_embedding" in label
        )
    )
