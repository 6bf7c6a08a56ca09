# SPDX-License-Identifier: Apache-2.0
"""Keys of a served model, which come and go for months."""

import numpy as np
import tensorflow as tf

from tfdist_ext.embedding.key_shard import KeyShard
from tfdist_ext.saving.served_keys import KnownKeys
from tfdist_ext.saving.served_keys import ServedKeys
from tfdist_ext.tables.placement import ShardSpec
from tfdist_ext.tables.placement import TablePlacement
from tfdist_ext.tables.table_config import DynamicVocabulary


def keys_of(first, end):
    return np.arange(first, end)[:, np.newaxis]


def served():
    config = DynamicVocabulary(1000)
    zeros = tf.keras.initializers.Zeros()
    placement = TablePlacement.data_parallel()
    spec = ShardSpec.of("t", config.rows, 4, placement, 0, 1)
    return ServedKeys(KeyShard(spec, config, zeros, None), "t")


def insert(keys, first, end):
    """Keys whose rows are the same numbers."""
    rows = tf.range(first, end, dtype=tf.int64)
    keys.insert(rows[:, tf.newaxis], rows, tf.constant([], tf.string))


def test_a_hash_table_goes_on_when_all_its_keys_were_replaced_many_times():
    keys, count, part = served(), 300, 60
    clean = tf.function(keys.clean, autograph=False)
    insert(keys, 0, count)
    cleaned = 0
    for first in range(0, 60 * part, part):
        end = first + count
        keys.remove(tf.constant(keys_of(first, first + part)))
        insert(keys, end, end + part)
        cleaned += bool(clean())
        there = np.arange(first + part, end + part)
        np.testing.assert_array_equal(keys.rows_of(tf.constant(there)), there)
        # Places of keys that are gone must not be all that is left.
        missing = np.array([first, *range(-99, 0)])
        assert (keys.rows_of(tf.constant(missing)).numpy() == -1).all()
    assert cleaned == 60
    keys.remove(tf.constant(keys_of(-1, 0)))
    assert not clean()  # not for a few


def test_changes_are_those_of_keys_and_of_their_rows():
    def known(pairs, waiting=(), buckets=2):
        """Of keys by bucket and slot."""
        keys, live = np.zeros([2, 3, 1], np.int64), np.zeros([2, 3], bool)
        for key, place in pairs.items():
            keys[place], live[place] = key, True
        rest = np.array(waiting, np.int64).reshape(-1, 1)
        full, hash_key = np.zeros([2], bool), np.zeros([2], np.int64)
        return KnownKeys(keys, live, rest, full, 0, buckets, hash_key)

    before = known({5: (0, 0), 6: (0, 1), 7: (1, 0), 8: (1, 1)}, [9, 10])
    # One moves, one goes, another takes a place, one that waited has a row.
    now = known({5: (0, 0), 6: (0, 2), 7: (1, 0), 9: (1, 1)}, [10, 11])
    found = now.changes(before)
    assert sorted(found.removed[:, 0].tolist()) == [6, 8, 9]
    added = dict(zip(found.added[:, 0].tolist(), found.rows, strict=True))
    assert added == {6: 5, 9: 4, 11: 0}
    same = before.changes(before)
    assert not len(same.removed) and not len(same.added)
    # A checkpoint of other buckets: all places have changed.
    found = known({5: (0, 0)}, buckets=4).changes(before)
    assert sorted(found.removed[:, 0].tolist()) == [5, 6, 7, 8, 9, 10]
    assert found.added.tolist() == [[5]] and found.rows.tolist() == [1]
