# SPDX-License-Identifier: Apache-2.0
"""What a number of a step is over the whole batch, from those of its parts."""

import types

import numpy as np
import pytest
import tensorflow as tf

from tfdist_ext.batches.sum_or_mean import BatchGrowth
from tfdist_ext.ops import collective_ops

X = np.random.default_rng(1).normal(size=[8, 3]).astype(np.float32)


def total(x):
    return tf.reduce_sum(x * x)


def mean(x):
    return tf.reduce_mean(tf.abs(x))


def samples(x):
    return tf.cast(tf.shape(x)[0], tf.float32)


def both(x):
    return total(x) + mean(x)


FORMULAS = {
    "mean": mean,
    "sum": total,
    "half the squares": tf.nn.l2_loss,
    "mean of sums": lambda x: tf.reduce_mean(tf.reduce_sum(x, axis=1)),
    "sum of means": lambda x: tf.reduce_sum(tf.reduce_mean(x, axis=1)),
    "sum by samples": lambda x: total(x) / samples(x),
    "sum by elements": lambda x: total(x) / tf.cast(tf.size(x), tf.float32),
    "sum and constant": lambda x: total(x) + 0.5,
    "both": both,
    "difference": lambda x: mean(x) - total(x),
    "negative": lambda x: -both(x),
    "times": lambda x: 3.0 * both(x),
    "by": lambda x: both(x) / 4.0,
    "times a mean of parameters": lambda x: both(x) * tf.exp(tf.constant(0.2)),
    "several": lambda x: tf.add_n([both(x), mean(x), 2.0 * total(x)]),
    "stacked": lambda x: tf.reduce_sum(tf.stack([total(x), mean(x)])),
    "joined": lambda x: tf.reduce_sum(
        tf.concat([[total(x)], [0.0], [mean(x)]], 0)
    ),
    "chosen": lambda x: tf.where(tf.constant(True), total(x), 2.0 * total(x)),
    "at times": lambda x: 2.0 * (both(x) + total(x)) - mean(x) / 3.0,
}


def sums_and_rest(formula, x):
    """The sums in a formula's value, and what else there is in it."""

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def step(x):
        value = formula(x)
        sums = [
            tf.reduce_sum(t.value) * (1.0 if t.factor is None else t.factor)
            for t in BatchGrowth().sums_in(value)
        ]
        return tf.add_n([tf.zeros([]), *sums]), value

    sums, value = (each.numpy() for each in step(x))
    return sums, value - sums


@pytest.mark.parametrize("formula", FORMULAS.values(), ids=FORMULAS.keys())
def test_sums_add_up_and_means_are_averaged(formula):
    parts = [sums_and_rest(formula, part) for part in (X[:4], X[4:])]
    sums, rests = np.transpose(parts)
    whole = formula(tf.constant(X))
    np.testing.assert_allclose(sums.sum() + rests.mean(), whole, rtol=1e-5)


@pytest.mark.parametrize(
    "formula",
    [
        lambda x: tf.reduce_max(tf.stack([total(x), mean(x)])),
        lambda x: 2.0 * tf.reduce_max(tf.stack([total(x), mean(x)])) + total(x),
    ],
)
def test_what_cannot_be_parted_is_refused(formula):
    with pytest.raises(ValueError, match="mixes a sum and a mean"):
        sums_and_rest(formula, X)


def weights(x):
    return tf.cast(x > 0.3, tf.float32)


def kept(x):
    return tf.reduce_sum(weights(x) * x * x)


def weighted(x):
    return kept(x) / tf.reduce_sum(weights(x))


RATIOS = {
    "mean of some": weighted,
    "no nan": lambda x: tf.math.divide_no_nan(
        kept(x), tf.cast(tf.math.count_nonzero(x > 0.3), tf.float32)
    ),
    "at least": lambda x: kept(x) / tf.maximum(1.0, tf.reduce_sum(weights(x))),
    "and a little": lambda x: kept(x) / (tf.reduce_sum(weights(x)) + 1e-3),
    "and a mean": lambda x: mean(x) - 2.0 * weighted(x),
    "and a sum": lambda x: total(x) + weighted(x) / 3.0,
    "and both": lambda x: tf.add_n([weighted(x), both(x), tf.constant(0.1)]),
}


@pytest.mark.parametrize("formula", RATIOS.values(), ids=RATIOS.keys())
def test_means_of_what_a_mask_leaves_are_divided_by_all(formula):
    def amount(terms):
        each = [
            t.value if t.factor is None else t.factor * t.value for t in terms
        ]
        return tf.add_n([tf.zeros([]), *each])

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def step(x):
        value = formula(x)
        found = BatchGrowth().sums_in(value)
        sums = [t for t in found if t.divisor is None]
        (ratio,) = (t for t in found if t.divisor is not None)
        of_all = ratio.divisor.of(tf.reduce_sum(weights(tf.constant(X))))
        return (
            value - amount(found),
            amount(sums),
            amount([ratio]),
            ratio.divisor.part,
            ratio.divisor.of(ratio.divisor.part),
            of_all,
        )

    # Uneven in samples and in what the mask leaves.
    rest, sums, value, part, own, of_all = np.transpose(
        [[each.numpy() for each in step(x)] for x in (X[:3], X[3:])]
    )
    assert part.sum() == weights(X).numpy().sum()
    shares = np.array([3, 5]) / 8
    found = (rest * shares).sum() + sums.sum() + (value * own / of_all).sum()
    np.testing.assert_allclose(found, formula(tf.constant(X)), rtol=1e-5)


def test_numbers_of_samples_are_no_masks():
    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def step(x):
        places = tf.cast(tf.shape(x)[0] * tf.shape(x)[1], tf.float32)
        for value in (total(x) / samples(x), total(x) / (2.0 * places)):
            assert not BatchGrowth().sums_in(value)
        return x

    step(X)


def test_rows_of_all_ranks_are_no_samples_of_one():
    """A sum of them is the same on all ranks, and so is their number."""
    group = types.SimpleNamespace(world_size=2, handle=-1)

    def terms(formula):
        with tf.Graph().as_default():
            x = tf.compat.v1.placeholder(tf.float32, [None, 3])
            rows, _ = collective_ops.all_gather(group, x, tag=2)
            return len(BatchGrowth().sums_in(formula(x, rows)))

    assert terms(lambda x, rows: tf.reduce_sum(tf.abs(rows))) == 0
    assert terms(lambda x, rows: total(x) / samples(x)) == 0
    assert terms(lambda x, rows: total(x) / samples(rows)) == 1
    assert terms(lambda x, rows: total(x @ tf.transpose(rows))) == 1
    # A rank's own among them.
    assert terms(lambda x, rows: total(rows[: tf.shape(x)[0]])) == 1
    assert terms(lambda x, rows: total(rows[:, :2])) == 0
