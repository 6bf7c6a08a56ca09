# SPDX-License-Identifier: Apache-2.0
"""Masked means written by hand in `train_step`."""

import tensorflow as tf

from tests.numbers.programs.steps import error
from tests.numbers.programs.steps import step
from tests.numbers.registry import WARNED


def mask_of(y):
    return tf.cast(y > 0, tf.float32)


@step("masked/mean", "`sum(l * m) / max(sum(m), 1)`.")
def masked(y, p):
    m = mask_of(y)
    return tf.reduce_sum(error(y, p) * m) / tf.maximum(tf.reduce_sum(m), 1.0)


@step("masked/no_nan", "`divide_no_nan` of two sums.")
def no_nan(y, p):
    m = mask_of(y)
    return tf.math.divide_no_nan(
        tf.reduce_sum(error(y, p) * m), tf.reduce_sum(m)
    )


@step("masked/per_column", "A masked mean of each column.")
def per_column(y, p):
    m = mask_of(y)
    each = tf.reduce_sum(error(y, p) * m, 0)
    return tf.reduce_sum(each / tf.maximum(tf.reduce_sum(m, 0), 1.0))


@step("masked/mean_by_mean", "A mean by a mean.")
def mean_by_mean(y, p):
    m = mask_of(y)
    return tf.math.divide_no_nan(
        tf.reduce_mean(error(y, p) * m), tf.reduce_mean(m)
    )


@step("masked/where", "A divisor by `tf.where`.")
def where(y, p):
    m = mask_of(y)
    count = tf.reduce_sum(m)
    return tf.reduce_sum(error(y, p) * m) / tf.where(count > 0, count, 1.0)


@step("masked/clipped", "A clipped divisor.")
def clipped(y, p):
    m = mask_of(y)
    count = tf.clip_by_value(tf.reduce_sum(m), 1.0, 1e9)
    return tf.reduce_sum(error(y, p) * m) / count


@step("masked/reciprocal", "A reciprocal.")
def reciprocal(y, p):
    m = mask_of(y)
    by = tf.math.reciprocal_no_nan(tf.reduce_sum(m))
    return tf.reduce_sum(error(y, p) * m) * by


@step("masked/weights_first", "Weights sum to 1.")
def weights_first(y, p):
    m = mask_of(y)
    weights = m / tf.maximum(tf.reduce_sum(m), 1.0)
    return tf.reduce_sum(error(y, p) * weights)


@step(
    "masked/class_balanced",
    "Weights from the batch's own class counts.",
    kind="binary",
)
def class_balanced(y, p):
    each = tf.nn.sigmoid_cross_entropy_with_logits(y, p)
    share = tf.reduce_mean(y)
    return tf.reduce_mean((y * (1 - share) + (1 - y) * share) * each)


@step("masked/centred", "Batch centring.")
def centred(y, p):
    return tf.reduce_mean(tf.square((y - tf.reduce_mean(y, 0)) - p))


@step("masked/one_count_twice", "One count, two divisors.")
def one_count_twice(y, p):
    m = mask_of(y)
    n = tf.reduce_sum(m)
    first = tf.reduce_sum(error(y, p) * m) / tf.maximum(n, 1.0)
    return first + tf.reduce_sum(tf.abs(p) * m) / (n + 5.0)


@step("masked/boolean_mask", "`tf.boolean_mask`.", WARNED, says="(?i)mean|mask")
def boolean_mask(y, p):
    kept = tf.boolean_mask(error(y, p), y > -0.5)
    total = tf.reduce_sum(kept)
    return total / tf.cast(tf.maximum(tf.size(kept), 1), tf.float32)


@step("masked/positives", "Focal: divided by positives.", kind="binary")
def positives(y, p):
    each = tf.nn.sigmoid_cross_entropy_with_logits(y, p)
    total = tf.reduce_sum((1 - tf.exp(-each)) ** 2 * each)
    return total / tf.maximum(tf.reduce_sum(y), 1.0)


@step("masked/count_nonzero", "`tf.math.count_nonzero` divides.")
def count_nonzero(y, p):
    m = mask_of(y)
    count = tf.math.count_nonzero(m, dtype=tf.float32)
    return tf.reduce_sum(error(y, p) * m) / tf.maximum(count, 1.0)


@step("masked/plus_epsilon", "A divisor plus a small number.")
def plus_epsilon(y, p):
    m = mask_of(y)
    return tf.reduce_sum(error(y, p) * m) / (tf.reduce_sum(m) + 1e-6)


@step("masked/two_losses", "The sum of two masked means.")
def two_losses(y, p):
    up, down = mask_of(y), mask_of(-y)
    found = 0.0
    for m in (up, down):
        found += tf.math.divide_no_nan(
            tf.reduce_sum(error(y, p) * m), tf.reduce_sum(m)
        )
    return found
