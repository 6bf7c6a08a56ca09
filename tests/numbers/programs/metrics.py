# SPDX-License-Identifier: Apache-2.0
"""Metrics: Keras's, and those that users write."""

import tensorflow as tf

from tests.numbers.registry import program

keras = tf.keras
GROUPS = {
    "binary": (
        "binary",
        2,
        "sigmoid",
        (
            ("AUC", {}),
            ("AUC", {"curve": "PR", "name": "pr"}),
            ("BinaryAccuracy", {}),
            ("BinaryCrossentropy", {}),
            ("FalseNegatives", {}),
            ("FalsePositives", {}),
            ("TrueNegatives", {}),
            ("TruePositives", {}),
        ),
    ),
    "recalls": (
        "binary",
        2,
        "sigmoid",
        (
            ("Precision", {}),
            ("Precision", {"top_k": 1, "name": "top"}),
            ("Recall", {}),
            ("PrecisionAtRecall", {"recall": 0.5}),
            ("RecallAtPrecision", {"precision": 0.5}),
            ("SensitivityAtSpecificity", {"specificity": 0.5}),
            ("SpecificityAtSensitivity", {"sensitivity": 0.5}),
            ("BinaryIoU", {}),
        ),
    ),
    "f_scores": (
        "binary",
        2,
        "sigmoid",
        (
            ("F1Score", {"threshold": 0.5, "average": "macro"}),
            ("FBetaScore", {"threshold": 0.5, "average": "micro"}),
        ),
    ),
    "classes": (
        "classes",
        3,
        "softmax",
        (
            ("SparseCategoricalAccuracy", {}),
            ("SparseCategoricalCrossentropy", {}),
            ("SparseTopKCategoricalAccuracy", {"k": 2}),
        ),
    ),
    "one_hot": (
        "one_hot",
        3,
        "softmax",
        (
            ("CategoricalAccuracy", {}),
            ("CategoricalCrossentropy", {}),
            ("TopKCategoricalAccuracy", {"k": 2}),
            ("CategoricalHinge", {}),
            ("KLDivergence", {}),
            ("OneHotMeanIoU", {"num_classes": 3}),
        ),
    ),
    "numbers": (
        "numbers",
        2,
        None,
        (
            ("MeanSquaredError", {}),
            ("RootMeanSquaredError", {}),
            ("MeanAbsoluteError", {}),
            ("MeanRelativeError", {"normalizer": [1.0, 2.0]}),
            ("CosineSimilarity", {}),
            ("LogCoshError", {}),
            ("R2Score", {}),
            ("Hinge", {}),
            ("SquaredHinge", {}),
        ),
    ),
    "positive": (
        "positive",
        2,
        "softplus",
        (
            ("MeanAbsolutePercentageError", {}),
            ("MeanSquaredLogarithmicError", {}),
            ("Poisson", {}),
        ),
    ),
}


def register(group):
    kind, outputs, activation, made = GROUPS[group]

    def make(unweighted=True):
        return [
            getattr(keras.metrics, name)(**how)
            for name, how in made
            if hasattr(keras.metrics, name)
            and (unweighted or name not in UNWEIGHTED)
        ]

    def run(c):
        data = c.data(outputs, kind, weights=True)
        model = c.model(outputs, activation)
        return c.train(
            model, data, "mse" if kind != "classes" else SPARSE, metrics=make
        )

    def weighted(c):
        data = c.data(outputs, kind, weights=True)
        model = c.model(outputs, activation)
        return c.train(
            model,
            data,
            "mse" if kind != "classes" else SPARSE,
            weighted_metrics=lambda: make(False),
        )

    run.__doc__ = f"Metrics of {group}: " + ", ".join(n for n, _ in made) + "."
    weighted.__doc__ = f"The same metrics of {group} with sample weights."
    program(f"metric/keras/{group}")(run)
    # tf_keras cannot weigh these.
    kerases = (3,) if group == "f_scores" else (3, 2)
    program(f"metric/keras/{group}_weighted", kerases=kerases)(weighted)


# Fails in one process with weights of samples and several columns.
UNWEIGHTED = ("BinaryIoU",)
SPARSE = "sparse_categorical_crossentropy"
for each in GROUPS:
    register(each)


def own(name, about, **how):
    """Registers a program with a metric that `make` of it returns."""

    def add(make):
        def run(c):
            return c.train(c.model(), c.data(), "mse", metrics=lambda: [make()])

        run.__doc__ = about
        program(f"metric/{name}", **how)(run)
        return make

    return add


@own("function_per_sample", "A function with a number for each sample.")
def function_per_sample():
    def largest(y, p):
        return tf.reduce_max(tf.abs(y - p), axis=-1)

    return largest


@own("function_mean", "A function that returns a mean.")
def function_mean():
    def scalar(y, p):
        return tf.reduce_mean(tf.abs(y - p))

    return scalar


@own("function_root", "A function that returns the root of a mean.")
def function_root():
    def root(y, p):
        return tf.sqrt(tf.reduce_mean(tf.square(y - p)))

    return root


@own("function_maximum", "A function that returns the largest error.")
def function_maximum():
    def largest(y, p):
        return tf.reduce_max(tf.abs(y - p))

    return largest


