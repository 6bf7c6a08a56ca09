# SPDX-License-Identifier: Apache-2.0
"""Datasets are cut by sample and end at the same step on every rank."""

import itertools
import types

import numpy as np
import pytest
import tensorflow as tf

from tfdist_ext import batches
from tfdist_ext.strategy import input
from tfdist_ext.strategy.balance import Balance


class Together:
    """Collectives of one rank among others whose answers are given."""

    def __init__(self, rank, world_size, lengths=None, others_have_data=()):
        self.group = types.SimpleNamespace(rank=rank, world_size=world_size)
        self._lengths = lengths
        self._others = tf.constant([*others_have_data, *[0] * 1000])
        self._asked = tf.Variable(0)

    def all_gather(self, tensor, label):
        if label.endswith("/first batch"):
            return tf.tile(tensor, [self.group.world_size, 1])
        if label == "dataset":  # what ranks tell of it
            return tf.tile(tensor, [self.group.world_size])
        lengths = self._lengths or [int(tensor[0])] * self.group.world_size
        return tf.constant(lengths, tf.int64)

    def all_reduce(self, tensors, label, weighted=False):
        others = self._others[self._asked]
        self._asked.assign_add(1)
        return [tensors[0] + others]


def read_batches(sizes):
    """Dataset of int vectors 0, 1, 2, ... in batches of given sizes."""
    starts = np.cumsum([0, *sizes])
    parts = [np.arange(a, b) for a, b in itertools.pairwise(starts)]
    ragged = tf.ragged.constant([p.tolist() for p in parts], dtype=tf.int64)
    return tf.data.Dataset.from_tensor_slices(ragged)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("sizes", [[8, 8, 5], [8, 1], [3]])
def test_ranks_together_see_every_batch_in_order(world_size, sizes):
    pieces = [
        [
            piece.numpy()
            for piece in input.distribute(
                read_batches(sizes), Together(rank, world_size), "input"
            )
        ]
        for rank in range(world_size)
    ]
    whole = [np.concatenate(step) for step in zip(*pieces, strict=True)]
    assert [len(step) for step in whole] == sizes
    np.testing.assert_array_equal(np.concatenate(whole), range(sum(sizes)))


@pytest.mark.parametrize("balance", [[5, 0, 2], [1, 1, 1], "ids", "equal"])
def test_ranks_together_see_every_batch_in_any_shares(balance):
    sizes = [8, 8, 5, 1]
    pieces = [
        [
            piece.numpy()
            for piece in input.distribute(
                *(read_batches(sizes), Together(rank, 3), "input"),
                Balance(balance, 3),
            )
        ]
        for rank in range(3)
    ]
    whole = [np.concatenate(step) for step in zip(*pieces, strict=True)]
    np.testing.assert_array_equal(np.concatenate(whole), range(sum(sizes)))
    found = [len(of_rank[0]) for of_rank in pieces]
    assert found == ([6, 0, 2] if balance == [5, 0, 2] else [3, 2, 3]) or (
        balance == "equal" and found == [2, 3, 3]
    )


def test_ranks_with_other_shares_are_refused():
    class Others(Together):
        def all_gather(self, tensor, label):
            if label != "dataset":
                return super().all_gather(tensor, label)
            text = tensor.numpy().tobytes()
            other = text.replace(b"0.25, 0.75", b"0.5, 0.5")
            assert other != text
            return tf.constant(np.frombuffer(text + other, np.uint8))

    with pytest.raises(ValueError, match=r"0.25, 0.75 .rank 0., 0.5, 0.5 .r"):
        input.distribute(
            *(read_batches([4]), Others(0, 2), "input"), Balance([1, 3], 2)
        )


def test_every_kind_of_component_is_cut():
    batch = {
        "dense": tf.reshape(tf.range(10), [5, 2]),
        "ragged": tf.ragged.constant([[1], [2, 3], [], [4], [5]]),
        "sparse": tf.sparse.from_dense(tf.eye(5)),
        "scalar": tf.constant(7),
        "text": tf.constant(list("abcde")),
    }
    parts = [batches.slice_of_rank(batch, rank, 2) for rank in range(2)]
    for name in ("dense", "text"):
        joined = tf.concat([p[name] for p in parts], 0)
        np.testing.assert_array_equal(joined, batch[name])
    joined = tf.concat([p["ragged"] for p in parts], 0)
    assert joined.to_list() == batch["ragged"].to_list()
    joined = tf.sparse.concat(0, [p["sparse"] for p in parts])
    np.testing.assert_array_equal(tf.sparse.to_dense(joined), np.eye(5))
    assert all(p["scalar"] == 7 for p in parts)
    assert parts[0]["sparse"].shape == (2, 5)


