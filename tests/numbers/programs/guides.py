# SPDX-License-Identifier: Apache-2.0
"""Models with steps of their own, as Keras's and TensorFlow's guides have."""

import tensorflow as tf

from tests.numbers.registry import program

keras = tf.keras
SGD = keras.optimizers.SGD


def small(c, outputs=4, activation="tanh", inputs=6):
    """A network of two dense layers."""
    with c.scope():
        x = keras.Input([inputs])
        hidden = c.dense(8, "tanh")(x)
        return keras.Model(x, c.dense(outputs, activation)(hidden))


def descend(model, optimizer, value, tape):
    v = model.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(value, v), v, strict=True))


@program("guide/gan", tables=(False,))
def gan(c):
    """A generator against a discriminator, with losses of Keras."""
    generator, judge = small(c, 6, None, 3), small(c, 1, None)
    entropy = keras.losses.BinaryCrossentropy(from_logits=True)

    class Gan(keras.Model):
        def __init__(self):
            super().__init__()
            self.generator, self.judge = generator, judge
            self.other = SGD(0.1)
            self.g_loss = keras.metrics.Mean(name="g_loss")
            self.d_loss = keras.metrics.Mean(name="d_loss")

        @property
        def metrics(self):
            return [self.g_loss, self.d_loss]

        def train_step(self, data):
            real, noise = data
            fake = self.generator(noise)
            both = tf.concat([fake, real], 0)
            count = tf.shape(real)[0]
            labels = tf.concat([tf.ones([count, 1]), tf.zeros([count, 1])], 0)
            with tf.GradientTape() as tape:
                value = entropy(labels, self.judge(both))
            descend(self.judge, self.optimizer, value, tape)
            with tf.GradientTape() as tape:
                found = self.judge(self.generator(noise))
                deceit = entropy(tf.zeros([count, 1]), found)
            descend(self.generator, self.other, deceit, tape)
            self.d_loss.update_state(value)
            self.g_loss.update_state(deceit)
            return {m.name: m.result() for m in self.metrics}

    with c.scope():
        model = Gan()
    data = c.batched((c.normal(c.samples, 6), c.normal(c.samples, 3, seed=1)))
    found = c.train(model, data, evaluate=False)
    return found | c.weights(generator, judge)


@program("guide/wgan_gp", tables=(False,))
def wgan_gp(c):
    """A Wasserstein GAN's critic with a gradient penalty."""
    critic = small(c, 1, None)

    class Wgan(keras.Model):
        def __init__(self):
            super().__init__()
            self.critic = critic

        def train_step(self, data):
            real, fake = data
            with tf.GradientTape() as tape:
                with tf.GradientTape() as inner:
                    middle = 0.5 * (real + fake)
                    inner.watch(middle)
                    between = self.critic(middle)
                slopes = inner.gradient(between, middle)
                norm = tf.sqrt(tf.reduce_sum(slopes**2, 1) + 1e-6)
                penalty = tf.reduce_mean((norm - 1.0) ** 2)
                far = tf.reduce_mean(self.critic(fake))
                near = tf.reduce_mean(self.critic(real))
                value = far - near + 10.0 * penalty
            descend(self.critic, self.optimizer, value, tape)
            return {"loss": value, "penalty": penalty}

    with c.scope():
        model = Wgan()
    data = c.batched((c.normal(c.samples, 6), c.normal(c.samples, 6, seed=1)))
    found = c.train(model, data, optimizer=lambda: SGD(0.02), evaluate=False)
    return found | c.weights(critic)