@own("function_sum", "A function that returns a sum.")
def function_sum():
    def total(y, p):
        return tf.reduce_sum(tf.abs(y - p))

    return total


@own("function_r2", "The coefficient of determination of each batch.")
def function_r2():
    def r2(y, p):
        rest = tf.reduce_sum(tf.square(y - p))
        total = tf.reduce_sum(tf.square(y - tf.reduce_mean(y))) + 0.1
        return 1 - rest / total

    return r2


class Maximum(keras.metrics.Metric):
    """The largest error of all batches."""

    def __init__(self, name="largest"):
        super().__init__(name=name)
        self.value = self.add_weight(name="value", initializer="zeros")

    def update_state(self, y, p, sample_weight=None):
        found = tf.reduce_max(tf.abs(y - p))
        self.value.assign(tf.maximum(self.value, found))

    def result(self):
        return tf.identity(self.value)

    def reset_state(self):
        self.value.assign(0.0)


@own("state_maximum", "A metric that keeps the largest error.")
def state_maximum():
    return Maximum()


class MovingAverage(Maximum):
    """A moving average of the batches' mean errors."""

    def update_state(self, y, p, sample_weight=None):
        found = tf.reduce_mean(tf.abs(y - p))
        self.value.assign(0.9 * self.value + 0.1 * found)


@own("state_moving_average", "A metric that is a moving average.")
def state_moving_average():
    return MovingAverage("moving")


class BatchCounter(Maximum):
    """The number of batches."""

    def update_state(self, y, p, sample_weight=None):
        self.value.assign_add(1.0)


@own("state_counter", "A metric that counts batches.")
def state_counter():
    return BatchCounter("counter")


class MeanOfBatches(keras.metrics.Metric):
    """The mean of the batches' means, by hand."""

    def __init__(self, name="mean_of_batches"):
        super().__init__(name=name)
        self.total = self.add_weight(name="total", initializer="zeros")
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y, p, sample_weight=None):
        self.total.assign_add(tf.reduce_mean(tf.square(y - p)))
        self.count.assign_add(1.0)

    def result(self):
        return tf.math.divide_no_nan(
            tf.identity(self.total), tf.identity(self.count)
        )

    def reset_state(self):
        self.total.assign(0.0)
        self.count.assign(0.0)


@own("state_mean_of_batches", "A metric that averages its batches.")
def state_mean_of_batches():
    return MeanOfBatches()


class FBeta(keras.metrics.Metric):
    """F-beta from counts of its own."""

    def __init__(self, name="f_beta"):
        super().__init__(name=name)
        self.counts = self.add_weight(
            name="counts", shape=(3,), initializer="zeros"
        )

    def update_state(self, y, p, sample_weight=None):
        y, p = (tf.cast(each > 0, tf.float32) for each in (y, p))
        hits = tf.reduce_sum(y * p)
        self.counts.assign_add(
            tf.stack([hits, tf.reduce_sum(p), tf.reduce_sum(y)])
        )

    def result(self):
        hits, found, there = tf.unstack(tf.identity(self.counts))
        return tf.math.divide_no_nan(5 * hits, 4 * there + found)

    def reset_state(self):
        self.counts.assign(tf.zeros([3]))


@own("state_f_beta", "F-beta from counts of its own.")
def state_f_beta():
    return FBeta()


class LastBatch(Maximum):
    """The mean error of the last batch."""

    def update_state(self, y, p, sample_weight=None):
        self.value.assign(tf.reduce_mean(tf.abs(y - p)))


@own("state_last_batch", "A metric that keeps the last batch's error.")
def state_last_batch():
    return LastBatch("last")


class Correlation(keras.metrics.Metric):
    """Pearson's correlation from running sums."""

    def __init__(self, name="correlation"):
        super().__init__(name=name)
        self.sums = self.add_weight(
            name="sums", shape=(6,), initializer="zeros"
        )

    def update_state(self, y, p, sample_weight=None):
        y, p = tf.reshape(y, [-1]), tf.reshape(p, [-1])
        each = (tf.ones_like(y), y, p, y * p, y * y, p * p)
        self.sums.assign_add(tf.stack([tf.reduce_sum(e) for e in each]))

    def result(self):
        n, y, p, yp, yy, pp = tf.unstack(tf.identity(self.sums))
        spread = (n * yy - y * y) * (n * pp - p * p)
        return tf.math.divide_no_nan(n * yp - y * p, tf.sqrt(spread))

    def reset_state(self):
        self.sums.assign(tf.zeros([6]))


@own("state_correlation", "Pearson's correlation from running sums.")
def state_correlation():
    return Correlation()


class Minimum(Maximum):
    """The smallest error, from a start that is not zero."""

    def __init__(self, name="smallest"):
        super().__init__(name)
        self.value.assign(1e9)

    def update_state(self, y, p, sample_weight=None):
        found = tf.reduce_min(tf.abs(y - p))
        self.value.assign(tf.minimum(self.value, found))

    def reset_state(self):
        self.value.assign(1e9)


@own("state_minimum", "A metric that keeps the smallest error.")
def state_minimum():
    return Minimum()
