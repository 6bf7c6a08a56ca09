# SPDX-License-Identifier: Apache-2.0
"""Every public loss and metric of Keras, on outputs that it understands."""

import inspect

import numpy as np
import tensorflow as tf
import whole_batch_models as models

keras = tf.keras

CLASSES = 3
# Of classes that do not take probabilities and one-hot labels: what they do.
KINDS = {
    "BinaryIoU": "binary",
    "CTC": "letters",
    "CategoricalGeneralizedCrossEntropy": "numbers",
    "Circle": "numbers",
    "IoU": "binary",
    "MeanIoU": "binary",
    "SparseCategoricalAccuracy": "numbers",
    "SparseCategoricalCrossentropy": "numbers",
    "SparseTopKCategoricalAccuracy": "numbers",
}
# Arguments of those that need some.
ARGUMENTS = {
    "BinaryIoU": {"target_class_ids": [0, 1], "threshold": 0.4},
    "IoU": {"num_classes": 2, "target_class_ids": [0, 1]},
    "MeanIoU": {"num_classes": 2},
    "MeanMetricWrapper": {"fn": models.rmse},
    "MeanRelativeError": {"normalizer": [1.0, 2.0, 3.0]},
    "OneHotIoU": {"num_classes": CLASSES, "target_class_ids": [0, 2]},
    "OneHotMeanIoU": {"num_classes": CLASSES},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.4},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SparseTopKCategoricalAccuracy": {"k": 2},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
    "TopKCategoricalAccuracy": {"k": 2},
}
# Bases; of values, which `compile` cannot take; and one with a state for each
# position in a batch, which in stock, too, refuses a smaller batch.
NO_CASE = ("Loss", "Metric", "Mean", "Sum", "MeanTensor", "Reduction")
# Those that stock cannot weigh: of a scalar, and of tf_keras by classes.
NO_WEIGHTS = ["MeanMetricWrapper"]
if not models.KERAS_3:
    NO_WEIGHTS += ["F1Score", "FBetaScore"]


def classes_of(module):
    """The public classes of a module, by name."""
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isclass(value) and name not in NO_CASE
    }


def made(module, prefix=""):
    """An object of each, by the kind of output and the name.

    Args:
        module: of losses or metrics.
        prefix: of the names of the objects.
    """
    found = {}
    for name, make in classes_of(module).items():
        kind = found.setdefault(KINDS.get(name, "classes"), {})
        arguments = {"name": prefix + name, **ARGUMENTS.get(name, {})}
        kind[name] = make(**arguments)
    return found


def data(flat=False):
    rng = np.random.default_rng(0)
    samples = models.SAMPLES
    x = rng.normal(size=[samples, 3]).astype(np.float32)
    numbers = rng.integers(0, CLASSES, [samples])
    letters = rng.integers(1, 4, [samples, 2]).astype(np.int32)
    labels = {
        "classes": np.eye(CLASSES, dtype=np.float32)[numbers],
        "numbers": numbers.astype(np.int32),
        "binary": (numbers > 0).astype(np.float32)[:, np.newaxis],
        "letters": letters,
        "flat": rng.random([samples]).astype(np.float32),
    }
    weights = rng.random([samples]).astype(np.float32)
    return x, labels, weights


class Outputs(keras.layers.Layer):
    """Probabilities of each kind."""

    def __init__(self, kind):
        super().__init__()
        units = {"binary": 1, "letters": 20, "flat": 1}.get(kind, CLASSES)
        self.kind, self.dense = kind, models.dense(units)

    def call(self, x):
        logits = self.dense(x)
        if self.kind == "classes" or self.kind == "numbers":
            return tf.nn.softmax(logits)
        if self.kind == "letters":
            return tf.reshape(logits, [-1, 5, 4])
        if self.kind == "binary":  # of two classes, by their numbers
            return tf.cast(logits > 0.0, tf.float32) + 0.0 * logits
        return tf.sigmoid(logits)[:, 0]


def losses(strategy):
    """Trains one output by each loss."""
    x, labels, weights = data()
    found = {}
    for kind, objects in made(keras.losses).items():
        found |= _trained(strategy, x, labels[kind], weights, kind, objects)
    return found


def flat_losses(strategy):
    """Labels and predictions without a second dimension."""
    x, labels, weights = data()
    objects = {
        name: classes_of(keras.losses)[name]()
        for name in (
            "BinaryCrossentropy",
            "CosineSimilarity",
            "Huber",
            "KLDivergence",
            "MeanSquaredError",
        )
    }
    flat = (x, labels["flat"])
    return {
        f"{weighted} {key}": value
        for weighted, values in (("all", None), ("weighted", weights))
        # tf_keras cannot weigh what has one dimension.
        if models.KERAS_3 or values is None
        for key, value in _trained(
            strategy, *flat, values, "flat", objects
        ).items()
    }


def _trained(strategy, x, y, weights, kind, objects):
    names = list(objects)

    def build():
        inputs = keras.Input([3])
        outputs = {name: Outputs(kind)(inputs) for name in names}
        return models.compiled(keras.Model(inputs, outputs), objects)

    parts = (x, dict.fromkeys(names, y))
    if weights is not None:
        parts += (dict.fromkeys(names, weights),)
    dataset = tf.data.Dataset.from_tensor_slices(parts).batch(models.BATCH)
    found = models.fitted(strategy, build, dataset, epochs=1)
    return {f"{kind} {key}": value for key, value in found.items()}


def metrics(strategy):
    """Evaluates every metric, with weights and without."""
    x, labels, weights = data()
    found = {}
    for kind in ("classes", "numbers", "binary"):

        def build(kind=kind):
            model = keras.Sequential([keras.Input([3]), Outputs(kind)])
            plain = made(keras.metrics, "plain_")[kind]
            weighted = {
                name: metric
                for name, metric in made(keras.metrics, "weighted_")[
                    kind
                ].items()
                if name not in NO_WEIGHTS
            }
            return models.compiled(
                model,
                "sparse_categorical_crossentropy"
                if kind == "numbers"
                else "mse",
                metrics=list(plain.values()),
                weighted_metrics=list(weighted.values()),
            )

        parts = (x, labels[kind], weights)
        dataset = tf.data.Dataset.from_tensor_slices(parts)
        values = models.fitted(
            strategy, build, dataset.batch(models.BATCH), epochs=1
        )
        found |= {f"{kind} {key}": value for key, value in values.items()}
    return found


CASES = {
    "every loss": losses,
    "flat losses": flat_losses,
    "every metric": metrics,
}
