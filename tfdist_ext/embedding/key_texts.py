# SPDX-License-Identifier: Apache-2.0
"""Texts of keys, and the slices of saved keys that belong to a rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.ops import vocabulary_ops
from tfdist_ext.tables.table_config import DynamicVocabulary

# Names of saved arrays, in the order of `vocabulary_ops.export_keys`.
ROWS = ("keys", "counts", "steps")
CANDIDATES = tuple(f"candidate_{name}" for name in ROWS)
# Name of the saved step and hash key, which are equal for every bucket. Earlier
# versions saved only the step.
STEP = "step"


@dataclasses.dataclass(frozen=True)
class KeySlices:
    """The buckets of one rank among the buckets of all ranks.

    Attributes:
        config: the dynamic vocabulary.
        rank: the rank of this process.
        world_size: the number of ranks.
        first_rank: the rank that owns the first buckets.
    """

    config: DynamicVocabulary
    rank: int
    world_size: int
    first_rank: int = 0

    def owned(self, buckets: int) -> tuple[int, int]:
        """Returns this rank's first bucket, and the one after its last.

        Args:
            buckets: number of buckets of all ranks.
        """
        n = (self.rank - self.first_rank) % self.world_size
        size = self.world_size
        return n * buckets // size, (n + 1) * buckets // size

    def owners(self, bucket: np.ndarray, buckets: int) -> np.ndarray:
        """Returns the ranks that own buckets.

        Args:
            bucket: indices of buckets.
            buckets: number of buckets of all ranks.
        """
        n = ((bucket + 1) * self.world_size - 1) // buckets
        return (n + self.first_rank) % self.world_size

    def in_order(self, gathered: np.ndarray) -> np.ndarray:
        """Sorts an array `[buckets, ...]` by bucket.

        Args:
            gathered: the arrays of all ranks, concatenated in the order of
                ranks.
        """
        first, _ = dataclasses.replace(self, rank=0).owned(len(gathered))
        return np.roll(gathered, first, 0)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the saved arrays, without texts."""
        if self.config.min_count > 1:
            return (*ROWS, *CANDIDATES, STEP)
        return (*ROWS, STEP)

    def slots(self, buckets: int) -> int:
        """Returns the number of slots in every bucket.

        Args:
            buckets: number of buckets of all ranks.
        """
        return -(-self.config.capacity // buckets)

    def shapes(self, buckets: int) -> dict[str, tuple[int, ...]]:
        """Returns shapes of the saved arrays of all ranks, by name.

        Args:
            buckets: number of buckets of all ranks.
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
        """Returns this rank's slice of an array, in TensorFlow's format.

        A rank that owns no bucket reads one bucket, which it does not use.

        Args:
            shape: shape of the array of all ranks.
        """
        first, end = self.owned(shape[0])
        size = max(end - first, 1)
        first = min(first, shape[0] - 1)
        parts = [f"{first},{size}", *(f"0,{each}" for each in shape[1:])]
        return f"{' '.join(map(str, shape))} {':'.join(parts)}"


# Names of the saved arrays of texts: the length of every text in bytes, and the
# concatenated texts of every bucket.
LENGTHS, BYTES = "text_lengths", "texts"
# Rows of the table, in any order, and the texts of their keys.
Texts = tuple[np.ndarray, list[bytes]]


class KeyTexts:
    """The texts of keys that this rank stores.

    Args:
        table: the table's name.
        handle: the resource handle of its dynamic vocabulary.
        slices: the buckets of this rank.
        collectives: the strategy's collectives; None in one process.
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
        """Returns texts of keys that this rank owns; a joint call.

        Texts of other keys are sent to the owners first.

        Args:
            buckets: number of buckets of all ranks.
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
        # Deleted only after the exchange, so that an error loses no text.
        self.keep(got)
        vocabulary_ops.release_texts(
            self._handle, tf.constant(rows[theirs], tf.int32)
        )
        return self.all()

    def all(self) -> Texts:
        """Returns all texts that are stored on this rank."""
        rows, texts = vocabulary_ops.stored_texts(self._handle)
        return rows.numpy().astype(np.int64), texts.numpy().tolist()

    def keep(self, texts: Texts) -> None:
        """Stores texts of rows that do not have one yet.

        Args:
            texts: rows and their texts.
        """
        vocabulary_ops.store_texts(
            self._handle,
            tf.constant(texts[0], tf.int32),
            tf.constant(texts[1], tf.string, [len(texts[1])]),
        )

    def packed(
        self, buckets: int, slots: int, first: int, end: int
    ) -> dict[str, np.ndarray]:
        """Returns arrays to save, of texts this rank owns; a joint call.

        Args:
            buckets: number of buckets of all ranks.
            slots: number of slots of each bucket.
            first: this rank's first bucket.
            end: the bucket after this rank's last bucket.

        Returns:
            A dict of two arrays: lengths of the texts in bytes, int64
            `[own buckets, slots]`, and the concatenated texts of each bucket,
            padded, uint8 `[own buckets, n]`. n is equal on all ranks.
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
        self,
        saved: Mapping[str, np.ndarray],
        buckets: int,
        first: int,
        end: int,
    ) -> None:
        """Stores texts of this rank's buckets that `packed` returned.

        Args:
            saved: arrays by name; they may have fewer slots.
            buckets: number of buckets of all ranks.
            first: this rank's first bucket.
            end: the bucket after this rank's last bucket.
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
        """Returns the texts of all ranks on every rank; a joint call.

        Args:
            buckets: number of buckets of all ranks.
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
    """Sends texts to other ranks; a joint call of all ranks.

    Args:
        texts: rows and their texts, sorted by the receiving rank.
        splits: int64 `[world_size]`, the number of texts for each rank.
        collectives: the strategy's collectives.
        label: the name of the exchange in errors.

    Returns:
        The rows and texts that this rank has received.
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
