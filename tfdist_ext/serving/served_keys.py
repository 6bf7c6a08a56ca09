# SPDX-License-Identifier: Apache-2.0
"""The keys of a vocabulary that grows, as a stock hash table holds them."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist_ext.collectives import any_dtype
from tfdist_ext.collectives.collectives import Collectives
from tfdist_ext.embedding import rows_of_keys
from tfdist_ext.serving import key_hashes
from tfdist_ext.serving.known_keys import KeyChanges
from tfdist_ext.serving.known_keys import KnownKeys
from tfdist_ext.sharding.key_shard import KeyShard

# A word beside a key, or the second one of a fingerprint: never negative.
_EMPTY, _DELETED = [0, -1], [0, -2]
_LEAST_BUCKETS = 16
# Keys of the table for one that may be removed before it is made anew.
_KEYS_PER_REMOVED = 16
# Keys that are put into the hash table at once.
_BLOCK = 1 << 20


class ServedKeys(tf.Module):
    """Which keys have which rows, at the time of `fill`.

    Args:
        keys: of the training, this rank's.
        table_name: of the table.

    Attributes:
        table_name: of the table.
        table: hash table from two words, int64, to a row. A key of one word
            has a zero beside it, a string its fingerprint.
        full: variable `[buckets]`, whether a bucket has no row left; None
            where keys that are not known do not depend on that.
        hash_key: variable int64 `[2]`, which says in which bucket a key is;
            None where `full` is.
        words: of a key of training.
        texts: variable string `[rows]`, of the keys, by row of the table; None
            where they are not kept.
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
        remembered = config.min_count > 1  # also without a row
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
        # In a function, so that TensorFlow does not save it as well.
        self._source = lambda: keys

    def _new_table(self) -> tf.lookup.experimental.DenseHashTable:
        # By its name, which a session needs to find again what it restored.
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
        # As in training, such a key has the shared row where none is left.
        full = tf.gather(self.full, self._bucket_of(words))
        return tf.where((rows < 0) & full, tf.zeros_like(rows), rows)

    def _bucket_of(self, words: tf.Tensor) -> tf.Tensor:
        """What `BucketOf` is in custom_ops/vocabulary/key_table.h."""
        words = tf.bitcast(words, tf.uint64)
        key = tf.bitcast(self.hash_key, tf.uint64)
        hashed = tf.cond(
            tf.reduce_all(tf.equal(key, 0)),
            lambda: key_hashes.without_secret(words),
            lambda: key_hashes.sip_hash(words, key),
        )
        # The upper 32 bits decide: there are no more buckets than that.
        upper = tf.bitwise.right_shift(hashed, tf.constant(32, tf.uint64))
        buckets = tf.size(self.full, tf.int64)
        return tf.cast(upper, tf.int64) * buckets // (1 << 32)

    def known(self) -> KnownKeys:
        """The keys of this rank that there are now."""
        return KnownKeys.of(self._source())

    def changes(
        self,
        now: KnownKeys,
        before: KnownKeys | None,
        collectives: Collectives | None,
    ) -> KeyChanges:
        """What all ranks' keys are others, on rank 0; all ranks call.

        `full` becomes what it is to be.

        Args:
            now: of this rank.
            before: what the hash table has of them, None for nothing.
            collectives: of the strategy, None in one process.
        """
        label = self._source().name
        if self.full is not None:
            full = tf.constant(now.full)
            if collectives is not None:
                full = any_dtype.all_gather(collectives, full, f"{label}/full")
                full = full[0]
            self.full.assign(full)
            assert self.hash_key is not None
            self.hash_key.assign(now.hash_key)
        found = now.changes(before)
        texts = self._source().texts
        if texts is not None:
            found = found.with_texts(texts.own(now.buckets))
        return found.to_first_rank(collectives, label)

    def fill(self, collectives: Collectives | None) -> None:
        """Puts in the keys that there are now, on rank 0; all ranks call.

        Args:
            collectives: of the strategy, None in one process.
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
        """Gives keys int64 `[n, words]`, of which none is there, rows `[n]`.

        Args:
            keys: of training.
            rows: int64 of the table.
            texts: string `[n]`; anything where they are not kept.
        """
        if self.texts is not None:
            texts = tf.where(rows > 0, texts, "")  # row 0 is no key's
            texts = self.texts.scatter_update(tf.IndexedSlices(texts, rows))
        with tf.control_dependencies([texts]):
            return self.table.insert(_pairs(keys), rows)

    def remove(self, keys: tf.Tensor) -> tf.Operation:
        """Takes away keys int64 `[n, words]`, which are there."""
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
        """Makes the hash table anew if many keys have been removed.

        It marks where one was, and finds nothing any more when every place has
        a key or a mark. What is looked up meanwhile is found in the old one.
        """
        few = self.table.size() // _KEYS_PER_REMOVED
        return tf.cond(
            self._removed.read_value() > few, self._clean, lambda: False
        )

    def _clean(self) -> tf.Tensor:
        keys, rows = _contents(self.table)
        rows = tf.reshape(rows, [-1])
        live = tf.where(keys[:, 1] >= 0)[:, 0]
        # Another table, as large, puts them where this one looks for them.
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
        # Not a constant: a table writes into what it has taken.
        keys = tf.tile(tf.constant([_EMPTY], tf.int64), [buckets, 1])
        return _take(self._spare, keys, tf.zeros_like(keys[:, :1]))

    def release(self) -> None:
        """Gives the memory of the hash table back; nothing else would."""
        for table in (self.table, self._spare):
            tf.raw_ops.DestroyResourceOp(
                resource=table.resource_handle, ignore_lookup_error=True
            )


def _pairs(keys: tf.Tensor) -> tf.Tensor:
    return tf.pad(keys, [[0, 0], [0, 2 - keys.shape[1]]])


def _contents(table: tf.lookup.experimental.DenseHashTable) -> Any:
    """Keys `[buckets, 2]` and rows `[buckets, 1]`, as they lie in a table."""
    return tf.raw_ops.LookupTableExportV2(
        table_handle=table.resource_handle, Tkeys=tf.int64, Tvalues=tf.int64
    )


def _take(
    table: tf.lookup.experimental.DenseHashTable,
    keys: tf.Tensor,
    rows: tf.Tensor,
) -> tf.Operation:
    # Whose shape function knows no keys of two words.
    keys = tf.raw_ops.PlaceholderWithDefault(input=keys, shape=None)
    return tf.raw_ops.LookupTableImportV2(
        table_handle=table.resource_handle, keys=keys, values=rows
    )
