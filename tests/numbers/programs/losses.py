# SPDX-License-Identifier: Apache-2.0
"""Losses that `compile` is given as functions and classes."""

import tensorflow as tf

from tests.numbers.registry import program

keras = tf.keras


def error(y, p):
    return tf.square(y - p)


@program("loss/mse_by_name")
def mse_by_name(c):
    """The mean squared error by its name, with a metric and `predict`."""
    return c.train(
        c.model(), c.data(), "mse", metrics=lambda: ["mae"], predict=True
    )


@program("loss/function_per_sample")
def function_per_sample(c):
    """A function that returns one number for each sample."""

    def loss(y, p):
        return tf.reduce_mean(tf.abs(y - p), axis=-1)

    return c.train(c.model(), c.data(weights=True), loss)


@program("loss/function_mean")
def function_mean(c):
    """A function that returns the mean over the batch."""

    def loss(y, p):
        return tf.reduce_mean(error(y, p))

    return c.train(c.model(), c.data(), loss)


@program("loss/function_sum")
def function_sum(c):
    """A function that returns a sum over the batch."""

    def loss(y, p):
        return tf.reduce_sum(error(y, p)) / 16.0

    return c.train(c.model(), c.data(), loss)


@program("loss/masked_mean")
def masked_mean(c):
    """A masked mean, `sum(l * m) / max(sum(m), 1)`."""

    def loss(y, p):
        mask = tf.cast(y > 0, tf.float32)
        total = tf.reduce_sum(error(y, p) * mask)
        return total / tf.maximum(tf.reduce_sum(mask), 1.0)

    return c.train(c.model(), c.data(), loss)


@program("loss/masked_mean_class_weight")
def masked_mean_class_weight(c):
    """A scalar loss with `class_weight`."""

    def loss(y, p):
        each = keras.losses.sparse_categorical_crossentropy(y, p, True)
        mask = tf.cast(tf.reshape(y, [-1]) > 0, tf.float32)
        return tf.math.divide_no_nan(
            tf.reduce_sum(each * mask), tf.reduce_sum(mask)
        )

    weights = {0: 1.0, 1: 2.0, 2: 0.5}
    return c.train(
        c.model(3), c.data(3, "classes"), loss, fit={"class_weight": weights}
    )


@program("loss/boolean_mask")
def boolean_mask(c):
    """The mean of the elements that `tf.boolean_mask` leaves."""

    def loss(y, p):
        return tf.reduce_mean(tf.boolean_mask(error(y, p), y > -1))

    return c.train(c.model(), c.data(), loss)


@program("loss/rmse")
def rmse(c):
    """The root of the mean squared error."""

    def loss(y, p):
        return tf.sqrt(tf.reduce_mean(error(y, p)) + 1e-6)

    return c.train(c.model(), c.data(), loss)


@program("loss/dice_with_smoothing")
def dice_with_smoothing(c):
    """A Dice loss over the whole batch."""

    def loss(y, p):
        both = tf.reduce_sum(y * p)
        return 1 - (2 * both + 1) / (tf.reduce_sum(y) + tf.reduce_sum(p) + 1)

    return c.train(c.model(2, "sigmoid"), c.data(2, "binary"), loss)


@program("loss/correlation")
def correlation(c):
    """One minus Pearson's correlation over the batch."""

    def loss(y, p):
        y, p = y - tf.reduce_mean(y), p - tf.reduce_mean(p)
        norms = tf.norm(y) * tf.norm(p)
        return 1 - tf.reduce_sum(y * p) / (norms + 1e-6)

    return c.train(c.model(), c.data(), loss)


@program("loss/largest_error")
def largest_error(c):
    """The largest error of the batch."""

    def loss(y, p):
        return tf.reduce_max(error(y, p))

    return c.train(c.model(), c.data(), loss)


@program("loss/norm_of_errors")
def norm_of_errors(c):
    """The Euclidean norm of all errors."""

    def loss(y, p):
        return tf.norm(y - p)

    return c.train(c.model(), c.data(), loss)


@program("loss/variance_of_errors")
def variance_of_errors(c):
    """The variance of the errors over the batch."""

    def loss(y, p):
        return tf.math.reduce_variance(y - p) + tf.reduce_mean(error(y, p))

    return c.train(c.model(), c.data(), loss)


@program("loss/logsumexp_over_batch")
def logsumexp_over_batch(c):
    """A soft maximum over the samples."""

    def loss(y, p):
        return tf.reduce_logsumexp(tf.reduce_mean(error(y, p), -1))

    return c.train(c.model(), c.data(), loss)


@program("loss/centred_labels")
def centred_labels(c):
    """Labels are centred by their mean over the batch."""

    def loss(y, p):
        return tf.reduce_mean(error(y - tf.reduce_mean(y, 0), p), -1)

    return c.train(c.model(), c.data(), loss)


@program("loss/hard_examples")
def hard_examples(c):
    """The mean of the three largest losses of the batch."""

    def loss(y, p):
        each = tf.reduce_mean(error(y, p), -1)
        count = tf.minimum(3, tf.shape(each)[0])
        return tf.reduce_mean(tf.math.top_k(each, count).values)

    return c.train(c.model(), c.data(), loss)


@program("loss/in_batch_softmax")
def in_batch_softmax(c):
    """Every sample is told from all others of the batch."""

    def loss(y, p):
        scores = tf.matmul(y, p, transpose_b=True)
        return tf.nn.sparse_softmax_cross_entropy_with_logits(
            tf.range(tf.shape(y)[0]), scores
        )

    return c.train(c.model(), c.data(), loss)


