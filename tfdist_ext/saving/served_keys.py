# SPDX-License-Identifier: Apache-2.0
"""Keys of a dynamic vocabulary in a served model."""

from __future__ import annotations

import dataclasses

import numpy as np
import tensorflow as tf

from tfdist_ext.comm import exchanges
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.embedding import key_texts
from tfdist_ext.embedding import rows_of_keys
from tfdist_ext.embedding.key_shard import KeyShard
from tfdist_ext.embedding.key_texts import Texts

_LENGTH_SHIFT = 56


def sip_hash(words: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
    """SipHash-1-3 of 64-bit words, uint64 `[n]`.

    Args:
        words: uint64 `[n, words]`.
        key: uint64 `[2]`.
    """
    a = key[0] ^ _number(0x736F6D6570736575)
    b = key[1] ^ _number(0x646F72616E646F6D)
    c = key[0] ^ _number(0x6C7967656E657261)
    d = key[1] ^ _number(0x7465646279746573)
    length = _number(8 * words.shape[1] << _LENGTH_SHIFT)
    for word in (*tf.unstack(words, axis=1), length):
        a, b, c, d = _round(a, b, c, d ^ word)
        a ^= word
    c ^= _number(0xFF)
    for _ in range(3):
        a, b, c, d = _round(a, b, c, d)
    return a ^ b ^ c ^ d


def without_secret(words: tf.Tensor) -> tf.Tensor:
    """The hash of dynamic vocabularies of earlier versions, uint64 `[n]`.

    Args:
        words: uint64 `[n, words]`.
    """
    x = words[:, 0]
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53, 1):
        x = (x ^ tf.bitwise.right_shift(x, _number(33))) * _number(factor)
    return x


