# SPDX-License-Identifier: Apache-2.0
"""Recommenders on tables of users and items."""

import numpy as np
import tensorflow as tf

import tfdist_ext
from tests.numbers.programs.guides import descend
from tests.numbers.registry import WARNED
from tests.numbers.registry import program

keras = tf.keras
NAMES = ("user", "item", "place")


def ids(c, names=NAMES):
    """A dictionary of ids, one of each name for every sample."""
    return {
        name: c.integers(20, c.samples, 1, seed=i)
        for i, name in enumerate(names)
    }


def inputs(names=NAMES):
    return {name: keras.Input([1], name=name, dtype="int32") for name in names}


def vectors(c, given, units=4):
    """A vector of each feature."""
    flat = keras.layers.Flatten
    return [flat()(c.embedding(units=units)(x)) for x in given.values()]


def ranked(c, model, x, loss="binary_crossentropy", y=None):
    y = c.labels(1, "binary") if y is None else y
    return c.train(
        model,
        c.batched((x, y)),
        loss,
        metrics=lambda: ["mse", keras.metrics.AUC(name="auc")],
        predict=True,
    )


@program("recommender/matrix_factorization")
def matrix_factorization(c):
    """Ratings as the product of a user's and an item's vector."""
    with c.scope():
        given = inputs(("user", "item"))
        dot = keras.layers.Dot(1)(vectors(c, given))
        model = keras.Model(given, dot)
    data = c.batched((ids(c, ("user", "item")), c.labels(1)))
    return c.train(model, data, "mse", metrics=lambda: ["mae"])


@program("recommender/wide_and_deep")
def wide_and_deep(c):
    """A linear part beside a network, with synchronized normalization."""
    with c.scope():
        given = inputs()
        wide = keras.layers.Add()(vectors(c, given, 1))
        deep = keras.layers.Concatenate()(vectors(c, given))
        deep = keras.layers.BatchNormalization(synchronized=True)(deep)
        deep = c.dense(1)(c.dense(8, "relu")(deep))
        both = keras.layers.Add()([wide, deep])
        model = keras.Model(given, keras.layers.Activation("sigmoid")(both))
    return ranked(c, model, ids(c))


@program("recommender/wide_and_deep_of_raw_columns")
def wide_and_deep_of_raw_columns(c):
    """Raw columns far off zero, normalized by the whole batch."""
    far = np.array([100.0, -100.0, 0.0], np.float32)
    columns = c.normal(c.samples, 3, seed=9) + far
    # Keras's own synchronized variance loses digits here, in one process too.
    several = c.strategy is not None and c.strategy.num_replicas_in_sync > 1
    norm = {"synchronized": several, "momentum": 0.5}
    with c.scope():
        given = inputs()
        raw = keras.Input([3], name="raw")
        wide = keras.layers.Add()(vectors(c, given, 1))
        deep = [keras.layers.BatchNormalization(**norm)(raw)]
        deep = keras.layers.Concatenate()(deep + vectors(c, given))
        deep = c.dense(1)(c.dense(8, "tanh")(deep))
        both = keras.layers.Add()([wide, deep])
        model = keras.Model(
            {**given, "raw": raw}, keras.layers.Activation("sigmoid")(both)
        )
    return ranked(c, model, {**ids(c), "raw": columns})


@program("recommender/deep_fm")
def deep_fm(c):
    """Factorization machine beside a network."""

    class Pairs(keras.layers.Layer):
        def call(self, each):
            stacked = tf.stack(each, 1)
            square = tf.square(tf.reduce_sum(stacked, 1))
            return 0.5 * tf.reduce_sum(
                square - tf.reduce_sum(tf.square(stacked), 1), 1, True
            )

        def compute_output_shape(self, shapes):
            return (shapes[0][0], 1)

    with c.scope():
        given = inputs()
        linear = keras.layers.Add()(vectors(c, given, 1))
        each = vectors(c, given)
        deep = keras.layers.Concatenate()(each)
        deep = c.dense(1)(c.dense(8, "relu")(deep))
        both = keras.layers.Add()([linear, Pairs()(each), deep])
        model = keras.Model(given, keras.layers.Activation("sigmoid")(both))
    return ranked(c, model, ids(c))


