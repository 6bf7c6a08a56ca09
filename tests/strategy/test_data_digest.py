# SPDX-License-Identifier: Apache-2.0
"""Ranks that read different data are told so; those that may are not."""

import types
import warnings

import numpy as np
import pytest
import tensorflow as tf

from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.numbers import data_digest


class Recorded:
    """Collectives that give what other ranks have sent before."""

    def __init__(self, rank=0, others=()):
        self.others = list(others)
        self.group = types.SimpleNamespace(
            rank=rank, world_size=1 + len(self.others)
        )
        self.sent = []

    def all_gather(self, tensor, label):
        own = tf.numpy_function(self._keep, [tensor], tf.int64)
        return tf.concat([*self.others, own], 0)

    def _keep(self, value):
        self.sent.append(value)
        return value


def compare(*batches, may_differ=False):
    """What the last rank says of the batches of ranks 0, 1, ..."""
    sent = []
    for batch in batches:
        collectives = Recorded(others=sent)
        dataset = tf.data.Dataset.from_tensors(batch).repeat(2)

        def look(index, batch, collectives=collectives):
            compared = data_digest.Comparison(collectives, "input1", may_differ)
            compared.compare_first(index, batch)
            return index

        assert len(list(dataset.enumerate().map(look))) == 2
        assert len(collectives.sent) == 1, "one exchange per iterator"
        sent.append(collectives.sent[0])


def batch(seed=0, noise=0, **more):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 1000, [8, 3])
    lists = tf.RaggedTensor.from_row_lengths(ids[:, 0], [1] * 8)
    features = {
        "ids": ids,
        "lists": lists,
        "names": ids[:, :1].astype(str),
        "sparse": tf.sparse.from_dense(ids),
        "noise": np.full([8, 2], 1.0) * np.arange(8)[:, None] + noise,
        "ones": np.ones([8]),
        "step": 7,
        **more,
    }
    return features, np.ones([8, 1], np.float32)


def test_equal_batches_pass():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compare(batch(), batch(), batch())


@pytest.mark.parametrize("noise", [0.5, 1e-9])
def test_one_feature_that_differs_is_named_in_a_warning(noise):
    with pytest.warns(UserWarning, match=r"'0/noise' of rank\(s\) \[2\]"):
        compare(batch(), batch(), batch(noise=noise))


def test_another_order_is_refused():
    ids, order = np.arange(24).reshape(8, 3), np.arange(8)[::-1]
    batches = [
        ({"ids": part, "clicks": np.zeros([8])}, part[:, :1] * 0.5)
        for part in (ids, ids[order])
    ]
    error = tf.errors.InvalidArgumentError
    # Labels that are all alike are no sign of the same order.
    with pytest.raises(error, match=r"no feature is equal\. '0/ids', '1' of"):
        compare(*batches)
    with pytest.warns(UserWarning, match="'0/ids', '1'"):
        compare(*batches, may_differ=True)


def test_another_batch_size_is_refused():
    batches = [np.ones([8, 2]), np.ones([6, 2])]
    error = tf.errors.InvalidArgumentError
    with pytest.raises(error, match=r"8 \(rank 0\), 6 \(rank 1\) samples"):
        compare(*batches, may_differ=True)


def test_which_pipelines_may_differ():
    numbers = tf.data.Dataset.range(8)
    generator = tf.random.Generator.from_seed(1)

    def draws(dataset):
        return data_digest.draws_random_numbers(internals.op_types(dataset))

    for function in (
        lambda x: tf.random.uniform([]),
        lambda x: tf.random.normal([2]),
        lambda x: tf.random.truncated_normal([2]),
        lambda x: generator.uniform([]),
        lambda x: tf.cond(x > 0, lambda: tf.random.uniform([]), lambda: 0.0),
    ):
        assert draws(numbers.map(function).batch(2).prefetch(1))
    orders = (
        numbers.shuffle(8).repeat(),
        numbers.map(lambda x: tf.random.shuffle(tf.range(3))),
        tf.data.Dataset.zip((numbers, tf.data.Dataset.random())),
    )
    python = tf.data.Dataset.from_generator(
        lambda: iter([1]), output_signature=tf.TensorSpec([], tf.int64)
    )
    for dataset in (*orders, python):
        assert not draws(dataset)
        pure = data_digest.is_pure(internals.op_types(dataset))
        assert pure is (dataset is not python)