def _round(
    a: tf.Tensor, b: tf.Tensor, c: tf.Tensor, d: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    a += b
    b = _rotated(b, 13) ^ a
    a = _rotated(a, 32)
    c += d
    d = _rotated(d, 16) ^ c
    a += d
    d = _rotated(d, 21) ^ a
    c += b
    b = _rotated(b, 17) ^ c
    return a, b, _rotated(c, 32), d


def _rotated(x: tf.Tensor, bits: int) -> tf.Tensor:
    upper = tf.bitwise.left_shift(x, _number(bits))
    return upper | tf.bitwise.right_shift(x, _number(64 - bits))


def _number(value: int) -> tf.Tensor:
    return tf.constant(value, tf.uint64)


@dataclasses.dataclass(frozen=True)
class KeyChanges:
    """Updates of a hash table of keys.

    Attributes:
        removed: keys to remove, int64 `[m, words]`.
        added: keys to add, int64 `[n, words]`; a removed key is also here if it
            gets another row.
        rows: rows of the added keys, int64 `[n]`.
        texts: texts of the added keys, None if they are not stored.
    """

    removed: np.ndarray
    added: np.ndarray
    rows: np.ndarray
    texts: list[bytes] | None = None

    def to_first_rank(
        self, collectives: Collectives | None, label: str
    ) -> KeyChanges:
        """Updates of all ranks, on rank 0, empty on others; all ranks call.

        Args:
            collectives: collectives of the strategy, None in one process.
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
        """The same updates, with the texts of their rows as far as known.

        Args:
            texts: texts with their rows, some of which may be of other keys.
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
    """The keys `[n, words]` that are not among the others."""
    if not len(keys) or not len(others):
        return keys

    def whole(words: np.ndarray) -> np.ndarray:
        kind = [("", np.int64)] * words.shape[1]
        return np.ascontiguousarray(words).view(kind)[:, 0]

    return keys[~np.isin(whole(keys), whole(others))]


@dataclasses.dataclass(frozen=True)
class KnownKeys:
    """The keys in the buckets that this rank owns, at one time.

    Attributes:
        keys: keys with rows, int64 `[buckets, slots, words]`.
        live: bool `[buckets, slots]`, whether a slot has a key.
        waiting: admitted keys without a row, int64 `[n, words]`.
        full: bool `[buckets]`, whether a bucket has no free row.
        first: number of the first of these buckets.
        buckets: number of buckets of all ranks.
        hash_key: int64 `[2]`, key of the hash that assigns keys to buckets.
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
        """The current keys.

        Args:
            shard: key shard of this rank.
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
        """The updates that bring a hash table to these keys.

        Args:
            before: keys in the hash table, None if it is empty.
        """
        words = self.keys.shape[2]
        same = np.zeros_like(self.live)
        removed = known = np.zeros([0, words], np.int64)
        if before is not None:
            kept = np.zeros_like(before.live)
            # A restored checkpoint may have other buckets.
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


# Markers for free and removed places. The second word of a real entry, 0 for a
# key of one word or a part of a fingerprint, is never negative.
_EMPTY, _DELETED = [0, -1], [0, -2]
_LEAST_BUCKETS = 16
# The hash table is rebuilt when more than one key per so many keys has been
# removed.
_KEYS_PER_REMOVED = 16
# Keys that are inserted into the hash table at a time.
_BLOCK = 1 << 20


class ServedKeys(tf.Module):
    """The rows of keys at the time of `fill`.

    Args:
        keys: key shard of this rank, of the trained model.
        table_name: name of the table.

    Attributes:
        table_name: name of the table.
        table: hash table from two int64 words to a row. A key of one word is
            followed by a zero; a string is represented by its fingerprint.
        full: variable `[buckets]`, whether a bucket has no free row; None if
            the row of an unknown key does not depend on that.
        hash_key: variable int64 `[2]`, key of the hash that assigns keys to
            buckets; None if `full` is.
        words: words of a key in training.
        texts: string variable `[rows]` with the texts of keys, by row; None if
            they are not stored.
    """

    def __init__(self, keys: KeyShard, table_name: str) -> None:
        super().__init__()
        self.table_name = table_name
        config = keys.config
        self.words = 2 if config.key_dtype == "string" else 1
        self._default = 0 if config.unadmitted == "shared_row" else -1
        self.table, self._spare = self._new_table(), self._new_table()
        self._removed = tf.Variable(0, trainable=False, dtype=tf.int64)
        self.full = self.hash_key = None
        remembered = config.min_count > 1  # keys without a row too
        if self._default and config.full == "shared_row" and not remembered:
            self.full = tf.Variable(
                tf.zeros([0], tf.bool), trainable=False, shape=[None]
            )
            self.hash_key = tf.Variable(
                tf.zeros([2], tf.int64), trainable=False
            )
        self.texts = None
        if config.keep_text:
            self.texts = tf.Variable(
                tf.zeros([0], tf.string), trainable=False, shape=[None]
            )
        # It is a function, so that TensorFlow does not save the keys too.
        self._source = lambda: keys

    def _new_table(self) -> tf.lookup.experimental.DenseHashTable:
        # It is found by its name; a session needs that to find the restored
        # table.
        return tf.lookup.experimental.DenseHashTable(
            tf.int64,
            tf.int64,
            default_value=self._default,
            empty_key=_EMPTY,
            deleted_key=_DELETED,
            initial_num_buckets=_LEAST_BUCKETS,
        )

    def rows_of(self, keys: tf.Tensor) -> tf.Tensor:
        """Rows int64 `[n]` of keys `[n]`, -1 for none."""
        words = rows_of_keys.as_numbers(keys)
        if words.shape.rank == 1:
            words = words[:, tf.newaxis]
        rows = self.table.lookup(_pairs(words))
        if self.full is None:
            return rows
        # As in training, a key has the shared row if its bucket is full.
        full = tf.gather(self.full, self._bucket_of(words))
        return tf.where((rows < 0) & full, tf.zeros_like(rows), rows)

    def _bucket_of(self, words: tf.Tensor) -> tf.Tensor:
        """Implements `BucketOf` of custom_ops/vocabulary/key_table.h."""
        words = tf.bitcast(words, tf.uint64)
        key = tf.bitcast(self.hash_key, tf.uint64)
        hashed = tf.cond(
            tf.reduce_all(tf.equal(key, 0)),
            lambda: without_secret(words),
            lambda: sip_hash(words, key),
        )
        # The upper 32 bits are enough, as there are fewer buckets than 2^32.
        upper = tf.bitwise.right_shift(hashed, tf.constant(32, tf.uint64))
        buckets = tf.size(self.full, tf.int64)
        return tf.cast(upper, tf.int64) * buckets // (1 << 32)

    def known(self) -> KnownKeys:
        """The current keys of this rank."""
        return KnownKeys.of(self._source())

    def changes(
        self,
        now: KnownKeys,
        before: KnownKeys | None,
        collectives: Collectives | None,
    ) -> KeyChanges:
        """Updates from the keys of all ranks, on rank 0; all ranks call.

        Also updates `full` and `hash_key`.

        Args:
            now: current keys of this rank.
            before: keys of this rank in the hash table, None if it is empty.
            collectives: collectives of the strategy, None in one process.
        """
        label = self._source().name
        if self.full is not None:
            full = tf.constant(now.full)
            if collectives is not None:
                full = exchanges.all_gather(collectives, full, f"{label}/full")
                full = self._source().slices.in_order(full[0].numpy())
            self.full.assign(full)
            assert self.hash_key is not None
            self.hash_key.assign(now.hash_key)
        found = now.changes(before)
        texts = self._source().texts
        if texts is not None:
            found = found.with_texts(texts.own(now.buckets))
        return found.to_first_rank(collectives, label)

    def fill(self, collectives: Collectives | None) -> None:
        """Inserts the current keys on rank 0; all ranks call.

        Args:
            collectives: collectives of the strategy, None in one process.
        """
        found = self.changes(self.known(), None, collectives)
        if self.texts is not None:
            self.texts.assign(tf.fill([self._source().config.rows], ""))
        for first in range(0, len(found.rows), _BLOCK):
            part = slice(first, first + _BLOCK)
            texts = [] if found.texts is None else found.texts[part]
            self.insert(
                tf.constant(found.added[part]),
                tf.constant(found.rows[part]),
                tf.constant(texts, tf.string, [len(texts)]),
            )

    def insert(
        self, keys: tf.Tensor, rows: tf.Tensor, texts: tf.Tensor
    ) -> tf.Operation:
        """Inserts keys int64 `[n, words]`, which must be new.

        Args:
            keys: keys as in training.
            rows: int64 `[n]`, rows of the table.
            texts: string `[n]`; ignored if texts are not stored.
        """
        if self.texts is not None:
            texts = tf.where(rows > 0, texts, "")  # row 0 is of no key
            texts = self.texts.scatter_update(tf.IndexedSlices(texts, rows))
        with tf.control_dependencies([texts]):
            return self.table.insert(_pairs(keys), rows)

    def remove(self, keys: tf.Tensor) -> tf.Operation:
        """Removes keys int64 `[n, words]`, which must be in the table."""
        pairs, gone = _pairs(keys), []
        if self.texts is not None:
            rows = self.table.lookup(pairs)
            none = tf.IndexedSlices(tf.fill(tf.shape(rows), ""), rows)
            gone = [self.texts.scatter_update(none)]
        with tf.control_dependencies(gone):
            removed = self.table.remove(pairs)
        with tf.control_dependencies([removed]):
            return self._removed.assign_add(tf.shape(keys, tf.int64)[0])

    def clean(self) -> tf.Tensor:
        """Rebuilds the hash table if many keys have been removed.

        A removed key leaves a marker. When every place has a key or a marker,
        lookups find nothing. Lookups during a rebuild use the old table.
        """
        few = self.table.size() // _KEYS_PER_REMOVED
        return tf.cond(
            self._removed.read_value() > few, self._clean, lambda: False
        )

    def _clean(self) -> tf.Tensor:
        keys, rows = _contents(self.table)
        rows = tf.reshape(rows, [-1])
        live = tf.where(keys[:, 1] >= 0)[:, 0]
        # Another table of the same size puts the keys where this one looks for
        # them.
        with tf.control_dependencies([self._empty_spare(tf.shape(keys)[0])]):
            inserted = self._spare.insert(
                tf.gather(keys, live), tf.gather(rows, live)
            )
        with tf.control_dependencies([inserted]):
            taken = _take(self.table, *_contents(self._spare))
        with tf.control_dependencies([taken]):
            smallest = tf.minimum(tf.shape(keys)[0], _LEAST_BUCKETS)
            emptied = self._empty_spare(smallest)
        with tf.control_dependencies([emptied, self._removed.assign(0)]):
            return tf.constant(True)

    def _empty_spare(self, buckets: tf.Tensor) -> tf.Operation:
        # It must not be a constant: a table writes into the tensor it imports.
        keys = tf.tile(tf.constant([_EMPTY], tf.int64), [buckets, 1])
        return _take(self._spare, keys, tf.zeros_like(keys[:, :1]))

    def release(self) -> None:
        """Frees the memory of the hash tables, which nothing else does."""
        for table in (self.table, self._spare):
            tf.raw_ops.DestroyResourceOp(
                resource=table.resource_handle, ignore_lookup_error=True
            )


def _pairs(keys: tf.Tensor) -> tf.Tensor:
    return tf.pad(keys, [[0, 0], [0, 2 - keys.shape[1]]])


def _contents(
    table: tf.lookup.experimental.DenseHashTable,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Keys `[buckets, 2]` and rows `[buckets, 1]`, by place in a table."""
    return tf.raw_ops.LookupTableExportV2(
        table_handle=table.resource_handle, Tkeys=tf.int64, Tvalues=tf.int64
    )


def _take(
    table: tf.lookup.experimental.DenseHashTable,
    keys: tf.Tensor,
    rows: tf.Tensor,
) -> tf.Operation:
    # The op's shape function does not support keys of two words.
    keys = tf.raw_ops.PlaceholderWithDefault(input=keys, shape=None)
    return tf.raw_ops.LookupTableImportV2(
        table_handle=table.resource_handle, keys=keys, values=rows
    )
