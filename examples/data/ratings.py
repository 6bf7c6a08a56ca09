# SPDX-License-Identifier: Apache-2.0
"""Ratings in the ml-100k format: user, item, rating, time per line."""

import dataclasses
import pathlib
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from data.files import demo_directory
from data.files import write_once


@dataclasses.dataclass(frozen=True)
class Ratings:
    """Ratings, one per position.

    Attributes:
      users: int64 `[n]`, counted from 0.
      items: int64 `[n]`, counted from 0.
      scores: float32 `[n]`.
    """

    users: np.ndarray
    items: np.ndarray
    scores: np.ndarray

    def __len__(self) -> int:
        return len(self.scores)

    def take(self, positions: np.ndarray) -> "Ratings":
        """The ratings at `positions`, in that order."""
        return Ratings(
            self.users[positions], self.items[positions], self.scores[positions]
        )

    def dataset(
        self, batch_size: int, *, shuffle: bool = False, seed: int = 0
    ) -> tf.data.Dataset:
        """Batches `{"user": [b], "item": [b], "score": [b]}`.

        Args:
          batch_size: Samples per batch, over all ranks.
          shuffle: Whether to draw a new order in every epoch.
          seed: Seed of the shuffle. Must be the same on every rank.
        """
        columns = {
            "user": self.users,
            "item": self.items,
            "score": self.scores,
        }
        samples = tf.data.Dataset.from_tensor_slices(columns)
        if shuffle:
            samples = samples.shuffle(len(self), seed=seed)
        return samples.batch(batch_size).prefetch(tf.data.AUTOTUNE)


def read(path: str | pathlib.Path) -> Ratings:
    """Reads a `u.data` file; its ids count from 1."""
    table = np.loadtxt(path, dtype=np.int64, ndmin=2)
    if table.shape[1] != 4 or table[:, :2].min() < 1:
        raise ValueError(
            "Ratings must have four columns and ids from 1. "
            f"Received: {table.shape[1]} columns in {path}"
        )
    return Ratings(
        table[:, 0] - 1, table[:, 1] - 1, table[:, 2].astype(np.float32)
    )


def split(ratings: Ratings, test: float, seed: int) -> tuple[Ratings, Ratings]:
    """Random training and test part; the test part has a share of `test`."""
    order = np.random.default_rng(seed).permutation(len(ratings))
    held_out = round(len(ratings) * test)
    return ratings.take(order[held_out:]), ratings.take(order[:held_out])


def synthetic_directory(rows: int = 50_000, seed: int = 0) -> pathlib.Path:
    """A directory with a generated `u.data` of planted tastes."""
    directory = demo_directory() / f"ratings-{rows}-{seed}"
    directory.mkdir(exist_ok=True)
    write_once(directory / "u.data", _synthetic_lines(rows, seed))
    return directory


def _synthetic_lines(rows: int, seed: int) -> Iterator[str]:
    """500 users, 800 items; biases and two hidden factors, plus noise."""
    rng = np.random.default_rng(seed)
    users = rng.integers(0, 500, rows)
    items = np.floor(800 ** rng.random(rows)).astype(np.int64) - 1
    tastes, traits = rng.normal(size=(500, 3)), rng.normal(size=(800, 3))
    scores = 3.5 + 0.4 * tastes[users, 0] + 0.4 * traits[items, 0]
    scores += 0.4 * np.sum(tastes[users, 1:] * traits[items, 1:], axis=1)
    scores += rng.normal(0.0, 0.6, rows)
    stars = np.clip(np.rint(scores), 1, 5).astype(np.int64)
    columns = (users + 1, items + 1, stars, np.arange(rows) + 880_000_000)
    for row in zip(*(column.tolist() for column in columns), strict=True):
        yield "\t".join(map(str, row))