class Vae(keras.Model):
    """The guide's variational autoencoder; its noise is an input."""

    def __init__(self, c):
        super().__init__()
        self.encoder, self.decoder = small(c, 4, None), small(c, 6, None, 2)
        self.total = keras.metrics.Mean(name="total_loss")
        self.rebuilt = keras.metrics.Mean(name="reconstruction_loss")
        self.divergence = keras.metrics.Mean(name="kl_loss")

    @property
    def metrics(self):
        return [self.total, self.rebuilt, self.divergence]

    def train_step(self, data):
        x, noise = data
        with tf.GradientTape() as tape:
            mean, spread = tf.split(self.encoder(x), 2, 1)
            z = mean + tf.exp(0.5 * spread) * noise
            each = tf.reduce_sum(tf.square(x - self.decoder(z)), 1)
            rebuilt = tf.reduce_mean(each)
            divergence = -0.5 * (1 + spread - mean**2 - tf.exp(spread))
            divergence = tf.reduce_mean(tf.reduce_sum(divergence, axis=1))
            value = rebuilt + divergence
        descend(self, self.optimizer, value, tape)
        self.total.update_state(value)
        self.rebuilt.update_state(rebuilt)
        self.divergence.update_state(divergence)
        return {
            "loss": self.total.result(),
            "reconstruction_loss": self.rebuilt.result(),
            "kl_loss": self.divergence.result(),
        }


@program("guide/vae", tables=(False,))
def vae(c):
    """A variational autoencoder with three trackers."""
    with c.scope():
        model = Vae(c)
    data = c.batched((c.normal(c.samples, 6), c.normal(c.samples, 2, seed=1)))
    found = c.train(model, data, optimizer=lambda: SGD(0.02), evaluate=False)
    return found | c.weights(model.encoder, model.decoder)


@program("guide/vae_add_loss", tables=(False,))
def vae_add_loss(c):
    """A variational autoencoder whose encoder calls `add_loss`."""

    class Sampling(keras.layers.Layer):
        def call(self, inputs):
            both, noise = inputs
            mean, spread = tf.split(both, 2, 1)
            divergence = -0.5 * (1 + spread - mean**2 - tf.exp(spread))
            self.add_loss(tf.reduce_mean(tf.reduce_sum(divergence, 1)))
            return mean + tf.exp(0.5 * spread) * noise

    with c.scope():
        x, noise = keras.Input([6]), keras.Input([2])
        z = Sampling()((c.dense(4)(c.dense(8, "tanh")(x)), noise))
        model = keras.Model([x, noise], c.dense(6)(c.dense(8, "tanh")(z)))
    x = c.normal(c.samples, 6)
    data = c.batched(((x, c.normal(c.samples, 2, seed=1)), x))
    return c.train(model, data, "mse")


@program("guide/autoencoder_denoising", tables=(False,))
def denoising(c):
    """A denoising autoencoder."""
    x = c.normal(c.samples, 6)
    data = c.batched((x + 0.1 * c.normal(c.samples, 6, seed=1), x))
    return c.train(small(c, 6, None), data, "mae", predict=True)


@program("guide/distillation", tables=(False,))
def distillation(c):
    """A student learns from labels and a teacher."""
    teacher, student = small(c, 3, None), small(c, 3, None)

    class Distiller(keras.Model):
        def __init__(self):
            super().__init__()
            self.teacher, self.student = teacher, student
            self.hard = keras.losses.SparseCategoricalCrossentropy(True)
            self.soft = keras.losses.KLDivergence()
            self.tracker = keras.metrics.Mean(name="distilled")

        def train_step(self, data):
            x, y = data
            told = self.teacher(x, training=False)
            with tf.GradientTape() as tape:
                found = self.student(x, training=True)
                hard = self.hard(y, found)
                soft = self.soft(
                    tf.nn.softmax(told / 3.0), tf.nn.softmax(found / 3.0)
                )
                value = 0.1 * hard + 0.9 * soft * 9.0
            descend(self.student, self.optimizer, value, tape)
            self.tracker.update_state(soft)
            return {"distilled": self.tracker.result()}

    with c.scope():
        model = Distiller()
    data = c.batched((c.normal(c.samples, 6), c.labels(3, "classes")))
    return c.train(model, data, evaluate=False) | c.weights(student)


@program("guide/mixup", tables=(False,))
def mixup(c):
    """Pairs of samples, mixed within the data."""
    x, y = c.normal(c.samples, 6), c.labels(2)
    share = abs(c.normal(c.samples, 1, seed=4)) % 1
    data = c.batched((x * share + x[::-1] * (1 - share), y))
    return c.train(small(c, 2, None), data, "mse")


