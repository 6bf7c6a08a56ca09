# SPDX-License-Identifier: Apache-2.0
"""Programs with several models: in turns, with common layers, by copies."""

import numpy as np
import tensorflow as tf

from tests.numbers.registry import program

keras = tf.keras
KERAS_3 = hasattr(keras, "ops")


def compiled(c, model, momentum=0.0):
    with c.scope():
        how = {"jit_compile": False} if KERAS_3 else {}
        optimizer = keras.optimizers.SGD(0.1, momentum=momentum)
        model.compile(optimizer, "mse", **how)
    return model


def with_logs(history, name):
    return {f"{name}/{k}": v for k, v in history.history.items()}


def towers(c):
    """Two models whose outputs are those of one layer with tables."""
    with c.scope():
        inputs = c.input()
        common = c.dense(8, "tanh")(c.features(inputs))
        return [keras.Model(inputs, c.dense(2)(common)) for _ in range(2)]


def fitted_in_turns(c, models):
    """Logs and weights of two epochs of each model."""
    found = {}
    for epoch in range(2):
        for i, model in enumerate(models):
            history = model.fit(c.data(), verbose=0, shuffle=False)
            found |= with_logs(history, f"{i}/{epoch}")
    return found | c.weights(*models)


@program("models/in_turns")
def in_turns(c):
    """Two models with layers of the same names, batch by batch in turns."""
    models = []
    for _ in range(2):
        keras.backend.clear_session()
        models.append(compiled(c, c.model()))
    x, y = c.x(), c.labels()
    found = {}
    for step in range(3):
        part = slice(0, 9 - step)
        for i, model in enumerate(models):
            loss = model.train_on_batch(x[part], (i + 1) * y[part])
            found[f"loss/{i}/{step}"] = np.ravel(loss)[0]
    return found | c.weights(*models)


@program("models/in_turns_by_fit")
def in_turns_by_fit(c):
    """Two models, epoch by epoch in turns, each with momentum."""
    models = [compiled(c, c.model(), momentum=0.9) for _ in range(2)]
    return fitted_in_turns(c, models)


@program("models/common_layers")
def common_layers(c):
    """Two models with common layers, trained in turns."""
    return fitted_in_turns(c, [compiled(c, each) for each in towers(c)])


@program("models/fine_tuned")
def fine_tuned(c):
    """A model is trained; its layers are frozen under a new last layer."""
    first, second = towers(c)
    found = with_logs(compiled(c, first).fit(c.data(), verbose=0), "first")
    for layer in first.layers[:-1]:
        layer.trainable = False
    history = compiled(c, second).fit(c.data(), verbose=0, shuffle=False)
    return found | with_logs(history, "second") | c.weights(first, second)


@program("models/unfrozen")
def unfrozen(c):
    """Frozen layers are trained after a second `compile`."""
    model = c.model()
    for layer in model.layers[:-1]:
        layer.trainable = False
    compiled(c, model).fit(c.data(), verbose=0, shuffle=False)
    for layer in model.layers:
        layer.trainable = True
    history = compiled(c, model).fit(c.data(), verbose=0, shuffle=False)
    return with_logs(history, "second") | c.weights(model)


@program("models/clone", tables=(False,))
def clone(c):
    """A clone with copied weights is trained beside the original."""
    model = compiled(c, c.model())
    with c.scope():
        other = keras.models.clone_model(model)
    other.set_weights(model.get_weights())
    compiled(c, other).fit(c.data(), verbose=0, shuffle=False)
    history = model.fit(c.data(), verbose=0, shuffle=False)
    return with_logs(history, "fit") | c.weights(model, other)


@program("models/one_within_another")
def one_within_another(c):
    """A model as a layer of another one; both are trained."""
    inner = compiled(c, c.model(4))
    with c.scope():
        inputs = c.input()
        outer = keras.Model(inputs, c.dense(2)(inner(inputs)))
    found = with_logs(
        compiled(c, outer).fit(c.data(), verbose=0, shuffle=False), "outer"
    )
    history = inner.fit(c.data(4), verbose=0, shuffle=False)
    return found | with_logs(history, "inner") | c.weights(inner, outer)


@program("models/persistent_tape")
def persistent_tape(c):
    """A step with two losses and one persistent tape."""

    class Own(keras.Model):
        def train_step(self, data):
            x, y = data[:2]
            with tf.GradientTape(persistent=True) as tape:
                out = self(x, training=True)
                near = tf.reduce_mean(tf.square(y - out))
                small = tf.reduce_mean(tf.abs(out))
            variables = self.trainable_variables
            both = [
                a + 0.1 * b
                if not isinstance(a, tf.IndexedSlices)
                else tf.IndexedSlices(
                    a.values + 0.1 * b.values, a.indices, a.dense_shape
                )
                for a, b in zip(
                    tape.gradient(near, variables),
                    tape.gradient(small, variables),
                    strict=True,
                )
            ]
            del tape
            self.optimizer.apply_gradients(zip(both, variables, strict=True))
            return {"near": near, "small": small}

    model = c.model(kind=Own)
    with c.scope():
        model.compile(keras.optimizers.SGD(0.1))
    history = model.fit(c.data(), epochs=2, verbose=0, shuffle=False)
    return with_logs(history, "fit") | c.weights(model)
