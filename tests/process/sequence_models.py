# SPDX-License-Identifier: Apache-2.0
"""Small models of sequences, as people train them, on either Embedding.

A model is a function of `make`, which makes an Embedding by its name, rows and
other arguments. Ids are 0 where a sample is shorter than others.
"""

import numpy as np
import tensorflow as tf

keras = tf.keras
ITEMS, USERS, LENGTH, DIM, NEGATIVES = 61, 23, 7, 6, 4
BATCH, STEPS = 12, 5
# Uneven on 2 and 4 ranks, and ranks left without samples.
SAMPLES = BATCH * STEPS + 1
INPUTS = {
    "history": [LENGTH],
    "positive": [LENGTH],
    "negative": [LENGTH],
    "candidates": [1 + NEGATIVES],
    "user": [],
}


def samples():
    """Inputs by name, and whether the user liked the first candidate."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, LENGTH + 1, SAMPLES)
    lengths[::BATCH] = LENGTH
    # Samples of no items, all of those of the first of two or four ranks.
    lengths[2 * BATCH : 2 * BATCH + BATCH // 2] = 0
    keep = np.arange(LENGTH) < lengths[:, None]
    items = 1 + rng.zipf(1.3, [SAMPLES, LENGTH + 1]) % (ITEMS - 1)
    data = {
        "history": np.where(keep, items[:, :-1], 0),
        "positive": np.where(keep, items[:, 1:], 0),
        "negative": rng.integers(1, ITEMS, [SAMPLES, LENGTH]),
        "candidates": rng.integers(1, ITEMS, [SAMPLES, 1 + NEGATIVES]),
        "user": rng.integers(0, USERS, SAMPLES).astype(np.int32),
    }
    return data, rng.integers(0, 2, [SAMPLES, 1]).astype(np.float32)


def dense(units, activation=None, seed=0):
    start = keras.initializers.GlorotUniform(seed=seed)
    return keras.layers.Dense(units, activation, kernel_initializer=start)


def attention(seed=1):
    start = keras.initializers.GlorotUniform(seed=seed)
    # Biases of keys have no gradient but rounding errors.
    return keras.layers.MultiHeadAttention(
        2, 4, use_bias=False, kernel_initializer=start
    )


class Block(keras.layers.Layer):
    """Attention and a network of its own for each place."""

    def __init__(self, causal):
        super().__init__()
        self.causal, self.supports_masking = causal, True
        self.attend = attention()
        self.norms = [keras.layers.LayerNormalization() for _ in range(2)]
        self.first_norm, self.second_norm = self.norms
        self.inner, self.outer = dense(8, "relu", 2), dense(DIM, None, 3)

    def call(self, x, mask=None):
        allowed = None if mask is None else mask[:, tf.newaxis, :]
        x = self.first_norm(
            x
            + self.attend(
                x, x, attention_mask=allowed, use_causal_mask=self.causal
            )
        )
        return self.second_norm(x + self.outer(self.inner(x)))


class Sequences(keras.Model):
    """Base: an Embedding of items, of whose rows scores are made too."""

    def __init__(self, make, **options):
        super().__init__()
        self.items = make("items", ITEMS, **options)

    def scores(self, states, name, inputs):
        """Products with the rows of other ids: the table's second use."""
        return tf.einsum(
            "b...d,b...cd->b...c", states, self.items(inputs[name])
        )


class Gru4Rec(Sequences):
    """The next item among sampled ones; padding is masked."""

    loss = "sparse_categorical_crossentropy"

    def __init__(self, make):
        super().__init__(make, mask_zero=True)
        self.gru = keras.layers.GRU(
            DIM,
            kernel_initializer=keras.initializers.GlorotUniform(seed=4),
            recurrent_initializer=keras.initializers.GlorotUniform(seed=5),
        )

    def call(self, inputs):
        state = self.gru(self.items(inputs["history"]))
        return tf.nn.softmax(self.scores(state, "candidates", inputs))

    @staticmethod
    def target(inputs, label):
        return tf.zeros([tf.shape(label)[0]], tf.int32)


