# SPDX-License-Identifier: Apache-2.0
"""Ratings of 4 and 5 as clicks: LR, FM, DeepFM and DCN v2."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from quality import batches
from quality import files
from quality import splits
from quality.parts import Parts

keras = tf.keras
Layer = Any  # Of Keras.

MODELS = ("LR", "FM", "DeepFM", "DCNv2")


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a model is trained.

    Attributes:
      rate: Learning rate of Adam.
      dim: Columns of the table.
      units: Units of the layers of the network.
      dropout: After each layer of the network.
      epochs: Most passes over the data.
      batch: Samples of a step, over all ranks.
      patience: Epochs without a better validation AUC before the end.
    """

    rate: float
    dim: int = 10
    units: tuple[int, ...] = ()
    dropout: float = 0.0
    epochs: int = 40
    batch: int = 2048
    patience: int = 3


SETTINGS = {
    "LR": Settings(0.01),
    "FM": Settings(0.004),
    "DeepFM": Settings(0.002, units=(128, 128, 128), dropout=0.2),
    "DCNv2": Settings(0.001, dim=16, units=(256, 256), dropout=0.2),
}


@dataclasses.dataclass(frozen=True)
class Features:
    """Rows of one table for all fields of a rating; row 0 is none.

    Attributes:
      single: int64 `[ratings, 6]`: user, item, and their fields.
      genres: int64 `[ratings, most]`, filled up with 0.
      count: Rows of the table.
    """

    single: np.ndarray
    genres: np.ndarray
    count: int


def features_of(data: files.Files) -> Features:
    """Features of all ratings."""
    columns = [
        data.users,
        data.items,
        *data.user_fields[data.users].T,
        *data.item_fields[data.items].T,
    ]
    first = 1
    for i, column in enumerate(columns):
        columns[i] = column + first
        first += int(column.max()) + 1
    genres = data.genres[data.items]
    count = first + int(genres.max()) + 1
    genres = np.where(genres < 0, 0, genres + first)
    return Features(np.stack(columns, axis=1), genres, count)


class ClickModel(keras.Model):  # type: ignore[name-defined]
    """Logits `[b, 1]` of clicks."""

    def __init__(self, parts: Parts, name: str, rows: int, seed: int) -> None:
        super().__init__()
        how = SETTINGS[name]
        self.kind = name
        self.linear = parts.table(rows, 1, 0.0, seed)
        self.bias = keras.layers.Dense(1)  # Of a column of ones.
        if name != "LR":
            self.table = parts.table(rows, how.dim, 0.01, seed)
        self.network = [keras.layers.Dense(n, "relu") for n in how.units]
        self.dropout = keras.layers.Dropout(how.dropout, seed=seed)
        if name == "DCNv2":
            columns = 7 * how.dim
            self.crosses = [keras.layers.Dense(columns) for _ in range(3)]
        self.last = keras.layers.Dense(1)

    def call(
        self, inputs: dict[str, tf.Tensor], training: bool = False
    ) -> tf.Tensor:
        linear = tf.reduce_sum(self._rows(self.linear, inputs), axis=1)
        logits = self.bias(tf.ones_like(linear)) + linear
        if self.kind == "LR":
            return logits
        rows = self._rows(self.table, inputs)  # [b, 7, dim]
        flat = tf.reshape(rows, [-1, rows.shape[1] * rows.shape[2]])
        if self.kind == "DCNv2":
            crossed = flat
            for cross in self.crosses:
                crossed += flat * cross(crossed)
            return self._deep(crossed, training)
        squares = tf.square(tf.reduce_sum(rows, axis=1))
        squares -= tf.reduce_sum(tf.square(rows), axis=1)
        logits += 0.5 * tf.reduce_sum(squares, axis=1, keepdims=True)
        if self.kind == "DeepFM":
            logits += self._deep(flat, training)
        return logits

    def _rows(self, table: Layer, inputs: dict[str, tf.Tensor]) -> tf.Tensor:
        """A row for each field; that of the genres is their mean."""
        genres = inputs["genres"]
        ids = tf.concat([inputs["single"], genres], axis=1)
        rows = table(ids)
        fields = inputs["single"].shape[1]
        known = tf.cast(genres > 0, rows.dtype)[..., tf.newaxis]
        total = tf.reduce_sum(rows[:, fields:] * known, axis=1, keepdims=True)
        count = tf.reduce_sum(known, axis=1, keepdims=True)
        mean = tf.math.divide_no_nan(total, count)
        return tf.concat([rows[:, :fields], mean], axis=1)

    def _deep(self, values: tf.Tensor, training: bool) -> tf.Tensor:
        for layer in self.network:
            values = self.dropout(layer(values), training=training)
        return self.last(values)


def run(
    parts: Parts, data: files.Files, name: str, seed: int
) -> dict[str, float]:
    """Trains a model until the validation AUC falls; AUC and logloss."""
    how = SETTINGS[name]
    features = features_of(data)
    labels = (data.scores >= 4).astype(np.float32)

    def dataset(positions: np.ndarray, train: bool) -> tf.data.Dataset:
        columns = {
            "single": features.single[positions],
            "genres": features.genres[positions],
        }
        given = (columns, labels[positions, np.newaxis])
        if train:
            return batches.of_columns(given, how.batch, seed)
        return batches.of_columns(given, 4096)

    train, valid, test = splits.at_random(len(labels), seed)
    with parts.scope():
        model = ClickModel(parts, name, features.count, seed)
        model.compile(
            parts.adam(how.rate),
            keras.losses.BinaryCrossentropy(from_logits=True),
            metrics=[
                keras.metrics.AUC(
                    num_thresholds=1000, from_logits=True, name="auc"
                )
            ],
            steps_per_execution=10,
        )
        stop = keras.callbacks.EarlyStopping(
            "val_auc",
            patience=how.patience,
            mode="max",
            restore_best_weights=True,
        )
    model.fit(
        dataset(train, True),
        validation_data=dataset(valid, False),
        epochs=how.epochs,
        callbacks=[stop],
        verbose=0,
    )
    logits = model.predict(dataset(test, False), verbose=0)[:, 0]
    return quality(labels[test], logits.astype(np.float64))


def quality(labels: np.ndarray, logits: np.ndarray) -> dict[str, float]:
    """AUC and logloss, exact; equal predictions count half.

    Args:
      labels: 0 or 1, `[n]`.
      logits: Of the predictions, `[n]`.
    """
    _, place, counts = np.unique(
        logits, return_inverse=True, return_counts=True
    )
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    positives = labels.sum()
    pairs = positives * (len(labels) - positives)
    won = ranks[labels == 1].sum() - positives * (positives + 1) / 2
    losses = np.logaddexp(0.0, np.where(labels == 1, -logits, logits))
    return {"AUC": float(won / pairs), "logloss": float(losses.mean())}
