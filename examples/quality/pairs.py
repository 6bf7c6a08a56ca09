# SPDX-License-Identifier: Apache-2.0
"""Matrix factorisation for pairs of a rated and another item (BPR)."""

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
DIM, BATCH, RATE, EPOCHS = 64, 2048, 0.003, 50
# On squares of the rows that a sample reads.
PENALTY = 0.005
# Other items that are drawn for a sample, until one is not rated.
DRAWS = 8


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
        """By how much the rated item is ahead, `[b, 1]`."""
        users = self.users(inputs["user"])
        both = tf.stack([inputs["item"], inputs["other"]], axis=1)
        items = self.items(both)
        if training:
            squares = tf.reduce_sum(users**2, 1) + tf.reduce_sum(
                items**2, [1, 2]
            )
            self.add_loss(PENALTY * tf.reduce_mean(squares))
        scores = tf.einsum("bd,bid->bi", users, items)
        return scores[:, :1] - scores[:, 1:]


def pairs(
    users: np.ndarray, items: np.ndarray, seen: np.ndarray, seed: int
) -> tf.data.Dataset:
    """Endless batches of samples with another item, drawn anew each time.

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
        shape = [tf.shape(user)[0], DRAWS]
        drawn = tf.random.stateless_uniform(
            shape, [seed, number], 1, seen.shape[1], tf.int64
        )
        known = tf.gather(tf.gather(table, user), drawn, batch_dims=1)
        free = tf.argmin(tf.cast(known, tf.int32), axis=1)
        other = tf.gather(drawn, free, batch_dims=1)
        ones = tf.ones([tf.shape(user)[0], 1])
        return {**rated, "other": other}, ones

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