class SasRec(Sequences):
    """The next item at every place, against one that is not; masked loss."""

    loss = "binary_crossentropy"

    def __init__(self, make):
        super().__init__(make, mask_zero=True)
        self.places = make("places", LENGTH)
        self.block = Block(causal=True)

    def call(self, inputs):
        rows = self.items(inputs["history"])
        mask = self.items.compute_mask(inputs["history"])
        # Ids without a batch.
        state = self.block(rows + self.places(tf.range(LENGTH)), mask=mask)
        both = tf.stack([inputs["positive"], inputs["negative"]], -1)
        products = self.scores(state, "both", {"both": both})
        found = tf.nn.sigmoid(products)
        found._keras_mask = mask
        return found

    @staticmethod
    def target(inputs, label):
        shape = tf.shape(inputs["positive"])
        return tf.stack([tf.ones(shape), tf.zeros(shape)], -1)


class OwnLoss(SasRec):
    """The same, with a loss that divides by what counts by itself."""

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, **options
    ):
        counts = tf.cast(tf.not_equal(x["history"], 0), tf.float32)
        losses = keras.losses.binary_crossentropy(y, y_pred)
        number = tf.maximum(tf.reduce_sum(counts), 1.0)
        return tf.reduce_sum(losses * counts) / number


class Bert4Rec(Sequences):
    """Hidden items, from both sides; some places count."""

    loss = "sparse_categorical_crossentropy"

    def __init__(self, make):
        super().__init__(make)
        self.places = make("places", LENGTH)
        self.block = Block(causal=False)

    def call(self, inputs):
        ids = inputs["history"]
        hidden = (tf.range(LENGTH) % 3 == 1)[tf.newaxis]
        rows = self.items(tf.where(hidden, tf.zeros_like(ids), ids))
        state = self.block(
            rows + self.places(tf.range(LENGTH)), mask=tf.not_equal(ids, 0)
        )
        asked = tf.concat(
            [
                ids[:, :, tf.newaxis],
                tf.repeat(inputs["candidates"][:, tf.newaxis], LENGTH, 1),
            ],
            2,
        )
        found = tf.nn.softmax(self.scores(state, "asked", {"asked": asked}))
        found._keras_mask = hidden & tf.not_equal(ids, 0)
        return found

    @staticmethod
    def target(inputs, label):
        return tf.zeros(tf.shape(inputs["history"]), tf.int32)


def bst(make):
    """Behaviour sequence transformer, Functional: whether a user clicks."""
    inputs = {
        name: keras.Input(shape, name=name, dtype="int64")
        for name, shape in INPUTS.items()
    }
    items = make("items", ITEMS)
    target = items(inputs["candidates"])[:, :1]
    sequence = keras.layers.Concatenate(1)([items(inputs["history"]), target])
    state = keras.layers.Flatten()(Block(causal=False)(sequence))
    user = make("users", USERS)(inputs["user"])
    joined = keras.layers.Concatenate()([state, user])
    return keras.Model(inputs, dense(1, "sigmoid", 6)(joined))


class Hstu(Sequences):
    """Pointwise attention of ragged histories, with learnt distances."""

    loss = "binary_crossentropy"

    def __init__(self, make):
        super().__init__(make)
        self.distances = make("distances", 2 * LENGTH, dim=1)
        self.users = make("users", USERS)
        self.parts = dense(4 * DIM, "swish", 7)
        self.norm = keras.layers.LayerNormalization()
        self.out, self.top = dense(DIM, None, 8), dense(1, "sigmoid", 9)

    def call(self, inputs):
        ids = tf.RaggedTensor.from_tensor(inputs["history"], padding=0)
        rows = self.items(ids).to_tensor(shape=[None, LENGTH, DIM])
        gate, values, queries, keys = tf.split(self.parts(rows), 4, -1)
        places = tf.range(LENGTH)
        apart = places[:, tf.newaxis] - places + LENGTH - 1
        scores = tf.matmul(queries, keys, transpose_b=True)
        scores = tf.nn.silu(scores + self.distances(apart)[:, :, 0]) / LENGTH
        found = self.out(self.norm(scores @ values) * gate) + rows
        return self.top(tf.reduce_sum(found, 1) + self.users(inputs["user"]))


MODELS = {
    "gru4rec": Gru4Rec,
    "sasrec": SasRec,
    "own_loss": OwnLoss,
    "bert4rec": Bert4Rec,
    "bst": bst,
    "hstu": Hstu,
}
