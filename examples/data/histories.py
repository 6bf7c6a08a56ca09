# SPDX-License-Identifier: Apache-2.0
"""What users have rated, in order, from ratings in the ml-100k format."""

import dataclasses
import pathlib

import numpy as np
import tensorflow as tf

# In a test, the right item is to be found among so many others.
OTHERS = 100


@dataclasses.dataclass(frozen=True)
class Histories:
    """The items of every user, the oldest first; 0 is no item.

    Attributes:
      items: int64 `[users, length + 2]`, filled with zeros in front. The last
        item of each user is for the test.
      count: Ids of items are below it.
    """

    items: np.ndarray
    count: int

    def train(self, batch_size: int, seed: int) -> tf.data.Dataset:
        """Batches of histories, the next item at each place, and another.

        Endless; other items are drawn anew for every batch, by its number, so
        that all ranks draw the same.

        Args:
          batch_size: Users per batch, over all ranks.
          seed: Of the other items, and of the order in each epoch.
        """

        def with_others(
            number: tf.Tensor, items: tf.Tensor
        ) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
            positive = items[:, 1:-1]
            negative = tf.random.stateless_uniform(
                tf.shape(positive),
                [seed, number],
                1,
                self.count,
                tf.int64,
            )
            columns = {
                "history": items[:, :-2],
                "positive": positive,
                "negative": negative,
            }
            ones = tf.ones_like(positive, tf.float32)
            return columns, tf.stack([ones, 0 * ones], axis=-1)

        samples = tf.data.Dataset.from_tensor_slices(self.items)
        batches = samples.shuffle(len(self.items), seed=seed).batch(batch_size)
        return batches.repeat().enumerate().map(with_others)

    def test(self, batch_size: int, seed: int) -> tf.data.Dataset:
        """Batches of histories with candidates, of which the first is right."""
        rng = np.random.default_rng(seed)
        others = rng.integers(1, self.count, [len(self.items), OTHERS])
        candidates = np.concatenate([self.items[:, -1:], others], axis=1)
        columns = {"history": self.items[:, 1:-1], "candidates": candidates}
        return tf.data.Dataset.from_tensor_slices(columns).batch(batch_size)


def read(path: str | pathlib.Path, length: int) -> Histories:
    """Reads a `u.data` file.

    Args:
      path: Of the file: user, item, rating and time per line.
      length: Of a history; older items are left out.
    """
    table = np.loadtxt(path, dtype=np.int64, ndmin=2)
    order = np.lexsort((table[:, 3], table[:, 0]))
    users, items = table[order, 0], table[order, 1]
    parts = np.split(items, np.flatnonzero(np.diff(users)) + 1)
    filled = np.zeros([len(parts), length + 2], np.int64)
    for row, part in zip(filled, parts, strict=True):
        latest = part[-len(row) :]
        row[len(row) - len(latest) :] = latest
    return Histories(filled, int(items.max()) + 1)
