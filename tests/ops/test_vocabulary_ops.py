# SPDX-License-Identifier: Apache-2.0
"""Vocabularies that grow, against their rules in plain Python.

All ranks of a world are in this process: each asks, messages are carried, each
answers.
"""

import time

import numpy as np
import pytest
import tensorflow as tf

from tests.reference.vocabulary import HASH_KEY
from tests.reference.vocabulary import Full
from tests.reference.vocabulary import Vocabulary
from tests.reference.vocabulary import hash_of
from tfdist_ext.ops import vocabulary_ops
from tfdist_ext.ops.library import library
from tfdist_ext.tables.table_config import DynamicVocabulary

RULES = {
    "plain": {},
    "counted": {"min_count": 3, "unadmitted": "shared_row"},
    "least_recent": {"evict": "lru"},
    "least_often": {"evict": "lfu", "min_count": 2, "full": "shared_row"},
    "short_lived": {"steps_to_live": 3, "full": "shared_row"},
    "everything": {
        "evict": "lru",
        "min_count": 2,
        "steps_to_live": 4,
        "full": "shared_row",
    },
    "strings": {"evict": "lfu", "key_dtype": "string"},
}
# Where to be full is an error, and not what is tried.
CAPACITY = {"plain": 200, "counted": 600, "strings": 240, "least_recent": 240}


class InFourBuckets(DynamicVocabulary):
    """Of few keys all the same, so that the tests are short."""

    buckets = 4


def config_of(rule):
    return InFourBuckets(CAPACITY.get(rule, 60), **RULES[rule])


