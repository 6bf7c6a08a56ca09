# SPDX-License-Identifier: Apache-2.0
"""The texts of keys, and the slices of saved keys that belong to a rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.ops import vocabulary_ops
from tfdist_ext.tables.table_config import DynamicVocabulary

# In the order of `vocabulary_ops.export_keys`.
ROWS = ("keys", "counts", "steps")
CANDIDATES = tuple(f"candidate_{name}" for name in ROWS)
# The step and the hash key, the same for every bucket. Earlier versions saved
# the step alone.
STEP = "step"


@dataclasses.dataclass(frozen=True)
class KeySlices:
    """Buckets of a rank among those of all.

    Attributes:
        config: the rules of the vocabulary.
        rank: of this process.
        world_size: the number of ranks.
        first_rank: which owns the first buckets.
    """

    config: DynamicVocabulary
    rank: int
    world_size: int
    first_rank: int = 0

    def owned(self, buckets: int) -> tuple[int, int]:
        """The first bucket of this rank, and the one after the last.

        Args:
            buckets: of all ranks.
        """
        n = (self.rank - self.first_rank) % self.world_size
        size = self.world_size
        return n * buckets // size, (n + 1) * buckets // size

    def owners(self, bucket: np.ndarray, buckets: int) -> np.ndarray:
        """Which ranks own buckets.

        Args:
            bucket: numbers of some.
            buckets: of all ranks.
        """
        n = ((bucket + 1) * self.world_size - 1) // buckets
        return (n + self.first_rank) % self.world_size

    def in_order(self, gathered: Any) -> np.ndarray:
        """Puts an array `[buckets, ...]` in order of the buckets.

        Args:
            gathered: of all ranks, in order of the ranks.
        """
        first, _ = dataclasses.replace(self, rank=0).owned(len(gathered))
        return np.roll(gathered, first, 0)

    @property
    def names(self) -> tuple[str, ...]:
        """What is saved of keys, texts left out."""
        if self.config.min_count > 1:
            return (*ROWS, *CANDIDATES, STEP)
        return (*ROWS, STEP)

    def slots(self, buckets: int) -> int:
        """Slots of every bucket.

        Args:
            buckets: of all ranks.
        """
        return -(-self.config.capacity // buckets)

    def shapes(self, buckets: int) -> dict[str, tuple[int, ...]]:
        """Shapes of what all ranks save together, by name.

        Args:
            buckets: of all ranks.
        """
        slots = self.slots(buckets)
        words = 2 if self.config.key_dtype == "string" else 1
        return {
            name: (buckets, 3)
            if name == STEP
            else (buckets, slots, words)
            if name.endswith("keys")
            else (buckets, slots)
            for name in self.names
        }

    def slice_of(self, shape: tuple[int, ...]) -> str:
        """This rank's part of an array of all ranks, as TensorFlow writes it.

        A rank that owns nothing reads a bucket that it does not use.

        Args:
            shape: of that array.
        """
        first, end = self.owned(shape[0])
        size = max(end - first, 1)
        first = min(first, shape[0] - 1)
        parts = [f"{first},{size}", *(f"0,{each}" for each in shape[1:])]
        return f"{' '.join(map(str, shape))} {':'.join(parts)}"


# What is saved of them: bytes of every text, and those of a bucket's.
LENGTHS, BYTES = "text_lengths", "texts"
# Rows of the whole table, ascending or not, and the texts of their keys.
Texts = tuple[np.ndarray, list[bytes]]


class KeyTexts:
    """The texts that this rank keeps.

    Args:
        table: its name.
        handle: of its vocabulary.
        slices: of its buckets.
        collectives: of the strategy, None in one process.
    """

    def __init__(
        self,
        table: str,
        handle: tf.Tensor,
        slices: KeySlices,
        collectives: Collectives | None,
    ) -> None:
        self._label, self._handle = f"{table}/texts", handle
        self._slices, self._collectives = slices, collectives

    def own(self, buckets: int) -> Texts:
        """Those of keys that this rank owns; all ranks call.

        Args:
            buckets: of all ranks.
        """
        rows, texts = self.all()
        if self._collectives is None:
            return rows, texts
        group = self._collectives.group
        owners = self._slices.owners((rows - 1) % buckets, buckets)
        theirs = np.flatnonzero(owners != group.rank)
        theirs = theirs[np.argsort(owners[theirs], kind="stable")]
        got = send(
            (rows[theirs], [texts[i] for i in theirs]),
            np.bincount(owners[theirs], minlength=group.world_size),
            self._collectives,
            self._label,
        )
        # Not sooner: what has not arrived is kept.
        self.keep(got)
        vocabulary_ops.shorten_texts(
            self._handle, tf.constant(rows[theirs], tf.int32)
        )
        return self.all()

    def all(self) -> Texts:
        """Those that are here."""
        rows, texts = vocabulary_ops.kept_texts(self._handle)
        return rows.numpy().astype(np.int64), texts.numpy().tolist()

    def keep(self, texts: Texts) -> None:
        """Keeps texts of rows that have none yet.

        Args:
            texts: with their rows.
        """
        vocabulary_ops.keep_texts(
            self._handle,
            tf.constant(texts[0], tf.int32),
            tf.constant(texts[1], tf.string, [len(texts[1])]),
        )

    def packed(
        self, buckets: int, slots: int, first: int, end: int
    ) -> dict[str, np.ndarray]:
        """What is saved of those that this rank owns; all ranks call.

        Args:
            buckets: of all ranks.
            slots: of each of them.
            first: of this rank's buckets.
            end: behind the last one of them.

        Returns:
            By name: bytes of the texts, int64 `[own buckets, slots]`, and the
            texts of a bucket behind each other, uint8 `[own buckets, n]`, n
            alike on all ranks.
        """
        rows, texts = self.own(buckets)
        bucket, slot = (rows - 1) % buckets - first, (rows - 1) // buckets
        lengths = np.zeros([end - first, slots], np.int64)
        lengths[bucket, slot] = list(map(len, texts))
        order = np.lexsort([slot, bucket])
        ends = np.searchsorted(bucket[order], np.arange(end - first), "right")
        joined = [
            b"".join(texts[i] for i in part)
            for part in np.split(order, ends)[: end - first]
        ]
        longest = max([1, *map(len, joined)])
        if self._collectives is not None:
            mine = tf.constant([longest], tf.int64)
            every = self._collectives.all_gather(mine, f"{self._label}/longest")
            longest = int(every.numpy().max())
        padded = b"".join(text.ljust(longest, b"\0") for text in joined)
        values = np.frombuffer(padded, np.uint8).reshape(-1, longest)
        return {LENGTHS: lengths, BYTES: values}

    def take(
        self, saved: Mapping[str, Any], buckets: int, first: int, end: int
    ) -> None:
        """Keeps what `packed` returned, of this rank's buckets.

        Args:
            saved: by name; the slots may be fewer.
            buckets: of all ranks.
            first: of this rank's buckets.
            end: behind the last one of them.
        """
        lengths = np.asarray(saved[LENGTHS])[: end - first]
        rows: list[int] = []
        texts: list[bytes] = []
        for i, values in enumerate(np.asarray(saved[BYTES])[: end - first]):
            (slots,) = np.nonzero(lengths[i])
            rows += (1 + slots * buckets + first + i).tolist()
            texts += _cut(values.tobytes(), lengths[i, slots])
        self.keep((np.array(rows, np.int64), texts))

    def of_all(self, buckets: int) -> Texts:
        """Those of all ranks, on every rank; all ranks call.

        Args:
            buckets: of all ranks.
        """
        rows, texts = self.own(buckets)
        if self._collectives is None:
            return rows, texts
        world_size = self._collectives.group.world_size
        return send(
            (np.tile(rows, world_size), texts * world_size),
            np.full([world_size], len(rows)),
            self._collectives,
            f"{self._label}/all",
        )


def send(
    texts: Texts, splits: np.ndarray, collectives: Collectives, label: str
) -> Texts:
    """Sends texts, in order of the ranks they go to; all ranks call.

    Args:
        texts: with their rows.
        splits: int64 `[world_size]`, how many go to every rank.
        collectives: of the strategy.
        label: names the exchange in errors.

    Returns:
        What has come.
    """
    rows, strings = texts
    lengths = np.array(list(map(len, strings)), np.int64)
    ends = np.cumsum(splits)
    sizes = np.diff(np.concatenate([[0], np.cumsum(lengths)])[[0, *ends]])
    heads, _ = collectives.all_to_all(
        tf.constant(np.column_stack([rows, lengths]), tf.int64),
        tf.constant(splits, tf.int64),
        f"{label}/rows",
    )
    found, _ = collectives.all_to_all(
        tf.constant(np.frombuffer(b"".join(strings), np.uint8)),
        tf.constant(sizes, tf.int64),
        label,
    )
    got = heads.numpy()
    return got[:, 0], _cut(found.numpy().tobytes(), got[:, 1])


def _cut(joined: bytes, lengths: np.ndarray | Sequence[int]) -> list[bytes]:
    ends = np.cumsum(lengths).tolist()
    starts = [0, *ends[:-1]]
    return (
        [joined[a:b] for a, b in zip(starts, ends, strict=True)] if ends else []
    )
