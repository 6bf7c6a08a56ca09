# SPDX-License-Identifier: Apache-2.0
"""Trains models of sequences with our Embedding, and with Keras's.

A case is "model/placement/optimizer", with "/regularized" if the rows that
are looked up are, which Keras's layer cannot.
"""

import numpy as np
import tensorflow as tf
from sequence_models import BATCH
from sequence_models import DIM
from sequence_models import MODELS
from sequence_models import samples

import tfdist_ext

keras = tf.keras


def first_rows(name, rows, dim):
    seed = sum(map(ord, name))
    return np.random.default_rng(seed).normal(0, 0.3, [rows, dim])


def maker(kind, **more):
    """Makes Embeddings that start equal, and keeps them by name."""
    made = {}

    def make(name, rows, dim=DIM, **options):
        start = keras.initializers.Constant(
            first_rows(name, rows, dim).astype(np.float32)
        )
        if kind is keras.layers.Embedding:
            start = _from_matrix(start.value)
        made[name] = kind(
            rows,
            dim,
            embeddings_initializer=start,
            name=name,
            **options,
            **more,
        )
        return made[name]

    return make, made


def _from_matrix(matrix):
    return lambda shape, dtype=None, **_: tf.constant(matrix, dtype)


def train(model, case, made, table):
    """Fits, evaluates and predicts; everything that must agree."""
    kind, _, rule = case.split("/")[:3]
    inputs, labels = samples()
    target = getattr(MODELS[kind], "target", lambda inputs, label: label)
    dataset = tf.data.Dataset.from_tensor_slices((inputs, labels))
    dataset = dataset.batch(BATCH).map(lambda x, y: (x, target(x, y)))
    optimizer = {
        "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.5),
        "adam": lambda: keras.optimizers.Adam(0.02),
    }[rule]()
    loss = getattr(MODELS[kind], "loss", "binary_crossentropy")
    model.compile(optimizer, loss)
    history = model.fit(dataset, epochs=1, verbose=0).history
    result = {
        **{name: np.array(values) for name, values in history.items()},
        "val": np.array(model.evaluate(dataset, verbose=0)),
        "predict": model.predict(dataset.map(lambda x, y: x), verbose=0),
    }
    for name, layer in made.items():
        result[f"table/{name}"] = table(layer)
    others = [w for w in model.weights if "embeddings" not in w.name]
    for index, weight in enumerate(others):
        result[f"dense/{index}"] = np.array(weight)
    return result


def hybrid(strategy, case):
    """Our strategy and layer."""
    kind, placement = case.split("/")[:2]
    options = {"sharding": placement}
    if case.endswith("/regularized"):
        options["embeddings_regularizer"] = keras.regularizers.L2(0.001)
    with strategy.scope():
        make, made = maker(tfdist_ext.layers.Embedding, **options)
        model = MODELS[kind](make)
        found = train(model, case, made, strategy.gather_table)
    return found


def of_stock(case):
    """A case with the same `stock`, which has one kind of table."""
    kind, _, rule = case.split("/")
    return f"{kind}/any/{rule}"


def stock(strategy, case, initial):
    """Keras's layer and optimizer, in one process."""
    assert strategy is None
    make, made = maker(keras.layers.Embedding)
    model = MODELS[case.split("/")[0]](make)
    return train(model, case, made, lambda layer: np.array(layer.embeddings))
