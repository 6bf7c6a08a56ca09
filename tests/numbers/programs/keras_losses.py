# SPDX-License-Identifier: Apache-2.0
"""Every loss of Keras, with each of its reductions."""

import tensorflow as tf

from tests.numbers.registry import program

keras = tf.keras
BOTH, KERAS_3 = (3, 2), (3,)
# Its class, the labels' kind and columns, the last activation, the Kerases.
LOSSES = {
    "MeanSquaredError": ("numbers", 2, None, BOTH),
    "MeanAbsoluteError": ("numbers", 2, None, BOTH),
    "MeanAbsolutePercentageError": ("positive", 2, None, BOTH),
    "MeanSquaredLogarithmicError": ("positive", 2, "sigmoid", BOTH),
    "CosineSimilarity": ("numbers", 3, None, BOTH),
    "Huber": ("numbers", 2, None, BOTH),
    "LogCosh": ("numbers", 2, None, BOTH),
    "Hinge": ("signs", 2, None, BOTH),
    "SquaredHinge": ("signs", 2, None, BOTH),
    "CategoricalHinge": ("one_hot", 3, None, BOTH),
    "BinaryCrossentropy": ("binary", 2, "sigmoid", BOTH),
    "BinaryFocalCrossentropy": ("binary", 2, "sigmoid", BOTH),
    "CategoricalCrossentropy": ("one_hot", 3, "softmax", BOTH),
    "CategoricalFocalCrossentropy": ("one_hot", 3, "softmax", BOTH),
    "SparseCategoricalCrossentropy": ("classes", 3, "softmax", BOTH),
    "Poisson": ("positive", 2, "softplus", BOTH),
    "KLDivergence": ("simplex", 3, "softmax", BOTH),
    "Dice": ("binary", 2, "sigmoid", KERAS_3),
    "Tversky": ("binary", 2, "sigmoid", KERAS_3),
    "Circle": ("classes", 3, "l2", KERAS_3),
    "CategoricalGeneralizedCrossEntropy": (
        "classes",
        3,
        "softmax",
        KERAS_3,
    ),
}
REDUCTIONS = {"mean": {}, "sum": {"reduction": "sum"}}


def register(name, reduction, options, kerases, **more):
    kind, outputs, activation, _ = LOSSES[name]

    def run(c):
        def normalised(x):
            return x / tf.norm(x + 1e-6, axis=-1, keepdims=True)

        last = normalised if activation == "l2" else activation
        data = c.data(outputs, kind, weights=True)
        loss = getattr(keras.losses, name)(**options, **more)
        # A sum is eight times the mean, one of these is a percentage, and the
        # other multiplies similarities by 80: at 0.05, rounding grows to 1e-3.
        steep = name in ("MeanAbsolutePercentageError", "Circle")
        rate = 0.001 if steep else 0.05
        return c.train(
            c.model(outputs, last),
            data,
            loss,
            optimizer=lambda: keras.optimizers.SGD(rate),
        )

    run.__doc__ = f"`{name}` with weighted samples, the reduction {reduction}."
    program(f"keras_loss/{name}/{reduction}", kerases=kerases, family=True)(run)


for each, (_, _, _, kerases) in LOSSES.items():
    for reduction, options in REDUCTIONS.items():
        register(each, reduction, options, kerases)
for each in ("MeanSquaredError", "Huber", "CategoricalCrossentropy", "Dice"):
    register(
        each,
        "by_weights",
        {"reduction": "mean_with_sample_weight"},
        KERAS_3,
    )
register(
    "CategoricalCrossentropy", "label_smoothing", {}, BOTH, label_smoothing=0.1
)


@program("keras_loss/names", kerases=BOTH)
def names(c):
    """Losses by name for two outputs, with `loss_weights`."""
    with c.scope():
        inputs = c.input()
        x = c.dense(8, "tanh")(c.features(inputs))
        outputs = {
            "a": c.dense(2, name="a")(x),
            "b": c.dense(3, "softmax", name="b")(x),
        }
        model = keras.Model(inputs, outputs)
    y = {"a": c.labels(2), "b": c.labels(3, "classes")}
    return c.train(
        model,
        c.batched((c.x(), y)),
        {"a": "mae", "b": "sparse_categorical_crossentropy"},
        loss_weights={"a": 0.3, "b": 2.0},
        metrics=lambda: {"a": ["mse"], "b": ["accuracy"]},
        predict=True,
    )


