# SPDX-License-Identifier: Apache-2.0
"""Sequences: masks, recurrent layers, translation, attention."""

import numpy as np
import tensorflow as tf

from tests.numbers.registry import REFUSED
from tests.numbers.registry import WARNED
from tests.numbers.registry import program
from tests.numbers.stepping import stepping

keras = tf.keras
LENGTH = 5


def tokens(c, seed=1):
    """Ids with zeros behind the end of each sequence."""
    found = c.integers(19, c.samples, LENGTH, seed=seed) + 1
    lengths = c.integers(LENGTH, c.samples, seed=seed + 10) + 1
    return np.where(np.arange(LENGTH) < lengths[:, None], found, 0)


def recurrent(name, make):
    def run(c):
        with c.scope():
            seen = keras.Input([LENGTH], dtype="int32")
            x = make()(c.embedding(mask_zero=True)(seen))
            model = keras.Model(seen, c.dense(1)(x))
        data = c.batched((tokens(c), c.labels(1)))
        return c.train(model, data, "mse", predict=True)

    run.__doc__ = f"Padded ids in `{name}`."
    program(f"sequence/recurrent/{name}")(run)


recurrent("LSTM", lambda: keras.layers.LSTM(4))
recurrent("GRU", lambda: keras.layers.GRU(4))
recurrent("SimpleRNN", lambda: keras.layers.SimpleRNN(4))
recurrent(
    "Bidirectional", lambda: keras.layers.Bidirectional(keras.layers.LSTM(3))
)


def translating(c, loss, **how):
    """An encoder and a decoder; labels have padding."""
    with c.scope():
        source = keras.Input([LENGTH], dtype="int32")
        target = keras.Input([LENGTH], dtype="int32")
        _, *state = keras.layers.LSTM(4, return_state=True)(
            c.embedding(mask_zero=True)(source)
        )
        x = keras.layers.LSTM(4, return_sequences=True)(
            c.embedding(mask_zero=True)(target), initial_state=state
        )
        model = how.pop("kind", keras.Model)([source, target], c.dense(20)(x))
    y = tokens(c, 2)
    shifted = np.concatenate([np.ones_like(y[:, :1]), y[:, :-1]], 1)
    shifted = np.where(y > 0, shifted, 0)
    data = c.batched(((tokens(c), shifted), y))
    return c.train(model, data, loss, **how)


@program("sequence/translation")
def translation(c):
    """An encoder and a decoder with masks and Keras's loss."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return translating(
        c, loss, weighted_metrics=lambda: ["sparse_categorical_accuracy"]
    )


def crossentropy(y, p):
    return keras.losses.sparse_categorical_crossentropy(y, p, True)


def masked_loss(y, p):
    """The loss of TensorFlow's tutorial of transformers."""
    mask = tf.cast(y != 0, tf.float32)
    total = tf.reduce_sum(crossentropy(y, p) * mask)
    return tf.math.divide_no_nan(total, tf.reduce_sum(mask))


def masked_accuracy(y, p):
    mask = tf.cast(y != 0, tf.float32)
    right = tf.cast(
        tf.equal(tf.argmax(p, -1), tf.cast(y, tf.int64)), tf.float32
    )
    return tf.math.divide_no_nan(
        tf.reduce_sum(right * mask), tf.reduce_sum(mask)
    )


# Keras 3 multiplies what a function returns by the mask, in one process too.
@program("sequence/translation_masked_loss", kerases=(2,))
def translation_masked(c):
    """The tutorial's masked loss and masked accuracy, compiled."""
    return translating(c, masked_loss, metrics=lambda: [masked_accuracy])


@program("sequence/translation_step")
def translation_step(c):
    """The tutorial's masked loss in a step."""
    return translating(c, None, kind=stepping(masked_loss), evaluate=False)


@program("sequence/transformer")
def transformer(c):
    """Attention with a causal mask."""
    with c.scope():
        seen = keras.Input([LENGTH], dtype="int32")
        x = c.embedding()(seen)
        attention = keras.layers.MultiHeadAttention(2, 2)
        y = attention(x, x, use_causal_mask=True)
        x = keras.layers.LayerNormalization()(keras.layers.Add()([x, y]))
        model = keras.Model(seen, c.dense(20)(x))
    y = np.roll(tokens(c), -1, 1)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return c.train(model, c.batched((tokens(c), y)), loss)


@program("sequence/perplexity", kerases=(2,))
def perplexity(c):
    """A metric that is the exponential of a mean."""

    def perplexity(y, p):
        return tf.exp(tf.reduce_mean(crossentropy(y, p)))

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return translating(c, loss, metrics=lambda: [perplexity])


@program("sequence/masked_language_model")
def masked_language_model(c):
    """Weights choose the tokens that are predicted."""
    with c.scope():
        seen = keras.Input([LENGTH], dtype="int32")
        x = c.dense(8, "tanh")(c.embedding()(seen))
        model = keras.Model(seen, c.dense(20, "softmax")(x))
    y = tokens(c)
    chosen = (c.normal(c.samples, LENGTH, seed=5) > 0.5).astype(np.float32)
    data = c.batched((np.where(chosen > 0, 0, y), y, chosen))
    return c.train(model, data, "sparse_categorical_crossentropy")


