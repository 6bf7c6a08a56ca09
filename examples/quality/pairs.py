# SPDX-License-Identifier: Apache-2.0
"""Matrix factorisation for pairs of a rated and another item (BPR).

Of several other items, each step takes the one with the highest score.

Source: Zhang et al., Optimizing Top-N Collaborative Filtering via Dynamic
Negative Item Sampling, SIGIR 2013.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from quality import batches
from quality import files
from quality import ranking
from quality import splits
from quality.parts import Parts

keras = tf.keras

MODELS = ("BPR",)
DIM, BATCH, RATE, EPOCHS = 64, 2048, 0.003, 45
# On squares of the rows that a sample learns from.
PENALTY = 0.02
# Other items of a sample, and how often each is drawn until it is not rated.
OTHERS, DRAWS = 4, 8


class Factors(keras.Model):  # type: ignore[name-defined]
    """The score of an item is the product of its row and the user's."""

    def __init__(self, parts: Parts, users: int, items: int, seed: int) -> None:
        super().__init__()
        self.users = parts.table(users, DIM, 0.05, seed)
        self.items = parts.table(items, DIM, 0.05, seed + 1)
        self.queries = keras.Sequential(
            [keras.Input([], dtype="int64"), self.users]
        )

    def call(
        self, inputs: dict[str, tf.Tensor], training: bool = False
    ) -> tf.Tensor:
        """By how much the rated item is ahead of the best other, `[b, 1]`."""
        users = self.users(inputs["user"])
        rated = inputs["item"][:, tf.newaxis]
        items = self.items(tf.concat([rated, inputs["others"]], axis=1))
        scores = tf.einsum("bd,bid->bi", users, items)
        best = 1 + tf.argmax(scores[:, 1:], axis=1)[:, tf.newaxis]
        if training:
            others = tf.gather(items, best, batch_dims=1)
            rows = [users, items[:, 0], others[:, 0]]
            squares = tf.add_n([tf.reduce_sum(each**2, 1) for each in rows])
            self.add_loss(PENALTY * tf.reduce_mean(squares))
        return scores[:, :1] - tf.gather(scores, best, batch_dims=1)


def pairs(
    users: np.ndarray, items: np.ndarray, seen: np.ndarray, seed: int
) -> tf.data.Dataset:
    """Endless batches of samples with other items, drawn anew each time.

    Args:
      users: `[n]`.
      items: Rated items, `[n]`, from 1.
      seen: Whether a user has rated an item, bool `[users, items]`.
      seed: Of the order and of the other items.
    """
    table = tf.constant(seen)

    def with_others(
        number: tf.Tensor, rated: dict[str, tf.Tensor]
    ) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        user = rated["user"]
        count = tf.shape(user)[0]
        shape = [count, OTHERS, DRAWS]
        drawn = tf.random.stateless_uniform(
            shape, [seed, number], 1, seen.shape[1], tf.int64
        )
        known = tf.gather(tf.gather(table, user), drawn, batch_dims=1)
        free = tf.argmin(tf.cast(known, tf.int32), axis=2)
        others = tf.gather(drawn, free, batch_dims=2)
        return {**rated, "others": others}, tf.ones([count, 1])

    rated = batches.of_columns({"user": users, "item": items}, BATCH, seed)
    return rated.repeat().enumerate().map(with_others)


def run(
    parts: Parts, data: files.Files, name: str, seed: int
) -> dict[str, float]:
    """Trains on pairs, then ranks all items that a user has not rated."""
    del name
    train, valid, test = splits.of_users(data.users, seed)
    items = data.items + 1
    seen = np.zeros([data.user_count, data.item_count + 1], bool)
    seen[data.users[train], items[train]] = True
    with parts.scope():
        model = Factors(parts, len(seen), seen.shape[1], seed)
        model.compile(
            parts.adam(RATE),
            keras.losses.BinaryCrossentropy(from_logits=True),
            steps_per_execution=10,
        )
    model.fit(
        pairs(data.users[train], items[train], seen, seed),
        epochs=EPOCHS,
        steps_per_epoch=-(-len(train) // BATCH),
        verbose=0,
    )
    known = np.concatenate([train, valid])
    return ranking.evaluate(
        parts,
        model,
        np.arange(data.user_count),
        _of_users(data.users[test], items[test], data.user_count),
        _of_users(data.users[known], items[known], data.user_count),
    )


def _of_users(
    users: np.ndarray, items: np.ndarray, count: int
) -> list[np.ndarray]:
    order = np.argsort(users, kind="stable")
    cuts = np.cumsum(np.bincount(users, minlength=count))[:-1]
    found: list[Any] = np.split(items[order], cuts)
    return found