def starts(batch, shares, by_ids):
    """First sample of each part, and the end of the last."""
    ends = np.cumsum([0, *shares]) / sum(shares)
    found = [
        batches.samples_between(batch, tf.constant(pair), by_ids)
        for pair in itertools.pairwise(ends)
    ]
    for (first, _), (second, _) in itertools.pairwise(found):
        assert first[1] == second[0]
    work = [int(of_rank) for _, of_rank in found]
    return [int(rows[0]) for rows, _ in found] + [int(found[-1][0][1])], work


@pytest.mark.parametrize(
    ("samples", "shares", "expected"),
    [
        (10, [7, 2, 1], [0, 7, 9, 10]),
        (3, [1, 1, 1, 1], [0, 1, 2, 2, 3]),
        (8, [1, 0, 2], [0, 3, 3, 8]),
        (0, [1, 2], [0, 0, 0]),
        (5, [0, 0, 3], [0, 0, 0, 5]),
    ],
)
def test_parts_by_samples(samples, shares, expected):
    batch = {"scalar": tf.constant(3), "x": tf.zeros([samples, 2])}
    found, work = starts(batch, shares, by_ids=True)  # there are none
    assert found == expected
    assert work == np.diff(expected).tolist()


def test_parts_by_ids():
    lengths = [9, 0, 0, 1, 3, 0, 0, 0]
    ragged = tf.RaggedTensor.from_row_lengths(tf.range(13), lengths)
    batch = ragged, tf.zeros([8])
    # Every sample counts one more: 10 1 1 2 4 1 1 1. Equally near: the later.
    assert starts(batch, [1, 1], True) == ([0, 2, 8], [11, 10])
    assert starts(batch, [9, 11], True) == ([0, 1, 8], [10, 11])
    assert starts(batch, [1, 1], False) == ([0, 4, 8], [4, 4])
    assert starts(batch, [0, 1, 0], True) == ([0, 0, 8, 8], [0, 21, 0])
    nested = tf.RaggedTensor.from_row_lengths(ragged, [3, 0, 5])
    assert starts(nested, [1, 1], True) == ([0, 1, 3], [10, 6])
    sparse = ragged.to_sparse()
    mixed = tf.SparseTensor(
        sparse.indices[::-1], sparse.values[::-1], sparse.dense_shape
    )
    assert starts(mixed, [9, 11], True) == ([0, 1, 8], [10, 11])
    # Both count: 19 1 1 3 7 1 1 1.
    assert starts((ragged, mixed), [1, 1], True) == ([0, 1, 8], [19, 15])


def test_parts_by_ids_without_any():
    empty = tf.RaggedTensor.from_row_lengths(tf.range(0), [0] * 6)
    assert starts(empty, [1, 2], True) == ([0, 2, 6], [2, 4])
    none = tf.RaggedTensor.from_row_lengths(tf.range(0), [])
    assert starts(none, [1, 2], True) == ([0, 0, 0], [0, 0])


def test_static_batch_size_stays_static():
    dataset = tf.data.Dataset.range(32).batch(8, drop_remainder=True)
    local = input.distribute(dataset, Together(1, 4), "input")
    assert local.element_spec.shape == (2,)


@pytest.mark.parametrize("known", [True, False])
def test_static_shapes_of_samples_stay_static(known):
    """Keras builds a model of them; without, it reads a batch of the data."""

    def components(x):
        size = tf.size(x, tf.int64)
        row = tf.stack([tf.range(size), tf.zeros_like(x)], 1)
        ones = tf.ones([size, 3])
        return {
            "dense": tf.ensure_shape(tf.tile(x[:, None], [1, 4]), [None, 4]),
            "sparse": tf.SparseTensor(row, x, tf.stack([size, 6])),
            "wide": tf.SparseTensor(
                tf.concat([row, row[:, :1]], 1), x, tf.stack([size, 5, size])
            ),
            "ragged": tf.RaggedTensor.from_row_lengths(ones, tf.ones_like(x)),
        }

    dataset = tf.data.Dataset.range(7).batch(4).map(components)
    if not known:
        dataset = dataset.filter(lambda x: True)
    local = input.distribute(dataset, Together(0, 2), "input")
    for name, spec in dataset.element_spec.items():
        assert local.element_spec[name].shape.as_list() == spec.shape.as_list()