class World:
    """The ranks of a world, each with its part of a vocabulary."""

    def __init__(self, config, world_size, hash_key=HASH_KEY, first_rank=0):
        self.hash_key = tf.constant(hash_key, tf.int64)
        self.handles = [
            vocabulary_ops.vocabulary(
                "t", config, self.hash_key, rank, world_size, first_rank
            )
            for rank in range(world_size)
        ]
        self.resets = []

    def exchange(self, messages):
        """What every rank gets of the messages (payload, splits) of all."""
        pieces = [
            np.split(payload.numpy(), np.cumsum(splits)[:-1])
            for payload, splits in messages
        ]
        for rank in range(len(messages)):
            mine = [each[rank] for each in pieces]
            yield (
                tf.constant(np.concatenate(mine)),
                tf.constant([len(piece) for piece in mine], tf.int64),
            )

    def rows(self, keys, learn=True, advance=True):
        """The rows of keys, of which every rank has a part."""
        parts = np.array_split(keys, len(self.handles))
        asked = [
            vocabulary_ops.ask_keys([handle], [tf.constant(part)], [0])
            for handle, part in zip(self.handles, parts, strict=True)
        ]
        answers = [
            vocabulary_ops.answer_keys(
                [handle], *message, learn=learn, advance=advance
            )
            for handle, message in zip(
                self.handles,
                self.exchange([each[:2] for each in asked]),
                strict=True,
            )
        ]
        found = []
        for handle, message, (_, _, *places), part in zip(
            self.handles, self.exchange(answers), asked, parts, strict=True
        ):
            (rows,), (resets,) = vocabulary_ops.read_rows(
                [handle], [tf.constant(part)], [0], *message, *places
            )
            found.append(rows.numpy())
            self.resets = sorted(resets.numpy())
            taken = vocabulary_ops.take_resets(handle)
            assert sorted(taken.numpy()) == self.resets
        return np.concatenate(found)

    def export(self):
        parts = [vocabulary_ops.export_keys(h) for h in self.handles]
        return [np.concatenate(each) for each in zip(*parts, strict=True)]

    def totals(self):
        return sum(
            vocabulary_ops.vocabulary_counts(h).numpy()[:5]
            for h in self.handles
        )

    def import_(self, arrays, step, hash_key=HASH_KEY):
        buckets, size = len(arrays[0]), len(self.handles)
        for rank, handle in enumerate(self.handles):
            own = slice(rank * buckets // size, (rank + 1) * buckets // size)
            part = [tf.constant(array[own]) for array in arrays]
            key = tf.constant(hash_key, tf.int64)
            vocabulary_ops.import_keys(handle, buckets, key, step, part)
            counts = vocabulary_ops.vocabulary_counts(handle)
            np.testing.assert_array_equal(counts[7:], key)


def batches(seed, distinct, steps, size=200, words=1):
    """Keys in which new ones and old ones come, of all 64 bits."""
    generator = np.random.default_rng(seed)
    known = generator.integers(-(2**63), 2**63, [distinct, words])
    known[:3, 0] = [0, -1, -(2**63)]
    known = known[:, 0] if words == 1 else known
    for step in range(steps):
        places = generator.zipf(1.3, size) + step * distinct // (3 * steps)
        yield known[places % distinct]


@pytest.mark.parametrize("rule", RULES)
def test_ranks_hand_out_the_rows_of_one_process(rule):
    words = 2 if rule == "strings" else 1
    config = config_of(rule)
    distinct = config.capacity // 2 if rule == "plain" else 300
    expected = Vocabulary(config)
    worlds = [World(config, size) for size in (1, 2, 3)]
    worlds.append(World(config, 3, first_rank=2))
    for step, keys in enumerate(batches(1, distinct, 40, words=words)):
        advance = step % 5 > 0  # a second lookup of the step
        wanted = expected.learn(keys, advance)
        for world in worlds:
            np.testing.assert_array_equal(
                world.rows(keys, advance=advance), wanted
            )
            assert world.resets == sorted(expected.resets)
    other = next(batches(2, distinct, 1, words=words))
    unknown = np.concatenate([keys, other])
    for world in worlds:
        np.testing.assert_array_equal(
            world.rows(unknown, learn=False), expected.find(unknown)
        )
        rows, _, admitted, evicted, expired = world.totals()
        assert rows == len(expected.rows())
        assert admitted == expected.totals["admitted"] > 0
        assert evicted == expected.totals["evicted"]
        assert expired == expected.totals["expired"]
    assert bool(config.evict) == (expected.totals["evicted"] > 0)


def test_one_rank_needs_no_messages():
    config = config_of("everything")
    world, handle = World(config, 1), World(config, 1).handles[0]
    for keys in batches(3, 300, 20):
        rows, (resets,) = vocabulary_ops.local_rows(
            [handle],
            [tf.constant(keys[:50]), tf.constant(keys[50:])],
            [0, 0],
            learn=True,
            advance=True,
        )
        np.testing.assert_array_equal(tf.concat(rows, 0), world.rows(keys))
        assert sorted(resets.numpy()) == world.resets


@pytest.mark.parametrize("rule", ["everything", "strings"])
def test_keys_are_restored_at_another_world_size_and_go_on_alike(rule):
    words = 2 if rule == "strings" else 1
    config = config_of(rule)
    old, new = World(config, 3), World(config, 2, hash_key=(1, 2))
    first, *rest = np.array_split(list(batches(4, 300, 30, words=words)), [15])
    for keys in first:
        old.rows(keys)
    arrays = old.export()
    new.import_(arrays, step=len(first))
    for exported, again in zip(arrays, new.export(), strict=True):
        np.testing.assert_array_equal(exported, again)
    for keys in rest[0]:
        np.testing.assert_array_equal(old.rows(keys), new.rows(keys))
        assert old.resets == new.resets


def test_a_larger_vocabulary_keeps_the_rows_and_a_smaller_one_refuses():
    keys = np.arange(40)
    world = World(DynamicVocabulary(40), 2)
    rows = world.rows(keys)
    larger = World(InFourBuckets(9000), 3)  # keeps the one that was saved
    larger.import_(world.export(), step=1)
    np.testing.assert_array_equal(larger.rows(keys), rows)
    more = larger.rows(np.arange(5000))
    assert len(set(more)) == 5000 and more.max() == 5000
    four = World(InFourBuckets(40_000), 2)  # a new one has one bucket
    rows = four.rows(np.arange(1000))
    again = World(DynamicVocabulary(40_000), 3)
    again.import_(four.export(), step=1)
    np.testing.assert_array_equal(again.rows(np.arange(1000)), rows)
    with pytest.raises(tf.errors.InvalidArgumentError, match="capacity of 39"):
        World(DynamicVocabulary(39), 1).import_(world.export(), step=1)


def test_many_keys_of_a_list_are_made_unique_too():
    keys = np.arange(70_000) * 3 % 66_000  # more than 16 bits number
    rows = World(DynamicVocabulary(80_000), 1).rows(keys)
    assert len(set(rows)) == 22_000 and rows.min() > 0
    np.testing.assert_array_equal(rows[22_000:], rows[: 70_000 - 22_000])


@pytest.mark.parametrize("words", [1, 2])
@pytest.mark.parametrize("count", [1, 63, 64, 65, 128, 193])
def test_lists_of_any_length_get_the_rows_of_their_keys(count, words):
    rules = {"key_dtype": "string"} if words == 2 else {}
    config = InFourBuckets(800, **rules)
    keys = np.random.default_rng(6).integers(0, 2**63, [count, words])
    keys = keys[:, 0] if words == 1 else keys
    for hash_key in (HASH_KEY, (0, 0)):
        expected = Vocabulary(config, hash_key).learn(keys)
        for size in (1, 2):
            world = World(config, size, hash_key=hash_key)
            np.testing.assert_array_equal(world.rows(keys), expected)


@pytest.mark.parametrize("words", [1, 2])
def test_ids_in_regular_distances_are_made_unique_as_fast(words):
    def seconds(ids):
        keys = ids if words == 1 else np.column_stack([ids, ids[::-1]])
        times = []
        for _ in range(5):
            start = time.process_time()
            _, _, positions, *_ = vocabulary_ops.ask_keys(
                world.handles, [tf.constant(keys)], [0]
            )
            times.append(time.process_time() - start)
            assert len(set(positions.numpy())) == len(keys)
        return min(times)

    rules = {"key_dtype": "string"} if words == 2 else {}
    world = World(DynamicVocabulary(100_000, **rules), 1)
    numbers = np.arange(60_000)
    random = np.random.default_rng(7).permutation(2**20)[:60_000] << 40
    # If all keys shared a place, it would take 1000 times as long.
    most = 20 * seconds(random) + 0.05
    for ids in (numbers, numbers << 16, numbers << 32, numbers << 47):
        assert seconds(ids) < most


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("words", 3),
        ("capacity", 2**31),
        ("buckets", 6),
        ("rank", 2),
        ("first_rank", 2),
        ("min_count", 2**32),
    ],
)
def test_the_error_of_a_wrong_attribute_prints_its_value(name, value):
    attributes = {"capacity": 8, "buckets": 4, "world_size": 2, name: value}
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=f"Table 't': words must be.*Received:.* {name}={value}\\b",
    ):
        library().tfdist_vocabulary([1, 2], table="t", **attributes)