@program("keras_loss/ctc", kerases=KERAS_3, tables=(False,))
def ctc(c):
    """`CTC` of sequences."""
    with c.scope():
        inputs = keras.Input([6, 3])
        model = keras.Model(inputs, c.dense(4)(inputs))
    x = c.normal(c.samples, 6, 3, seed=1)
    y = c.integers(3, c.samples, 2, seed=2) + 1
    return c.train(model, c.batched((x, y)), keras.losses.CTC())


@program("keras_loss/bytes_of_a_mask", tables=(False,))
def masked_sequence(c):
    """A mask arrives with the predictions of a recurrent layer."""
    with c.scope():
        inputs = keras.Input([5, 3])
        x = keras.layers.Masking()(inputs)
        x = keras.layers.LSTM(4, return_sequences=True)(x)
        model = keras.Model(inputs, c.dense(2)(x))
    x = c.normal(c.samples, 5, 3, seed=1)
    lengths = c.integers(5, c.samples, seed=3) + 1
    for row, length in zip(x, lengths, strict=True):
        row[length:] = 0
    y = c.normal(c.samples, 5, 2, seed=2)
    return c.train(
        model,
        c.batched((x, y)),
        "mse",
        weighted_metrics=lambda: ["mae"],
        predict=True,
    )


@program("keras_loss/none_for_one_output")
def none_for_one_output(c):
    """One of two outputs has no loss."""
    with c.scope():
        inputs = c.input()
        x = c.dense(8, "tanh")(c.features(inputs))
        model = keras.Model(inputs, [c.dense(2)(x), c.dense(1)(x)])
    y = (c.labels(2), c.labels(1))
    return c.train(model, c.batched((c.x(), y)), ["mse", None])


@program("keras_loss/function_per_output")
def function_per_output(c):
    """A scalar loss and one per sample, for two outputs, with weights."""

    def scalar(y, p):
        return tf.sqrt(tf.reduce_mean(tf.square(y - p)) + 1e-6)

    def each(y, p):
        return tf.reduce_mean(tf.abs(y - p), -1)

    with c.scope():
        inputs = c.input()
        x = c.dense(8, "tanh")(c.features(inputs))
        model = keras.Model(inputs, [c.dense(2)(x), c.dense(1)(x)])
    y = (c.labels(2), c.labels(1))
    return c.train(
        model, c.batched((c.x(), y)), [scalar, each], loss_weights=[1.0, 0.5]
    )


@program("keras_loss/weights_of_steps", tables=(False,))
def weights_of_steps(c):
    """Sample weights of each step of a sequence."""
    with c.scope():
        inputs = keras.Input([5, 3])
        model = keras.Model(inputs, c.dense(2)(inputs))
    x = c.normal(c.samples, 5, 3, seed=1)
    y = c.normal(c.samples, 5, 2, seed=2)
    w = abs(c.normal(c.samples, 5, seed=3))
    return c.train(
        model,
        c.batched((x, y, w)),
        "mse",
        weighted_metrics=lambda: ["mae"],
    )


@program("keras_loss/weights_of_zero")
def weights_of_zero(c):
    """Sample weights that are zero for most samples."""
    w = (c.normal(c.samples, seed=3) > 0.8).astype("float32")
    data = c.batched((c.x(), c.labels(2), w))
    return c.train(
        c.model(), data, "mse", weighted_metrics=lambda: ["mae", "mse"]
    )


@program("keras_loss/class_weight")
def class_weight(c):
    """`class_weight` with Keras's crossentropy."""
    return c.train(
        c.model(3, "softmax"),
        c.data(3, "classes"),
        "sparse_categorical_crossentropy",
        fit={"class_weight": {0: 1.0, 1: 3.0, 2: 0.5}},
    )