@program("guide/ema_teacher", tables=(False,))
def ema_teacher(c):
    """A teacher that is the moving average of its student."""
    teacher, student = small(c, 3), small(c, 3)

    class MeanTeacher(keras.Model):
        def __init__(self):
            super().__init__()
            self.teacher, self.student = teacher, student

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                found = self.student(x, training=True)
                told = tf.stop_gradient(self.teacher(x, training=False))
                apart = tf.reduce_mean(tf.square(found - told))
                value = tf.reduce_mean(tf.square(y - found)) + apart
            descend(self.student, self.optimizer, value, tape)
            pairs = zip(self.teacher.weights, self.student.weights, strict=True)
            for old, new in pairs:
                old.assign(0.9 * old + 0.1 * new)
            return {"loss": value, "apart": apart}

    with c.scope():
        model = MeanTeacher()
    data = c.batched((c.normal(c.samples, 6), c.labels(3)))
    found = c.train(model, data, evaluate=False)
    return found | c.weights(teacher, student)


@program("guide/custom_fit_compute_loss")
def compute_loss_override(c):
    """`compute_loss` is overridden."""

    class Own(keras.Model):
        def compute_loss(
            self, x=None, y=None, y_pred=None, sample_weight=None, training=True
        ):
            value = tf.reduce_mean(tf.square(y - y_pred))
            return value + sum(self.losses)

    model = c.model(kind=Own, activity_regularizer="l2")
    return c.train(model, c.data(), evaluate=False)


@program("guide/custom_fit_test_step")
def own_test_step(c):
    """`test_step` is overridden, with a metric of its own."""

    class Own(keras.Model):
        def test_step(self, data):
            x, y = data
            p = self(x, training=False)
            for metric in self.metrics:
                if metric.name == "loss":
                    metric.update_state(tf.reduce_mean(tf.square(y - p)))
            return {
                "loss": tf.reduce_mean(tf.square(y - p)),
                "largest": tf.reduce_mean(tf.reduce_max(p, -1)),
            }

    model = c.model(kind=Own)
    return c.train(model, c.data(), "mse", metrics=lambda: ["mae"])


@program("guide/own_predict_step")
def own_predict_step(c):
    """`predict_step` returns a dictionary."""

    class Own(keras.Model):
        def predict_step(self, data):
            p = self(data, training=False)
            return {"mean": tf.reduce_mean(p, -1), "all": p}

    return c.train(c.model(kind=Own), c.data(), "mse", predict=True)


@program("guide/adversarial_training", tables=(False,))
def adversarial(c):
    """The fast gradient sign method: samples are moved uphill."""

    class Own(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                tape.watch(x)
                value = tf.reduce_mean(tf.square(y - self(x, training=True)))
            moved = x + 0.1 * tf.sign(tape.gradient(value, x))
            with tf.GradientTape() as tape:
                value = tf.reduce_mean(
                    tf.square(y - self(moved, training=True))
                )
            descend(self, self.optimizer, value, tape)
            return {"loss": value}

    return c.train(c.model(kind=Own), c.data(), evaluate=False)


@program("guide/diffusion", tables=(False,))
def diffusion(c):
    """A denoiser that predicts noise of several strengths."""

    class Denoiser(keras.Model):
        def train_step(self, data):
            x, noise, strength = data
            mixed = tf.cos(strength) * x + tf.sin(strength) * noise
            with tf.GradientTape() as tape:
                found = self(mixed, training=True)
                value = self.compute_loss(x=mixed, y=noise, y_pred=found)
            descend(self, self.optimizer, value, tape)
            return {"loss": value}

    with c.scope():
        x = keras.Input([6])
        model = Denoiser(x, c.dense(6)(c.dense(8, "tanh")(x)))
    parts = (6, 6, 1)
    arrays = [c.normal(c.samples, n, seed=i) for i, n in enumerate(parts)]
    return c.train(model, c.batched(tuple(arrays)), "mae", evaluate=False)