def test_a_full_vocabulary_ends_the_step_on_every_rank():
    config = DynamicVocabulary(10)
    keys = np.arange(11)
    with pytest.raises(Full):
        Vocabulary(config).learn(keys)
    with pytest.raises(
        tf.errors.FailedPreconditionError,
        match=r"Table 't': no row is left.*Bucket 0 of 1 is full.*"
        r"capacity of 10.*Rank 1 of 2 uses 10 of its 10 rows "
        r"\(100 %\).*shared_row",
    ):
        World(config, 2).rows(keys)


@pytest.mark.parametrize("capacity", [100_000, 131_072, 1_000_000])
def test_random_keys_fill_97_percent_of_a_vocabulary(capacity):
    keys = np.random.default_rng(5).integers(
        -(2**63), 2**63, capacity * 97 // 100
    )
    for secret in (1, 2, 3):
        world = World(DynamicVocabulary(capacity), 1, hash_key=(secret, 0))
        rows = world.rows(keys)
        assert len(set(rows)) == len(keys) and rows.min() > 0


def test_no_bucket_is_full_sooner_at_any_capacity():
    """Chernoff's bound, which docs/vocabularies.md explains."""
    fill = 0.97
    for power in range(10, 31):
        for capacity in (2**power - 2, 2**power, 3 * 2 ** (power - 1)):
            buckets = DynamicVocabulary(capacity).buckets
            least = capacity // buckets
            bound = buckets * np.exp(-least * (fill - 1 - np.log(fill)))
            assert buckets == 1 or bound < 1e-9


