# SPDX-License-Identifier: Apache-2.0
"""Ratings as numbers: factorisations of users, items and what is known of both.

- SVD: mean, biases, and the product of the rows of user and item (Funk's and
  Koren's biased matrix factorisation).
- SVD++: the user's row, and the mean of rows for the items that a user has
  rated (Koren 2008).
- RatingFM: the same with rows for age, gender, occupation, year and genres, and
  for the users who have rated an item; all pairs of rows are multiplied.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from quality import batches
from quality import files
from quality import splits
from quality.clicks import features_of
from quality.parts import Parts

keras = tf.keras
Layer = Any  # Of Keras.

MODELS = ("SVD", "SVD++", "RatingFM")
FOLDS = 5


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a model is trained.

    Attributes:
      epochs: Passes over the data.
      rate: Learning rate of Adam.
      penalty: On squares of the rows that a sample reads.
      of_biases: The same of biases.
      dim: Columns of the table.
      batch: Samples of a step, over all ranks.
    """

    epochs: int
    rate: float
    penalty: float
    of_biases: float
    dim: int = 32
    batch: int = 1000


SETTINGS = {
    "SVD": Settings(8, 0.005, penalty=0.1, of_biases=0.02),
    "SVD++": Settings(11, 0.003, penalty=0.15, of_biases=0.01),
    "RatingFM": Settings(9, 0.003, penalty=0.1, of_biases=0.01, dim=16),
}


class ScoreModel(keras.Model):  # type: ignore[name-defined]
    """Scores `[b, 1]` of ratings.

    Args:
      parts: Tables and the scope.
      name: One of `MODELS`.
      rows: Rows of the table of fields.
      rated: Which items users have rated, bool `[users, items]`.
      mean: Of the scores.
      seed: Of the initial rows.
    """

    def __init__(
        self,
        parts: Parts,
        name: str,
        rows: int,
        rated: np.ndarray,
        mean: float,
        seed: int,
    ) -> None:
        super().__init__()
        how = SETTINGS[name]
        self.kind, self.mean, self.how = name, mean, how
        self.biases = parts.table(rows, 1, 0.0, seed)
        self.table = parts.table(rows, how.dim, 0.05, seed + 1)
        if name != "SVD":
            self.of_items = _shares(rated)
            self.items = parts.table(rated.shape[1], how.dim, 0.01, seed + 2)
        if name == "RatingFM":
            self.of_users = _shares(rated.T)
            self.users = parts.table(rated.shape[0], how.dim, 0.01, seed + 3)

    def call(
        self, inputs: dict[str, tf.Tensor], training: bool = False
    ) -> tf.Tensor:
        single, genres = inputs["single"], inputs["genres"]
        ids = single[:, :2]
        if self.kind == "RatingFM":
            ids = tf.concat([single, genres], axis=1)
        known = tf.cast(ids > 0, tf.float32)[..., tf.newaxis]
        known *= _weights(ids, single.shape[1])
        rows, biases = self.table(ids) * known, self.biases(ids) * known
        penalties = self.how.of_biases * tf.reduce_sum(biases**2, [1, 2])
        squares = tf.reduce_sum(rows**2, [1, 2])
        if self.kind != "SVD":
            implicit = self._implicit(self.items, self.of_items, inputs["user"])
            squares += tf.reduce_sum(implicit**2, [1, 2])
            rows = self._joined(rows, implicit)
        if self.kind == "RatingFM":
            implicit = self._implicit(self.users, self.of_users, inputs["item"])
            squares += tf.reduce_sum(implicit**2, [1, 2])
            rows = tf.concat([rows, implicit], axis=1)
        if training:
            penalties += self.how.penalty * squares
            self.add_loss(tf.reduce_mean(penalties))
        products = tf.square(tf.reduce_sum(rows, axis=1))
        products -= tf.reduce_sum(tf.square(rows), axis=1)
        products = 0.5 * tf.reduce_sum(products, axis=1, keepdims=True)
        return self.mean + tf.reduce_sum(biases, axis=1) + products

    def _joined(self, rows: tf.Tensor, implicit: tf.Tensor) -> tf.Tensor:
        """SVD++ adds the implicit row to the user's; RatingFM appends it."""
        if self.kind == "RatingFM":
            return tf.concat([rows, implicit], axis=1)
        return tf.concat([rows[:, :1] + implicit, rows[:, 1:]], axis=1)

    def _implicit(
        self, table: Layer, shares: tf.Tensor, ids: tf.Tensor
    ) -> tf.Tensor:
        """Sums of the rows of what each has rated, `[b, 1, dim]`."""
        rows = table(tf.range(table.input_dim, dtype=tf.int64))
        return tf.matmul(tf.gather(shares, ids), rows)[:, tf.newaxis]


def _weights(ids: tf.Tensor, fields: int) -> tf.Tensor:
    """1 for each field, and the share of each genre, `[b, ids, 1]`."""
    genres = tf.cast(ids[:, fields:] > 0, tf.float32)
    count = tf.reduce_sum(genres, axis=1, keepdims=True)
    shares = tf.ones_like(genres) / tf.maximum(count, 1.0)
    ones = tf.ones_like(ids[:, :fields], tf.float32)
    return tf.concat([ones, shares], axis=1)[..., tf.newaxis]


def _shares(rated: np.ndarray) -> tf.Tensor:
    """1 / sqrt(n) for each of the n that each has rated."""
    count = np.maximum(rated.sum(axis=1, keepdims=True), 1)
    return tf.constant(rated / np.sqrt(count), tf.float32)


def test_positions(name: str, count: int, fold: int, seed: int) -> np.ndarray:
    """Ratings for the test: random folds, and for RatingFM those of ml-100k."""
    if name == "RatingFM":
        return splits.published_folds(count, FOLDS)[fold]
    return splits.random_folds(count, FOLDS, seed)[fold]


def run(
    parts: Parts, data: files.Files, name: str, seed: int, folds: int = FOLDS
) -> dict[str, float]:
    """The mean of the root mean square errors of the first folds.

    Of RatingFM, that of the third fold.
    """
    chosen = [2] if name == "RatingFM" else list(range(folds))
    errors = []
    for fold in chosen:
        test = test_positions(name, len(data.users), fold, seed)
        errors.append(error_of(parts, data, name, test, seed))
    return {"RMSE": float(np.mean(errors))}


def error_of(
    parts: Parts, data: files.Files, name: str, test: np.ndarray, seed: int
) -> float:
    """Trains without the test part; its root mean square error."""
    how = SETTINGS[name]
    features = features_of(data)
    train = np.setdiff1d(np.arange(len(data.users)), test)
    rated = np.zeros([data.user_count, data.item_count], bool)
    rated[data.users[train], data.items[train]] = True

    def dataset(positions: np.ndarray, train: bool) -> tf.data.Dataset:
        columns = {
            "single": features.single[positions],
            "genres": features.genres[positions],
            "user": data.users[positions],
            "item": data.items[positions],
        }
        given = (columns, data.scores[positions, np.newaxis])
        if train:
            return batches.of_columns(given, how.batch, seed)
        return batches.of_columns(given, 4096)

    mean = float(data.scores[train].mean())
    with parts.scope():
        model = ScoreModel(parts, name, features.count, rated, mean, seed)
        model.compile(parts.adam(how.rate), "mse", steps_per_execution=10)
    model.fit(dataset(train, True), epochs=how.epochs, verbose=0)
    found = model.predict(dataset(test, False), verbose=0)[:, 0]
    wrong = np.clip(found, 1.0, 5.0) - data.scores[test]
    return float(np.sqrt(np.mean(wrong.astype(np.float64) ** 2)))