# Without tables Keras 3 cannot build such a model under a strategy.
@program("sequence/ragged", tables=(True,))
def ragged(c):
    """Ragged ids, of which each sample has its mean."""
    with c.scope():
        table = c.embedding()

    class Mean(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.table, self.last = table, c.dense(2)

        def call(self, x):
            return self.last(tf.reduce_mean(table_of(self.table, x), 1))

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = Mean()

        def call(self, x, training=False):
            return self.inner(x)

    rows = [list(row[row > 0]) for row in tokens(c)]
    ids = tf.ragged.constant(rows, dtype=tf.int32, ragged_rank=1)
    with c.scope():
        model = Model()
    if c.even:
        data = tf.data.Dataset.from_tensor_slices((ids, c.labels()))
        data = data.batch(8)
    else:
        data = c.batched((ids, c.labels()))
    return c.train(model, data, "mse")


@program(
    "sequence/ragged_labels",
    WARNED,
    tables=(False,),
    says="(?i)no rule|gather_batch",
)
def ragged_labels(c):
    """The mean over all labels, of which samples have several."""

    def loss(y, p, labels):
        each = tf.gather(tf.reduce_mean(p, -1), labels.value_rowids())
        return tf.reduce_mean(tf.square(labels.flat_values - each))

    values = c.normal(c.samples, LENGTH, seed=7)
    rows = [list(row[: 1 + i % LENGTH]) for i, row in enumerate(values)]
    ragged_rows = tf.ragged.constant(rows, dtype=tf.float32)
    with c.scope():
        x = keras.Input([6])
        model = stepping(loss)(x, c.dense(2)(x))
    arrays = (c.x(), c.labels(), ragged_rows)
    if c.even:
        data = tf.data.Dataset.from_tensor_slices(arrays).batch(8)
    else:
        data = c.batched(arrays)
    return c.train(model, data, evaluate=False)


def table_of(table, x):
    """Rows of ragged ids; Keras 3's own layer takes flat ids only."""
    if hasattr(keras, "ops") and isinstance(table, keras.layers.Embedding):
        return x.with_flat_values(table(x.flat_values))
    return table(x)


@program("sequence/time_distributed", tables=(False,))
def time_distributed(c):
    """A dense layer in `TimeDistributed`."""
    with c.scope():
        x = keras.Input([LENGTH, 3])
        inner = keras.layers.TimeDistributed(c.dense(2))
        model = keras.Model(x, inner(x))
    x = c.normal(c.samples, LENGTH, 3, seed=1)
    y = c.normal(c.samples, LENGTH, 2, seed=2)
    return c.train(model, c.batched((x, y)), "mse", metrics=lambda: ["mae"])


@program("sequence/convolution", tables=(False,))
def convolution(c):
    """A convolution over the steps."""
    with c.scope():
        x = keras.Input([LENGTH, 3])
        hidden = keras.layers.Conv1D(4, 3, activation="relu")(x)
        hidden = keras.layers.GlobalMaxPooling1D()(hidden)
        model = keras.Model(x, c.dense(1)(hidden))
    data = c.batched((c.normal(c.samples, LENGTH, 3), c.labels(1)))
    return c.train(model, data, "mse", predict=True)


@program("sequence/images", tables=(False,))
def images(c):
    """Convolutions and poolings of images."""
    layers = keras.layers
    with c.scope():
        x = keras.Input([9, 9, 3])
        hidden = layers.Conv2D(4, 3, activation="relu")(x)
        hidden = layers.MaxPooling2D(2)(hidden)
        hidden = layers.DepthwiseConv2D(2, padding="same")(hidden)
        hidden = layers.AveragePooling2D(2)(hidden)
        hidden = layers.Conv2DTranspose(2, 2)(hidden)
        hidden = layers.Flatten()(hidden)
        model = keras.Model(x, c.dense(1)(hidden))
    data = c.batched((c.normal(c.samples, 9, 9, 3), c.labels(1)))
    return c.train(model, data, "mse", predict=True)


@program(
    "sequence/stateful",
    REFUSED,
    kerases=(3,),
    tables=(False,),
    batches=("even",),
    says="(?i)stateful",
)
@program(
    "sequence/stateful_of_tf_keras",
    REFUSED,
    kerases=(2,),
    tables=(False,),
    batches=("even",),
    says="(?i)stateful",
    alone=REFUSED,
)
def stateful(c):
    """A stateful recurrent layer, which has one state for each sample."""
    with c.scope():
        x = keras.Input(batch_shape=[8, LENGTH, 3])
        hidden = keras.layers.LSTM(4, stateful=True)(x)
        model = keras.Model(x, c.dense(1)(hidden))
    data = c.batched((c.normal(c.samples, LENGTH, 3), c.labels(1)))
    return c.train(model, data, "mse", evaluate=False)
