# SPDX-License-Identifier: Apache-2.0
"""The next item of a user's history: GRU4Rec and SASRec."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf
from sasrec import Block

from quality import batches
from quality import files
from quality import ranking
from quality import splits
from quality.parts import Parts

keras = tf.keras
Layer = Any  # Of Keras.

MODELS = ("GRU4Rec", "SASRec")
LENGTH = 50  # Items of a history.


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a model is trained.

    Attributes:
      epochs: Passes over the data.
      rate: Learning rate of Adam.
      dropout: Of rows and, in SASRec, of blocks.
      dim: Columns of the table.
      batch: Histories of a step, over all ranks.
      stride: Items between the starts of two histories of a user.
    """

    epochs: int
    rate: float
    dropout: float
    dim: int = 64
    batch: int = 64
    stride: int = 25


SETTINGS = {
    "GRU4Rec": Settings(epochs=9, rate=0.002, dropout=0.3),
    "SASRec": Settings(epochs=36, rate=0.002, dropout=0.3),
}


class States(keras.Model):  # type: ignore[name-defined]
    """States `[b, dim]` after a history, or `[b, length, dim]` of each item."""

    def __init__(
        self, parts: Parts, name: str, items: Layer, seed: int
    ) -> None:
        super().__init__()
        how = SETTINGS[name]
        self.items = items
        self.dropout = keras.layers.Dropout(how.dropout, seed=seed)
        self.recurrent = name == "GRU4Rec"
        if self.recurrent:
            self.gru = keras.layers.GRU(
                2 * how.dim, return_sequences=True, use_bias=False
            )
            self.project = keras.layers.Dense(how.dim)
        else:
            self.places = keras.layers.Embedding(LENGTH, how.dim)
            self.blocks = [Block(how.dim, how.dropout) for _ in range(2)]
            self.norm = keras.layers.LayerNormalization()

    def call(
        self, history: tf.Tensor, training: bool = False, every: bool = False
    ) -> tf.Tensor:
        mask = tf.not_equal(history, 0)
        rows = self.items(history)
        if self.recurrent:
            rows = self.dropout(rows, training=training)
            states = self.project(self.gru(rows, mask=mask, training=training))
        else:
            rows += self.places(tf.range(LENGTH))
            rows = self.dropout(rows, training=training)
            for block in self.blocks:
                rows = block(rows, mask=mask, training=training)
            states = self.norm(rows)
        return states if every else states[:, -1]


class NextItem(keras.Model):  # type: ignore[name-defined]
    """Logits of all items after each item of a history."""

    def __init__(self, parts: Parts, name: str, items: int, seed: int) -> None:
        super().__init__()
        how = SETTINGS[name]
        self.items = parts.table(items, how.dim, how.dim**-0.5, seed)
        self.queries = States(parts, name, self.items, seed)
        self.count = items

    def call(self, history: tf.Tensor, training: bool = False) -> tf.Tensor:
        """Logits `[b, length, items]`; those of item 0 are low."""
        states = self.queries(history, training=training, every=True)
        table = self.items(tf.range(self.count, dtype=tf.int64))
        logits = tf.einsum("bld,id->bli", states, table)
        return logits - 1e9 * tf.one_hot(0, self.count)


def windows(
    histories: list[np.ndarray], stride: int
) -> tuple[np.ndarray, np.ndarray]:
    """Histories and the next items, `[n, length]`, filled with 0 in front."""
    given, following = [], []
    for items in histories:
        ends = range(len(items), min(2, len(items)) - 1, -stride)
        for end in ends:
            own = items[max(end - LENGTH - 1, 0) : end]
            given.append(last(own[:-1]))
            following.append(last(own[1:]))
            if end <= LENGTH + 1:
                break
    return np.stack(given), np.stack(following)


def last(items: np.ndarray) -> np.ndarray:
    """The last items of a history, filled with 0 in front."""
    items = items[-LENGTH:]
    return np.concatenate([np.zeros(LENGTH - len(items), np.int64), items])


def run(
    parts: Parts, data: files.Files, name: str, seed: int
) -> dict[str, float]:
    """Trains without the last two items of a user; ranks all for the last."""
    how = SETTINGS[name]
    known = splits.histories(data.users, data.items + 1, data.times)
    given, following = windows([items[:-2] for items in known], how.stride)
    weights = (following > 0).astype(np.float32)
    with parts.scope():
        model = NextItem(parts, name, data.item_count + 1, seed)
        model.compile(
            parts.adam(how.rate),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    samples = (given, following, weights)
    model.fit(
        batches.of_columns(samples, how.batch, seed),
        epochs=how.epochs,
        verbose=0,
    )
    return ranking.evaluate(
        parts,
        model,
        np.stack([last(items[:-1]) for items in known]),
        [items[-1:] for items in known],
        [items[:0] for items in known],
    )
