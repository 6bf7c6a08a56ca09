# SPDX-License-Identifier: Apache-2.0
"""Losses written by hand in `train_step`: sums and means by many ops."""

import tensorflow as tf

from tests.numbers.registry import EQUAL
from tests.numbers.registry import WARNED
from tests.numbers.registry import program
from tests.numbers.stepping import stepped

COUNT = 16.0  # of elements in a batch, by which sums are divided


def error(y, p):
    return tf.square(y - p)


def samples(y):
    return tf.cast(tf.shape(y)[0], tf.float32)


def step(name, about, verdict=EQUAL, **how):
    """Registers a program whose loss is the decorated function."""
    trained = {k: how.pop(k) for k in list(how) if k in TRAINED}

    def register(value):
        def run(c):
            return stepped(c, value, **trained)

        run.__doc__ = about
        program(f"step/{name}", verdict, **how)(run)
        return value

    return register


TRAINED = ("outputs", "kind", "weights", "activation", "logs", "process")


@step("mean", "The mean over all elements.")
def mean(y, p):
    return tf.reduce_mean(error(y, p))


@step("mean_of_means", "A mean over features, then over samples.")
def mean_of_means(y, p):
    return tf.reduce_mean(tf.reduce_mean(error(y, p), -1))


@step("sum", "The sum over all elements, divided by a constant.")
def total(y, p):
    return tf.reduce_sum(error(y, p)) / COUNT


@step("l2_loss", "`tf.nn.l2_loss` of the errors.")
def l2_loss(y, p):
    return tf.nn.l2_loss(y - p) / COUNT


@step("sum_by_samples", "A sum divided by the number of samples.")
def sum_by_samples(y, p):
    return tf.reduce_sum(error(y, p)) / tf.maximum(samples(y), 1.0)


@step("sum_by_size", "A sum divided by `tf.size`.")
def sum_by_size(y, p):
    return tf.reduce_sum(error(y, p)) / tf.cast(tf.size(y), tf.float32)


@step("compute_average_loss", "`tf.nn.compute_average_loss`.")
def compute_average_loss(y, p):
    return tf.nn.compute_average_loss(tf.reduce_mean(error(y, p), -1))


@step("per_sample", "A loss per sample is differentiated.")
def per_sample(y, p):
    return tf.reduce_mean(error(y, p), -1) / 8.0


@step("einsum", "A sum by `tf.einsum`.")
def einsum(y, p):
    return tf.einsum("bi,bi->", y - p, y - p) / COUNT


@step(
    "tensordot",
    "A sum by `tf.tensordot`.",
    WARNED,
    says="(?i)tensordot",
    batches=("uneven",),
)
@step(
    "tensordot_of_fixed_size",
    "A sum by `tf.tensordot`, of batches of a fixed size.",
    batches=("even",),
)
def tensordot(y, p):
    return tf.tensordot(y - p, y - p, 2) / COUNT


@step("trace", "A sum by the trace of a product.", WARNED, says="(?i)trace|Mat")
def trace(y, p):
    return tf.linalg.trace(tf.matmul(y - p, y - p, transpose_a=True)) / COUNT


@step("transposed", "A sum of transposed errors.")
def transposed(y, p):
    return tf.reduce_sum(tf.transpose(error(y, p))) / COUNT


@step("segment_sum", "Sums by segments.")
def segment_sum(y, p):
    each = tf.reduce_sum(error(y, p), -1)
    groups = tf.cast(y[:, 0] > 0, tf.int32)
    return tf.reduce_sum(tf.math.unsorted_segment_sum(each, groups, 2)) / COUNT


@step("cond", "A sum inside of `tf.cond`.", WARNED, says="(?i)cond|If")
def cond(y, p):
    return tf.cond(
        tf.size(y) >= 0,
        lambda: tf.reduce_sum(error(y, p)) / COUNT,
        lambda: 0.0,
    )


@step("while_loop", "A sum over samples in a loop.", WARNED, says="(?i)while")
def while_loop(y, p):
    def body(i, so_far):
        return i + 1, so_far + tf.reduce_sum(error(y[i], p[i]))

    end = tf.shape(y)[0]
    _, found = tf.while_loop(lambda i, _: i < end, body, (0, 0.0))
    return found / COUNT


@step("cumsum", "The last of a running sum.", WARNED, says="(?i)cumsum")
def cumsum(y, p):
    each = tf.cumsum(tf.reduce_sum(error(y, p), -1), reverse=True)
    return tf.reduce_sum(each[:1]) / COUNT


@step("matmul_ones", "A sum by a product with ones.")
def matmul_ones(y, p):
    each = tf.reduce_sum(error(y, p), -1, keepdims=True)
    return tf.matmul(tf.ones_like(each), each, True)[0, 0] / COUNT


@step(
    "map_fn",
    "A sum of what `tf.map_fn` finds.",
    WARNED,
    says="(?i)TensorList|map",
)
def map_fn(y, p):
    each = tf.map_fn(tf.reduce_sum, error(y, p))
    return tf.reduce_sum(each) / COUNT


@step("sum_over_samples_of_mean", "The mean over samples, summed by feature.")
def sum_over_samples_of_mean(y, p):
    return tf.reduce_sum(tf.reduce_mean(error(y, p), 0))


@step(
    "features_as_samples",
    "As many features as samples, averaged over samples, summed.",
    outputs=8,
)
def features_as_samples(y, p):
    return tf.reduce_sum(tf.reduce_mean(error(y, p), 0)) / 8.0


@step(
    "features_as_local_samples",
    "As many features as samples of a rank.",
    outputs=4,
)
def features_as_local_samples(y, p):
    return tf.reduce_sum(tf.reduce_mean(error(y, p), 0)) / 4.0


@step("norm", "The norm of all errors.")
def norm(y, p):
    return tf.norm(y - p)


@step("rmse", "The root of the mean.")
def rmse(y, p):
    return tf.sqrt(tf.reduce_mean(error(y, p)) + 1e-6)


@step("maximum", "The largest error.")
def maximum(y, p):
    return tf.reduce_max(error(y, p))


@step("logsumexp", "A soft maximum over samples.")
def logsumexp(y, p):
    return tf.reduce_logsumexp(tf.reduce_mean(error(y, p), -1))


@step("variance", "The variance of the errors.")
def variance(y, p):
    return tf.math.reduce_variance(y - p)


@step("sum_and_mean", "A sum beside a mean, and a weight decay by hand.")
def sum_and_mean(y, p):
    return tf.reduce_mean(error(y, p)) + tf.reduce_sum(tf.abs(p)) / COUNT


@step("weighted", "A mean of weighted errors.", weights=True)
def weighted(y, p, w):
    return tf.reduce_mean(tf.reduce_mean(error(y, p), -1) * w)


@step("weights_normalised", "Weights that sum to one.", weights=True)
def weights_normalised(y, p, w):
    each = tf.reduce_mean(error(y, p), -1)
    return tf.math.divide_no_nan(tf.reduce_sum(each * w), tf.reduce_sum(w))


@step("reduction_none_object", "A loss object without a reduction.")
def reduction_none_object(y, p):
    make = tf.keras.losses.MeanSquaredError(reduction="none")
    return tf.reduce_mean(make(y, p))


@step("loss_object", "A loss object.", kind="binary")
def loss_object(y, p):
    return tf.keras.losses.BinaryCrossentropy(from_logits=True)(y, p)


@step("loss_object_sum", "A loss object with a sum.", kind="binary")
def loss_object_sum(y, p):
    make = tf.keras.losses.BinaryCrossentropy(from_logits=True, reduction="sum")
    return make(y, p) / 8.0
