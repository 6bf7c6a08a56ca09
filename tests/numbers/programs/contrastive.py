# SPDX-License-Identifier: Apache-2.0
"""Contrastive and metric learning."""

import tensorflow as tf

import tfdist_ext
from tests.numbers.programs.guides import descend
from tests.numbers.registry import WARNED
from tests.numbers.registry import program
from tests.numbers.stepping import stepped

keras = tf.keras
IN_BATCH = "(?i)gather_batch"


def normalised(x):
    return x / tf.sqrt(tf.reduce_sum(x * x, -1, keepdims=True) + 1e-6)


def supervised(y, p, temperature=0.5):
    """The supervised contrastive loss of a batch."""
    z = normalised(p)
    logits = tf.matmul(z, z, transpose_b=True) / temperature
    own = tf.eye(tf.shape(z)[0])
    alike = tf.cast(y[:, None] == y[None], tf.float32) * (1 - own)
    rest = logits - 1e9 * own
    log = logits - tf.reduce_logsumexp(rest, 1, keepdims=True)
    each = tf.math.divide_no_nan(
        tf.reduce_sum(log * alike, 1), tf.reduce_sum(alike, 1)
    )
    return -tf.reduce_mean(each)


@program("contrastive/supervised_compiled")
def supervised_compiled(c):
    """The supervised contrastive loss, compiled."""

    def loss(y, p):
        return supervised(tf.reshape(y, [-1]), p)

    return c.train(c.model(4), c.data(3, "classes"), loss)


@program("contrastive/supervised_step", WARNED, says=IN_BATCH)
def supervised_step(c):
    """The supervised contrastive loss in a step."""
    return stepped(
        c,
        lambda y, p: supervised(tf.reshape(y, [-1]), p),
        outputs=4,
        kind="classes",
    )


@program("contrastive/supervised_gathered")
def supervised_gathered(c):
    """The same with `gather_batch`, as the remedy says."""

    def value(y, p):
        y, p = tfdist_ext.losses.gather_batch((tf.reshape(y, [-1]), p))
        return supervised(y, p)

    return stepped(c, value, outputs=4, kind="classes")


def info_nce(a, b):
    logits = tf.matmul(normalised(a), normalised(b), transpose_b=True) / 0.3
    labels = tf.range(tf.shape(a)[0])
    each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    return tf.reduce_mean(each)


class TwoViews(keras.Model):
    """Two views of every sample, told from those of all others."""

    def views(self, x):
        return self(x, training=True), self(x * 0.9 + 0.1, training=True)

    def value(self, a, b):
        return info_nce(a, b) + info_nce(b, a)

    def train_step(self, data):
        (x,) = data
        with tf.GradientTape() as tape:
            value = self.value(*self.views(x))
        descend(self, self.optimizer, value, tape)
        return {"loss": value}


def two_views(c, kind):
    data = c.batched((c.normal(c.samples, 6, seed=1),))
    return c.train(c.model(4, kind=kind), data, evaluate=False)


@program(
    "contrastive/simclr",
    WARNED,
    tables=(False,),
    says=IN_BATCH,
    # Without samples TensorFlow takes no softmax over no negatives.
    batches=("even",),
)
def simclr(c):
    """SimCLR: negatives of the batch."""
    return two_views(c, TwoViews)


@program("contrastive/simclr_gathered", tables=(False,))
def simclr_gathered(c):
    """SimCLR with `gather_batch`."""

    class Gathered(TwoViews):
        def value(self, a, b):
            return super().value(*tfdist_ext.losses.gather_batch((a, b)))

    return two_views(c, Gathered)


@program("contrastive/byol", tables=(False,))
def byol(c):
    """BYOL: one view predicts the other, without negatives."""

    class Byol(TwoViews):
        def value(self, a, b):
            b = tf.stop_gradient(normalised(b))
            return 2 - 2 * tf.reduce_mean(tf.reduce_sum(normalised(a) * b, -1))

    return two_views(c, Byol)


@program("contrastive/barlow_twins_step", tables=(False,))
def barlow_twins(c):
    """Barlow twins: a matrix over the batch."""

    class Barlow(TwoViews):
        def value(self, a, b):
            a, b = (z - tf.reduce_mean(z, 0) for z in (a, b))
            count = tf.cast(tf.maximum(tf.shape(a)[0], 1), tf.float32)
            matrix = tf.matmul(a, b, transpose_a=True) / count
            return tf.reduce_mean(tf.square(matrix - tf.eye(4)))

    return two_views(c, Barlow)


@program("contrastive/siamese_pairs", tables=(False,))
def siamese_pairs(c):
    """Pairs with a label, whose distance is an output of the model."""
    with c.scope():
        a, b = keras.Input([6]), keras.Input([6])
        x = keras.Input([6])
        tower = keras.Model(x, c.dense(4)(c.dense(8, "tanh")(x)))
        apart = keras.layers.Subtract()([tower(a), tower(b)])
        model = keras.Model([a, b], c.dense(1, "sigmoid")(apart))

    def contrastive(y, p):
        near = (1 - y) * tf.square(p)
        return tf.reduce_mean(near + y * tf.square(tf.nn.relu(1 - p)))

    pairs = (c.normal(c.samples, 6, seed=1), c.normal(c.samples, 6, seed=2))
    data = c.batched((pairs, c.labels(1, "binary")))
    return c.train(model, data, contrastive, metrics=lambda: ["accuracy"])