def test_shorter_rank_is_padded_with_empty_batches():
    dataset = tf.data.Dataset.from_tensor_slices(
        {
            "x": np.ones([4, 3], np.float32),
            "r": tf.ragged.constant([[1], [2], [3], [4]]),
            "s": tf.sparse.from_dense(np.eye(4, 6)),
        }
    ).batch(2)
    local = input.equal_steps(dataset, Together(0, 2, [2, 4]), "input")
    steps = list(local)
    assert len(steps) == 4
    assert [step["x"].shape[0] for step in steps] == [2, 2, 0, 0]
    assert steps[3]["x"].shape == (0, 3)
    assert [step["r"].nrows() for step in steps] == [2, 2, 0, 0]
    np.testing.assert_array_equal(steps[2]["s"].dense_shape, [0, 6])


def test_unknown_length_goes_on_while_any_rank_has_data():
    dataset = tf.data.Dataset.range(6).batch(2).filter(lambda x: True)
    together = Together(
        0, 2, [int(tf.data.UNKNOWN_CARDINALITY)] * 2, [1, 1, 1, 1, 1]
    )
    steps = list(input.equal_steps(dataset, together, "input"))
    assert [len(step) for step in steps] == [2, 2, 2, 0, 0]
    again = Together(0, 2, [int(tf.data.UNKNOWN_CARDINALITY)] * 2)
    assert len(list(input.equal_steps(dataset, again, "input"))) == 3


def test_infinite_on_some_ranks_only_is_an_error():
    dataset = tf.data.Dataset.range(6).batch(2)
    infinite = int(tf.data.INFINITE_CARDINALITY)
    with pytest.raises(ValueError, match="infinite on some ranks"):
        input.equal_steps(dataset, Together(0, 2, [3, infinite]), "input")


def test_off_keeps_own_data_and_global_batch_size():
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.OFF
    )
    dataset = tf.data.Dataset.range(12).batch(6).with_options(options)
    local = list(input.distribute(dataset, Together(1, 2), "input"))
    assert [len(step) for step in local] == [3, 3, 3, 3]


@pytest.mark.parametrize("wanted", [None, True])
def test_no_autotuner_to_wait_for_unless_asked_for(wanted):
    options = tf.data.Options()
    if wanted is not None:
        options.autotune.enabled = wanted
    dataset = tf.data.Dataset.range(12).batch(6).with_options(options)
    local = input.distribute(dataset, Together(1, 2), "input")
    assert local.options().autotune.enabled is bool(wanted)


def test_policies_by_file_need_a_fixed_batch_size():
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.FILE
    )
    dataset = tf.data.Dataset.range(12).with_options(options)
    dataset = dataset.map(lambda x: tf.fill([x], x))
    with pytest.raises(ValueError, match="no fixed batch size"):
        input.distribute(dataset, Together(0, 2), "input")


def test_policies_by_file_need_a_sample_for_every_rank():
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.OFF
    )
    dataset = tf.data.Dataset.range(12).batch(3).with_options(options)
    with pytest.raises(ValueError, match="fewer samples than the 4 ranks"):
        input.distribute(dataset, Together(0, 4), "input")


def test_one_dataset_has_one_length():
    dataset = tf.data.Dataset.range(12).batch(3)
    with pytest.raises(ValueError, match=r"different data. .*: \[4, 5\]"):
        input.distribute(dataset, Together(0, 2, [4, 5]), "input")


def test_an_iterator_can_be_saved(tmp_path):
    dataset = tf.data.Dataset.range(32).batch(4)
    iterator = iter(input.distribute(dataset, Together(1, 2), "input"))
    next(iterator)
    checkpoint = tf.train.Checkpoint(iterator=iterator)
    path = checkpoint.write(str(tmp_path / "iterator"))
    expected = next(iterator)
    checkpoint.read(path)
    np.testing.assert_array_equal(next(iterator), expected)