@program("loss/subclass_per_sample")
def subclass_per_sample(c):
    """A subclass of `Loss` that returns one number for each sample."""

    class Own(keras.losses.Loss):
        def call(self, y, p):
            return tf.reduce_mean(tf.math.log(tf.cosh(y - p)), -1)

    return c.train(c.model(), c.data(weights=True), Own())


@program("loss/subclass_scalar")
def subclass_scalar(c):
    """A subclass of `Loss` that returns the root of a mean."""

    class Own(keras.losses.Loss):
        def call(self, y, p):
            return tf.sqrt(tf.reduce_mean(error(y, p)) + 1e-6)

    return c.train(c.model(), c.data(), Own())


@program("loss/subclass_sum_reduction")
def subclass_sum_reduction(c):
    """A subclass of `Loss` with the reduction "sum"."""

    class Own(keras.losses.Loss):
        def call(self, y, p):
            return tf.reduce_mean(tf.abs(y - p), -1) / 8.0

    return c.train(c.model(), c.data(weights=True), Own(reduction="sum"))


@program("loss/sequence_masked_mean")
def sequence_masked_mean(c):
    """A masked mean over the steps of sequences, which vary in length."""

    def loss(y, p):
        mask = tf.cast(y >= 0.2, tf.float32)
        total = tf.reduce_sum(tf.abs(y - tf.tanh(p)) * mask)
        return total / tf.maximum(tf.reduce_sum(mask), 1.0)

    return c.train(c.model(7), c.data(7), loss, predict=True)


@program("loss/focal")
def focal(c):
    """A focal loss, normalised by the positives of the batch."""

    def loss(y, p):
        each = tf.nn.sigmoid_cross_entropy_with_logits(y, p)
        correct = tf.exp(-each)
        total = tf.reduce_sum((1 - correct) ** 2 * each)
        return total / tf.maximum(tf.reduce_sum(y), 1.0)

    return c.train(c.model(), c.data(2, "binary"), loss)


@program("loss/class_balanced")
def class_balanced(c):
    """Crossentropy with weights from the batch's own class counts."""

    def loss(y, p):
        each = tf.nn.sigmoid_cross_entropy_with_logits(y, p)
        share = tf.reduce_mean(y)
        weight = y * (1 - share) + (1 - y) * share
        return tf.reduce_mean(weight * each)

    return c.train(c.model(), c.data(2, "binary"), loss)


@program("loss/cox_partial_likelihood")
def cox_partial_likelihood(c):
    """Survival: every event against those at risk in the batch."""

    def loss(y, p):
        time, event = y[:, 0], tf.cast(y[:, 1] > 0, tf.float32)
        at_risk = tf.cast(time[None] >= time[:, None], tf.float32)
        score = p[:, 0] - tf.reduce_mean(p[:, 1]) * 0.1
        risk = tf.math.log(tf.reduce_sum(at_risk * tf.exp(score)[None], 1))
        total = tf.reduce_sum((risk - score) * event)
        return tf.math.divide_no_nan(total, tf.reduce_sum(event))

    return c.train(c.model(), c.data(), loss)


@program("loss/distance_correlation")
def distance_correlation(c):
    """The distances between predictions follow those of labels."""

    def loss(y, p):
        return 0.02 * tf.reduce_mean(tf.square(_distances(y) - _distances(p)))

    return c.train(c.model(), c.data(), loss)


def _distances(x):
    return tf.reduce_sum(tf.square(x[:, None] - x[None]), -1)


@program("loss/maximum_mean_discrepancy")
def maximum_mean_discrepancy(c):
    """A kernel distance of the batch's predictions and labels."""

    def loss(y, p):
        def kernel(a, b):
            squares = tf.reduce_sum(tf.square(a[:, None] - b[None]), -1)
            return tf.reduce_mean(tf.exp(-squares))

        return kernel(y, y) + kernel(p, p) - 2 * kernel(y, p)

    return c.train(c.model(), c.data(), loss)


@program("loss/barlow_twins", tolerance=5e-4)
def barlow_twins(c):
    """The cross-correlation of two outputs, normalised over the batch."""

    def loss(y, p):
        a, b = (_normalised(z) for z in (y, p))
        count = tf.cast(tf.shape(y)[0], tf.float32)
        matrix = tf.matmul(a, b, transpose_a=True) / count
        return tf.reduce_sum(tf.square(matrix - tf.eye(4)))

    return c.train(c.model(4), c.data(4), loss)


def _normalised(z):
    mean, variance = tf.nn.moments(z, 0)
    return (z - mean) / tf.sqrt(variance + 0.1)


@program("loss/vicreg_variance")
def vicreg_variance(c):
    """A hinge on each feature's deviation over the batch."""

    def loss(y, p):
        deviation = tf.sqrt(tf.math.reduce_variance(p, 0) + 1e-2)
        spread = tf.reduce_mean(tf.nn.relu(1.0 - deviation))
        return spread + tf.reduce_mean(error(y, p))

    return c.train(c.model(3), c.data(3), loss)


@program("loss/sorted_quantiles")
def sorted_quantiles(c):
    """Sorted predictions against sorted labels of the batch."""

    def loss(y, p):
        return tf.reduce_mean(error(tf.sort(y, 0), tf.sort(p, 0)))

    return c.train(c.model(), c.data(), loss)