def triplets(c):
    return tuple(c.normal(c.samples, 6, seed=i) for i in (1, 2, 3))


@program("contrastive/siamese_triplets", tables=(False,))
def siamese_triplets(c):
    """The siamese network of keras-io: its own step on triples."""

    class Siamese(keras.Model):
        def __init__(self, network):
            super().__init__()
            self.network = network
            self.tracker = keras.metrics.Mean(name="loss")

        def call(self, inputs):
            return self.network(inputs)

        def value(self, data):
            near, far = self.network(data)
            return tf.maximum(near - far + 0.5, 0.0)

        def train_step(self, data):
            with tf.GradientTape() as tape:
                value = self.value(data)
            descend(self.network, self.optimizer, value, tape)
            self.tracker.update_state(value)
            return {"loss": self.tracker.result()}

        def test_step(self, data):
            self.tracker.update_state(self.value(data))
            return {"loss": self.tracker.result()}

        @property
        def metrics(self):
            return [self.tracker]

    class Distance(keras.layers.Layer):
        def call(self, anchor, near, far):
            return tuple(
                tf.reduce_sum(tf.square(anchor - each), -1)
                for each in (near, far)
            )

    with c.scope():
        x = keras.Input([6])
        tower = keras.Model(x, c.dense(4)(c.dense(8, "tanh")(x)))
        three = [keras.Input([6]) for _ in range(3)]
        network = keras.Model(three, Distance()(*map(tower, three)))
        model = Siamese(network)
    data = c.batched(triplets(c))
    found = c.train(
        model,
        data,
        optimizer=lambda: keras.optimizers.SGD(0.01),
        weighted_metrics=list,
    )
    return found | c.weights(tower)


@program("contrastive/hard_triplets", WARNED, says=IN_BATCH)
def hard_triplets(c):
    """The hardest positive and negative of each sample in its batch."""

    def value(y, p):
        y = tf.reshape(y, [-1])
        apart = tf.reduce_sum(tf.square(p[:, None] - p[None]), -1)
        alike = tf.cast(y[:, None] == y[None], tf.float32)
        near = tf.reduce_max(apart * alike, 1)
        far = tf.reduce_min(apart + 1e3 * alike, 1)
        return tf.reduce_mean(tf.nn.relu(near - far + 0.5))

    return stepped(c, value, outputs=4, kind="classes")


@program("contrastive/hard_triplets_compiled")
def hard_triplets_compiled(c):
    """The same as a compiled loss."""

    def loss(y, p):
        y = tf.reshape(y, [-1])
        apart = tf.reduce_sum(tf.square(p[:, None] - p[None]), -1)
        alike = tf.cast(y[:, None] == y[None], tf.float32)
        near = tf.reduce_max(apart * alike, 1)
        far = tf.reduce_min(apart + 1e3 * alike, 1)
        return tf.nn.relu(near - far + 0.5)

    return c.train(c.model(4), c.data(3, "classes"), loss)


@program("contrastive/centre_loss")
def centre_loss(c):
    """Samples near the trained centre of their class."""

    def value(y, p, centres):
        found = tf.gather(tf.convert_to_tensor(centres), tf.reshape(y, [-1]))
        return tf.reduce_mean(tf.square(p - found))

    class Own(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = value(y, self(x, training=True), self.centres)
            descend(self, self.optimizer, loss, tape)
            return {"loss": loss}

    model = c.model(4, kind=Own)
    with c.scope():
        model.centres = model.add_weight(
            name="centres",
            shape=(3, 4),
            initializer=keras.initializers.RandomNormal(seed=4),
        )
    return c.train(model, c.data(3, "classes"), evaluate=False)


@program("contrastive/arcface")
def arcface(c):
    """An angular margin on normalised outputs."""

    def loss(y, p):
        p = normalised(p)
        one = tf.one_hot(tf.cast(tf.reshape(y, [-1]), tf.int32), 3)
        angle = tf.acos(tf.clip_by_value(p, -0.99, 0.99)) + 0.2 * one
        return tf.nn.softmax_cross_entropy_with_logits(one, 4 * tf.cos(angle))

    return c.train(c.model(3), c.data(3, "classes"), loss)


@program(
    "contrastive/memory_queue",
    WARNED,
    tables=(False,),
    says="(?i)queue|state|gather_batch",
)
def memory_queue(c):
    """MoCo: negatives from a queue of earlier batches."""

    class Moco(TwoViews):
        def value(self, a, b):
            a, b = normalised(a), tf.stop_gradient(normalised(b))
            queue = tf.convert_to_tensor(self.queue)
            right = tf.reduce_sum(a * b, -1, keepdims=True)
            wrong = tf.matmul(a, queue, transpose_b=True)
            logits = tf.concat([right, wrong], 1) / 0.3
            zeros = tf.zeros([tf.shape(a)[0]], tf.int32)
            each = tf.nn.sparse_softmax_cross_entropy_with_logits(zeros, logits)
            self.queue.assign(tf.concat([b, queue], 0)[:8])
            return tf.reduce_mean(each)

    model = c.model(4, kind=Moco)
    with c.scope():
        model.queue = tf.Variable(normalised(c.normal(8, 4)), trainable=False)
    data = c.batched((c.normal(c.samples, 6, seed=1),))
    return c.train(model, data, evaluate=False)