@program("recommender/dcn")
def dcn(c):
    """Cross layers of all features."""

    class Cross(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner = c.dense(12)

        def call(self, both):
            start, x = both
            return start * self.inner(x) + x

        def compute_output_shape(self, shapes):
            return shapes[1]

    with c.scope():
        given = inputs()
        start = x = keras.layers.Concatenate()(vectors(c, given))
        for _ in range(2):
            x = Cross()((start, x))
        model = keras.Model(given, c.dense(1, "sigmoid")(x))
    return ranked(c, model, ids(c))


@program("recommender/dlrm")
def dlrm(c):
    """Numbers and ids, with products of all pairs."""

    class Products(keras.layers.Layer):
        def call(self, each):
            stacked = tf.stack(each, 1)
            products = tf.matmul(stacked, stacked, transpose_b=True)
            return tf.reshape(products, [-1, 16])

        def compute_output_shape(self, shapes):
            return (shapes[0][0], 16)

    with c.scope():
        given = inputs()
        numbers = keras.Input([5], name="numbers")
        bottom = c.dense(4, "relu")(numbers)
        products = Products()([bottom, *vectors(c, given)])
        x = keras.layers.Concatenate()([bottom, products])
        model = keras.Model(
            {**given, "numbers": numbers},
            c.dense(1, "sigmoid")(c.dense(8, "relu")(x)),
        )
    return ranked(c, model, {**ids(c), "numbers": c.normal(c.samples, 5)})


@program("recommender/autoint")
def autoint(c):
    """Attention over the features."""
    with c.scope():
        given = inputs()
        each = [keras.layers.Reshape([1, 4])(v) for v in vectors(c, given)]
        x = keras.layers.Concatenate(1)(each)
        x = keras.layers.MultiHeadAttention(2, 2)(x, x)
        x = keras.layers.Flatten()(x)
        model = keras.Model(given, c.dense(1, "sigmoid")(x))
    return ranked(c, model, ids(c))


@program("recommender/din")
def din(c):
    """Attention of an item to the user's history, with padding."""

    class Attention(keras.layers.Layer):
        def call(self, all_three):
            history, item, seen = all_three
            score = tf.reduce_sum(history * item, -1)
            score += -1e9 * tf.cast(tf.equal(seen, 0), tf.float32)
            weight = tf.nn.softmax(score)[..., None]
            return tf.reduce_sum(history * weight, 1)

        def compute_output_shape(self, shapes):
            return (shapes[0][0], shapes[0][-1])

    with c.scope():
        item = keras.Input([1], name="item", dtype="int32")
        seen = keras.Input([4], name="seen", dtype="int32")
        table = c.embedding()
        x = Attention()((table(seen), table(item), seen))
        x = keras.layers.Concatenate()([x, keras.layers.Flatten()(table(item))])
        model = keras.Model(
            {"item": item, "seen": seen}, c.dense(1, "sigmoid")(x)
        )
    x = ids(c, ("item",)) | {"seen": c.integers(20, c.samples, 4, seed=9)}
    return ranked(c, model, x)


@program("recommender/mmoe")
def mmoe(c):
    """Two tasks on gated experts."""
    with c.scope():
        given = inputs()
        x = keras.layers.Concatenate()(vectors(c, given))
        experts = [c.dense(4, "relu")(x) for _ in range(2)]
        outputs = {}
        for task in ("click", "buy"):
            gates = c.dense(8, "sigmoid")(x)
            both = keras.layers.Concatenate()(experts)
            mixed = keras.layers.Multiply()([both, gates])
            outputs[task] = c.dense(1, "sigmoid", name=task)(mixed)
        model = keras.Model(given, outputs)
    y = {"click": c.labels(1, "binary"), "buy": c.labels(1, "binary")[::-1]}
    return c.train(
        model,
        c.batched((ids(c), y.copy() | {"buy": y["buy"].copy()})),
        {"click": "binary_crossentropy", "buy": "binary_crossentropy"},
        loss_weights={"click": 1.0, "buy": 0.5},
    )


class TwoTowers(keras.Model):
    """Users and items; each pair against the items of its batch."""

    def __init__(self, c):
        super().__init__()
        self.users, self.items = c.embedding(), c.embedding()
        self.user, self.item = c.dense(4), c.dense(4)

    def call(self, x):
        u = self.user(self.users(x["user"])[:, 0])
        return u, self.item(self.items(x["item"])[:, 0])

    def value(self, u, i):
        logits = tf.matmul(u, i, transpose_b=True)
        labels = tf.range(tf.shape(u)[0])
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        return tf.reduce_mean(each)

    def train_step(self, data):
        (x,) = data
        with tf.GradientTape() as tape:
            value = self.value(*self(x, training=True))
        descend(self, self.optimizer, value, tape)
        return {"loss": value}


def two_towers(c, kind):
    with c.scope():
        model = kind(c)
    data = c.batched((ids(c, ("user", "item")),))
    return c.train(model, data, evaluate=False)


@program(
    "recommender/two_towers",
    WARNED,
    says="(?i)gather_batch",
    batches=("even",),  # TensorFlow's op refuses to compare no samples
)
def two_towers_plain(c):
    """Two towers with in-batch negatives."""
    return two_towers(c, TwoTowers)


@program("recommender/two_towers_gathered")
def two_towers_gathered(c):
    """Two towers with `gather_batch`."""

    class Gathered(TwoTowers):
        def value(self, u, i):
            return super().value(*tfdist_ext.losses.gather_batch((u, i)))

    return two_towers(c, Gathered)


@program("recommender/two_towers_retrieval")
def two_towers_retrieval(c):
    """Two towers with `tfdist_ext.losses.Retrieval`."""

    class Task(TwoTowers):
        def value(self, u, i):
            return tfdist_ext.losses.Retrieval()(u, i) / 8.0

    return two_towers(c, Task)


@program("recommender/sampled_softmax")
def sampled_softmax(c):
    """YoutubeDNN: `tf.nn.sampled_softmax_loss` with a seed."""
    return _sampled(c, 7)


@program(
    "recommender/sampled_softmax_without_seed",
    WARNED,
    says="(?i)sampled_softmax|candidate",
    drawn=True,
)
def sampled_softmax_without_seed(c):
    """The same, whose seed TensorFlow makes of the size of the graph."""
    return _sampled(c, None)


def _sampled(c, seed):
    class Sampled(keras.Model):
        def __init__(self):
            super().__init__()
            self.table, self.hidden = c.embedding(), c.dense(4)
            start = keras.initializers.RandomNormal(seed=3)
            self.classes = self.add_weight(
                name="classes", shape=(20, 4), initializer=start
            )

        def call(self, x):
            return self.hidden(self.table(x)[:, 0])

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                each = tf.nn.sampled_softmax_loss(
                    tf.convert_to_tensor(self.classes),
                    tf.zeros([20]),
                    tf.cast(y, tf.int64),
                    self(x, training=True),
                    num_sampled=4,
                    num_classes=20,
                    seed=seed,
                )
                value = tf.reduce_mean(each)
            descend(self, self.optimizer, value, tape)
            return {"loss": value}

    with c.scope():
        model = Sampled()
    x = c.integers(20, c.samples, 1, seed=0)
    y = c.integers(20, c.samples, 1, seed=1)
    return c.train(model, c.batched((x, y)), evaluate=False)


@program("recommender/bpr")
def bpr(c):
    """Pairwise ranking of one item against one that was not chosen."""

    class Bpr(keras.Model):
        def __init__(self):
            super().__init__()
            self.users, self.items = c.embedding(), c.embedding()

        def call(self, x):
            u = self.users(x["user"])
            right, wrong = (self.items(x[k]) for k in ("item", "place"))
            return tf.reduce_sum(u * (right - wrong), [1, 2])

        def train_step(self, data):
            (x,) = data
            with tf.GradientTape() as tape:
                found = self(x, training=True)
                value = -tf.reduce_mean(tf.math.log_sigmoid(found))
            descend(self, self.optimizer, value, tape)
            right = tf.cast(found > 0, tf.float32)
            return {"loss": value, "right": tf.reduce_mean(right)}

    with c.scope():
        model = Bpr()
    return c.train(model, c.batched((ids(c),)), evaluate=False)


@program("recommender/sas_rec")
def sas_rec(c):
    """The next item of a sequence, with padding."""
    with c.scope():
        seen = keras.Input([5], dtype="int32")
        x = c.embedding(mask_zero=True)(seen)
        x = keras.layers.GRU(4, return_sequences=True)(x)
        model = keras.Model(seen, c.dense(20)(x))
    x = c.integers(20, c.samples, 5, seed=1)
    lengths = c.integers(5, c.samples, seed=3) + 1
    for row, length in zip(x, lengths, strict=True):
        row[length:] = 0
    y = np.roll(x, -1, 1)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return c.train(model, c.batched((x, y)), loss)


@program("recommender/bag_of_ids")
def bag_of_ids(c):
    """The mean of a sample's vectors."""
    with c.scope():
        seen = keras.Input([5], dtype="int32")
        x = keras.layers.GlobalAveragePooling1D()(c.embedding()(seen))
        model = keras.Model(seen, c.dense(1, "sigmoid")(x))
    return ranked(c, model, c.integers(20, c.samples, 5, seed=1))
