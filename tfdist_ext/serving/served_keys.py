# SPDX-License-Identifier: Apache-2.0
"""The keys of a vocabulary that grows, as a stock hash table holds them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from tfdist_ext.embedding import rows_of_keys
from tfdist_ext.sharding.key_shard import KeyShard

# A word beside a key, or the second one of a fingerprint: never negative.
_EMPTY, _DELETED = [0, -1], [0, -2]
# Keys that are put into the hash table at once.
_BLOCK = 1 << 20


class ServedKeys(tf.Module):
    """Which keys have which rows, at the time of `fill`.

    Attributes:
        table: hash table from two words, int64, to a row. A key of one word
            has a zero beside it, a string its fingerprint.
        full: variable `[buckets]`, whether a bucket has no row left; None
            where keys that are not known do not depend on that.
    """

    def __init__(self, keys: KeyShard) -> None:
        super().__init__()
        config = keys.config
        self._default = 0 if config.unadmitted == "shared_row" else -1
        # By its name, which a session needs to find again what it restored.
        self.table = tf.lookup.experimental.DenseHashTable(
            tf.int64,
            tf.int64,
            default_value=self._default,
            empty_key=_EMPTY,
            deleted_key=_DELETED,
            initial_num_buckets=16,
        )
        self.full = None
        remembered = config.min_count > 1  # also without a row
        if self._default and config.full == "shared_row" and not remembered:
            self.full = tf.Variable(
                tf.zeros([0], tf.bool), trainable=False, shape=[None]
            )
        # In a function, so that TensorFlow does not save it as well.
        self._source = lambda: keys

    def rows_of(self, keys: tf.Tensor) -> tf.Tensor:
        """Rows int64 `[n]` of keys `[n]`, -1 for none."""
        words = rows_of_keys.as_numbers(keys)
        pairs = words
        if words.shape.rank == 1:
            pairs = tf.stack([words, tf.zeros_like(words)], 1)
        rows = self.table.lookup(pairs)
        if self.full is None:
            return rows
        # As in training, such a key has the shared row where none is left.
        full = tf.gather(self.full, self._bucket_of(pairs[:, 0]))
        return tf.where((rows < 0) & full, tf.zeros_like(rows), rows)

    def _bucket_of(self, words: tf.Tensor) -> tf.Tensor:
        """What `BucketOf` is in custom_ops/vocabulary/key_table.h."""

        def mixed(x: tf.Tensor, factor: int) -> tf.Tensor:
            shifted = tf.bitwise.right_shift(x, tf.constant(33, tf.uint64))
            return tf.bitwise.bitwise_xor(x, shifted) * tf.constant(
                factor, tf.uint64
            )

        hashed = mixed(tf.bitcast(words, tf.uint64), 0xFF51AFD7ED558CCD)
        hashed = mixed(mixed(hashed, 0xC4CEB9FE1A85EC53), 1)
        # The upper 32 bits decide: there are no more buckets than that.
        upper = tf.bitwise.right_shift(hashed, tf.constant(32, tf.uint64))
        buckets = tf.size(self.full, tf.int64)
        return tf.cast(upper, tf.int64) * buckets // (1 << 32)

    def fill(self, writes: bool) -> None:
        """Puts in the keys that there are now; all ranks call.

        Args:
            writes: whether this rank needs them.
        """
        arrays = self._source().gathered()
        if not writes:
            return
        config = self._source().config
        keys, rows, used = _known(arrays, config.steps_to_live)
        if config.min_count > 1:
            others = {
                name.removeprefix("candidate_"): array
                for name, array in arrays.items()
                if name.startswith("candidate_")
            }
            others["step"] = arrays["step"]
            # Admitted, but there was no row for them.
            others["counts"] = np.where(
                others["counts"] >= config.min_count, others["counts"], 0
            )
            more, _, _ = _known(others, config.steps_to_live)
            keys = np.concatenate([keys, more])
            rows = np.concatenate([rows, np.zeros([len(more)], np.int64)])
        for first in range(0, len(keys), _BLOCK):
            part = slice(first, first + _BLOCK)
            self.table.insert(tf.constant(keys[part]), tf.constant(rows[part]))
        if self.full is not None:
            buckets = len(used)
            limits = -(-(config.capacity - np.arange(buckets)) // buckets)
            self.full.assign(used == limits)

    def release(self) -> None:
        """Gives the memory of the hash table back; nothing else would."""
        tf.raw_ops.DestroyResourceOp(
            resource=self.table.resource_handle, ignore_lookup_error=True
        )


def _known(
    arrays: Mapping[str, np.ndarray], steps_to_live: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keys `[n, 2]` that have not expired, their rows, and slots in use."""
    counts, buckets = arrays["counts"], len(arrays["counts"])
    now = arrays["step"].max()
    live = counts > 0
    used = live.sum(1)
    if steps_to_live is not None:
        live &= now - arrays["steps"] <= steps_to_live
    bucket, slot = np.nonzero(live)
    words = arrays["keys"][bucket, slot]
    pairs = np.zeros([len(words), 2], np.int64)
    pairs[:, : words.shape[1]] = words
    return pairs, 1 + slot * buckets + bucket, used