def test_keys_of_large_buckets_expire_every_few_steps():
    config = DynamicVocabulary(3 * 4096, steps_to_live=1)
    expected, world = Vocabulary(config), World(config, 2)
    expired = []
    for step in range(7):
        keys = np.arange(10) + 10 * step
        wanted = expected.learn(keys)
        np.testing.assert_array_equal(world.rows(keys), wanted)
        assert world.resets == sorted(expected.resets)
        expired.append(len(world.resets))
    assert expired == [0, 0, 10, 0, 0, 30, 0]  # a sweep each 3 steps


def test_the_hash_is_sip_hash():
    # What CPython 3.11 has for these bytes and a hash seed of that key.
    assert hash_of((0x0706050403020100,), HASH_KEY) == 0x369095118D299A8E
    both = 0x0706050403020100, 0x0F0E0D0C0B0A0908
    assert hash_of(both, HASH_KEY) == 0xCC4FDD1A7D908B66


def chosen_keys(count):
    """Keys that the hash without a secret puts into the first bucket."""
    keys = np.arange(count, dtype=np.uint64)
    shift = np.uint64(33)
    for factor in (0xC4CEB9FE1A85EC53, 0xFF51AFD7ED558CCD):
        keys ^= keys >> shift
        keys *= np.uint64(pow(factor, -1, 2**64))
    return (keys ^ keys >> shift).view(np.int64)


def test_nobody_can_choose_keys_of_one_bucket_or_rank():
    config = DynamicVocabulary(1_000_000)
    keys = chosen_keys(20_000)
    with pytest.raises(tf.errors.FailedPreconditionError, match="Bucket 0"):
        World(InFourBuckets(40_000), 1, hash_key=(0, 0)).rows(keys)
    # Nor fingerprints, of which one word is FarmHash, which anybody computes.
    texts = np.column_stack([np.ones_like(keys), keys])
    strings = DynamicVocabulary(1_000_000, key_dtype="string")
    for rules, asked in ((config, keys), (strings, texts)):
        world = World(rules, 4)
        rows = world.rows(asked)
        assert len(set(rows)) == len(keys) and rows.min() > 0
        of_bucket = np.bincount((rows - 1) % rules.buckets)
        assert of_bucket.max() < 2 * len(keys) / rules.buckets
        splits = vocabulary_ops.ask_keys(
            world.handles[:1], [tf.constant(asked)], [0]
        )[4]
        assert splits.numpy().min() > 0.9 * len(keys) / 4


def test_damaged_keys_are_refused():
    world = World(InFourBuckets(9000), 1)
    world.rows(np.arange(100))
    arrays = world.export()
    arrays[0] = arrays[0][::-1]
    arrays[1] = arrays[1][::-1]
    with pytest.raises(tf.errors.DataLossError, match=r"'t'.*are damaged"):
        world.import_(arrays, step=1)
    payload, *_ = vocabulary_ops.ask_keys(
        world.handles, [tf.range(5, dtype=tf.int64)], [0]
    )
    twice, *_ = vocabulary_ops.ask_keys(
        world.handles, [tf.constant([7, 7], tf.int64)], [0]
    )
    never = tf.tensor_scatter_nd_update(twice, [[len(twice) - 1]], [0])
    wrongs = payload[:-1], tf.concat([payload, payload], 0), twice[:-1], never
    for wrong in wrongs:
        with pytest.raises(
            tf.errors.DataLossError, match="from rank 0 is malformed"
        ):
            vocabulary_ops.answer_keys(
                world.handles, wrong, [len(wrong)], learn=True, advance=True
            )
