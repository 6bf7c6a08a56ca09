# SPDX-License-Identifier: Apache-2.0
"""Trains small models on fixed data, on any number of ranks.

A case is "placement/optimizer", with "/regularized" if it has regularizers.
`stock` builds the same model from stock TensorFlow ops, in one process.
"""

import functools

import numpy as np
import tensorflow as tf

import tfdist_ext
from tfdist_ext.layers import FullSparse

keras = tf.keras
ROWS, UNITS, IDS, BATCH, STEPS = 97, 6, 5, 24, 16
TAIL = (7, 2)  # uneven on 2 and 4 ranks, and two ranks of 4 left empty


class StockSparse(keras.layers.Layer):
    """The twin of FullSparse from stock ops."""

    def __init__(self, initial, regularizers, **kwargs):
        super().__init__(autocast=False, **kwargs)
        self.initial = initial
        self.regularizers = regularizers

    def build(self, input_shape):
        self.kernel = self.add_weight(
            name="kernel",
            shape=self.initial.shape,
            initializer=lambda shape, dtype=None, **_: tf.constant(
                self.initial
            ),
            regularizer=self.regularizers.get("kernel_regularizer"),
        )
        self.bias = self.add_weight(
            name="bias",
            shape=(UNITS,),
            initializer=keras.initializers.Constant(1 / UNITS),
            regularizer=self.regularizers.get("bias_regularizer"),
        )
        self.built = True

    def call(self, inputs):
        kernel = tf.convert_to_tensor(self.kernel)
        if isinstance(inputs, tf.SparseTensor):
            pooled = tf.sparse.sparse_dense_matmul(inputs, kernel)
        else:
            # Not tf.gather: Keras 3 squares the gradients of a repeated id
            # one by one, which is another algorithm than Adam's.
            counts = tf.reduce_sum(tf.one_hot(inputs, ROWS), 1)
            pooled = counts @ kernel
        return pooled + self.bias

    def compute_output_shape(self, input_shape):
        return (input_shape[0], UNITS)


def samples(count, seed):
    """Ids with repeats, sparse rows with values and empty ones, labels."""
    rng = np.random.default_rng(seed)
    ids = rng.zipf(1.3, [count, IDS]) % ROWS
    mask = rng.random([count, ROWS]) < 0.05
    mask[::7] = False
    dense = np.where(mask, rng.normal(size=mask.shape), 0)
    labels = rng.normal(size=[count, 1])
    return (
        ids.astype(np.int64),
        dense.astype(np.float32),
        labels.astype(np.float32),
    )


@functools.cache
def dataset():
    """Global batches: full ones, then the tail."""
    ids, dense, labels = samples(BATCH * STEPS + sum(TAIL), 1)
    whole = tf.data.Dataset.from_tensor_slices((ids, dense, labels))

    def batched(skip, count, size):
        part = whole.skip(skip).take(count).batch(size)
        return part.map(
            lambda i, d, y: (
                {"ids": i, "sparse": tf.sparse.from_dense(d)},
                y,
            )
        )

    result = batched(0, BATCH * STEPS, BATCH)
    skip = BATCH * STEPS
    for size in TAIL:
        result = result.concatenate(batched(skip, size, size))
        skip += size
    return result


def build(make_layer):
    """Two sparse layers, one on ids, one on a SparseTensor."""
    ids = keras.Input([IDS], dtype="int64", name="ids")
    sparse = keras.Input([ROWS], sparse=True, name="sparse")
    hidden = keras.layers.Concatenate()(
        [make_layer("by_id")(ids), make_layer("by_value")(sparse)]
    )
    hidden = keras.layers.Dense(
        8,
        activation="tanh",
        kernel_initializer=keras.initializers.GlorotUniform(seed=5),
    )(hidden)
    output = keras.layers.Dense(
        1, kernel_initializer=keras.initializers.GlorotUniform(seed=6)
    )(hidden)
    return keras.Model({"ids": ids, "sparse": sparse}, output)


def optimizer(name):
    """By name; "keras_..." are Keras's own."""
    kind = {"sgd": "SGD", "adagrad": "Adagrad", "adam": "Adam"}
    if name.startswith("keras_"):
        return getattr(keras.optimizers, kind[name[6:]])(0.05)
    kind["row_wise_adagrad"] = "RowWiseAdagrad"
    return getattr(tfdist_ext.optimizers, kind[name])(0.05)


def regularizers(case):
    """Of the sparse layers; a partitioned kernel cannot have one."""
    found = {}
    if case.endswith("/regularized"):
        found["bias_regularizer"] = keras.regularizers.L2(0.1)
        if case.startswith("replicated"):
            found["kernel_regularizer"] = keras.regularizers.L2(0.01)
    return found


def train(model, case):
    """Fits one epoch and returns everything that must agree.

    How a model is evaluated depends on where its weights are, not on the rule
    that trained them: once for each placement.
    """
    history = model.fit(dataset(), epochs=1, verbose=0).history
    result = {name: np.array(values) for name, values in history.items()}
    if case.split("/")[1].removeprefix("keras_") == "sgd":
        metrics = model.evaluate(dataset(), verbose=0, return_dict=True)
        result |= {f"val_{name}": np.array(v) for name, v in metrics.items()}
        inputs = dataset().map(lambda x, y: x)
        result["predict"] = model.predict(inputs, verbose=0)
    # Not by their names, which tell how many models came before.
    for place, layer in enumerate(model.layers[-2:]):
        for index, weight in enumerate(layer.weights):
            result[f"dense/{place}/{index}"] = np.array(weight)
    return result


def hybrid(strategy, case):
    """Our strategy and layers."""
    placement, name = case.split("/")[:2]
    with strategy.scope():
        model = build(
            lambda layer: FullSparse(
                UNITS,
                ROWS,
                sharding=placement,
                kernel_initializer=keras.initializers.RandomNormal(
                    0.0, 0.3, seed=3
                ),
                name=layer,
                **regularizers(case),
            )
        )
        model.compile(optimizer(name), "mse", metrics=["mae"])

    def tables(when):
        return {
            f"{when}/{layer}": strategy.gather_table(model.get_layer(layer))
            for layer in ("by_id", "by_value")
        }

    return {**tables("initial"), **train(model, case), **tables("final")}


def of_stock(case):
    """A case with the same `stock`: only kernel regularizers ask where."""
    placement, name, *rest = case.split("/")
    if not rest:
        placement = "row"
    return "/".join([placement, name.removeprefix("keras_"), *rest])


def stock(strategy, case, initial):
    """The same from stock ops, one process, stock optimizer."""
    assert strategy is None
    model = build(
        lambda layer: StockSparse(
            initial[f"initial/{layer}"], regularizers(case), name=layer
        )
    )
    model.compile(
        optimizer(f"keras_{case.split('/')[1]}"), "mse", metrics=["mae"]
    )
    result = train(model, case)
    for layer in ("by_id", "by_value"):
        kernel = model.get_layer(layer).kernel
        result[f"final/{layer}"] = np.array(kernel)
    return result
