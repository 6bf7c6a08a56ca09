# SPDX-License-Identifier: Apache-2.0
"""The keys that a served model is to know, and which are others than before."""

from __future__ import annotations

import dataclasses

import numpy as np
import tensorflow as tf

from tfdist_ext.collectives.collectives import Collectives
from tfdist_ext.sharding import key_texts
from tfdist_ext.sharding.key_shard import KeyShard
from tfdist_ext.sharding.key_texts import Texts


@dataclasses.dataclass(frozen=True)
class KeyChanges:
    """What brings a hash table of keys up to date.

    Attributes:
        removed: keys, int64 `[m, words]`.
        added: keys, int64 `[n, words]`; also those that are removed, if they
            are to have other rows.
        rows: of those that are added, int64 `[n]`.
        texts: of those that are added, None if they are not kept.
    """

    removed: np.ndarray
    added: np.ndarray
    rows: np.ndarray
    texts: list[bytes] | None = None

    def to_first_rank(
        self, collectives: Collectives | None, label: str
    ) -> KeyChanges:
        """Those of all ranks, on rank 0; none on others. All ranks call.

        Args:
            collectives: of the strategy, None in one process.
            label: names the exchange in errors.
        """
        if collectives is None:
            return self
        removed = _to_first_rank(self.removed, collectives, f"{label}/removed")
        both = np.column_stack([self.added, self.rows])
        both = _to_first_rank(both, collectives, f"{label}/added")
        texts = self.texts
        if texts is not None:
            splits = np.zeros([collectives.group.world_size], np.int64)
            splits[0] = len(texts)
            _, texts = key_texts.send(
                (self.rows, texts), splits, collectives, f"{label}/texts"
            )
        return KeyChanges(removed, both[:, :-1], both[:, -1], texts)

    def with_texts(self, texts: Texts) -> KeyChanges:
        """The same, with what is known of its rows' texts.

        Args:
            texts: with their rows, some of which may be others.
        """
        of_row = dict(zip(*texts, strict=True))
        found = [of_row.get(row, b"") for row in self.rows.tolist()]
        return dataclasses.replace(self, texts=found)


def _to_first_rank(
    mine: np.ndarray, collectives: Collectives, label: str
) -> np.ndarray:
    splits = np.zeros([collectives.group.world_size], np.int64)
    splits[0] = mine.size
    flat, _ = collectives.all_to_all(
        tf.constant(mine.reshape(-1), tf.int64), tf.constant(splits), label
    )
    found: np.ndarray = flat.numpy().reshape(-1, mine.shape[1])
    return found


def _without(keys: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Those keys `[n, words]` that are none of the others."""
    if not len(keys) or not len(others):
        return keys

    def whole(words: np.ndarray) -> np.ndarray:
        kind = [("", np.int64)] * words.shape[1]
        return np.ascontiguousarray(words).view(kind)[:, 0]

    return keys[~np.isin(whole(keys), whole(others))]


@dataclasses.dataclass(frozen=True)
class KnownKeys:
    """Those of the buckets that this rank owns, at one time.

    Attributes:
        keys: with rows, int64 `[buckets, slots, words]`.
        live: bool `[buckets, slots]`, where there is one.
        waiting: admitted without finding a row, int64 `[n, words]`.
        full: bool `[buckets]`, whether no row is left in a bucket.
        first: of these buckets.
        buckets: of all ranks.
        hash_key: int64 `[2]`, which says in which bucket a key is.
    """

    keys: np.ndarray
    live: np.ndarray
    waiting: np.ndarray
    full: np.ndarray
    first: int
    buckets: int
    hash_key: np.ndarray

    @classmethod
    def of(cls, shard: KeyShard) -> KnownKeys:
        """Those that there are now.

        Args:
            shard: this rank's.
        """
        config = shard.config
        buckets, hash_key, now, exported, *_ = shard.copy()
        arrays = [array.numpy() for array in exported]

        def seen(counts: np.ndarray, steps: np.ndarray) -> np.ndarray:
            live = counts > 0
            if config.steps_to_live is not None:
                live &= int(now) - steps <= config.steps_to_live
            return live

        keys, counts, steps, others, their_counts, their_steps = arrays
        waiting = seen(their_counts, their_steps)
        waiting &= their_counts >= config.min_count
        first, end = shard.slices.owned(buckets)
        limits = -(-(config.capacity - np.arange(first, end)) // buckets)
        return cls(
            keys,
            seen(counts, steps),
            others[waiting],
            (counts > 0).sum(1) == limits,
            first,
            buckets,
            hash_key.numpy(),
        )

    def changes(self, before: KnownKeys | None = None) -> KeyChanges:
        """What is to be done to a hash table.

        Args:
            before: what it has, None for nothing.
        """
        words = self.keys.shape[2]
        same = np.zeros_like(self.live)
        removed = known = np.zeros([0, words], np.int64)
        if before is not None:
            kept = np.zeros_like(before.live)
            # A checkpoint may have been restored that has other buckets.
            if (self.first, self.buckets) == (before.first, before.buckets):
                same = before.live & self.live
                same &= (before.keys == self.keys).all(-1)
                kept = same
            known = before.waiting
            removed = np.concatenate(
                [
                    before.keys[before.live & ~kept],
                    _without(known, self.waiting),
                ]
            )
        bucket, slot = np.nonzero(self.live & ~same)
        waiting = _without(self.waiting, known)
        added = np.concatenate([self.keys[bucket, slot], waiting])
        rows = 1 + slot * self.buckets + bucket + self.first
        rows = np.concatenate([rows, np.zeros([len(waiting)], np.int64)])
        return KeyChanges(removed, added, rows)
