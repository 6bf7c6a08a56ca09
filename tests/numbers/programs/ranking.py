# SPDX-License-Identifier: Apache-2.0
"""Ranking, quantile, reinforcement and sequence losses, and curricula."""

import tensorflow as tf

from tests.numbers.registry import WARNED
from tests.numbers.registry import program
from tests.numbers.stepping import stepped

keras = tf.keras


# Of a loss near zero, whose terms of about 1 cancel: their rounding errors.
CANCELS = 5e-4


def both(name, about, verdict_of_step="equal", says="", tolerance=5e-5, **how):
    """Registers a loss twice: compiled, and in a step of its mean.

    The tolerance is that of the step.
    """

    def register(loss):
        def compiled(c):
            outputs = how.get("outputs", 4)
            model = c.model(outputs, how.get("activation"))
            data = c.data(outputs, how.get("kind", "numbers"))
            return c.train(model, data, loss)

        def in_step(c):
            return stepped(
                c,
                lambda y, p: tf.reduce_mean(loss(y, p)),
                **{"outputs": 4, **how},
            )

        compiled.__doc__ = f"{about}, compiled."
        in_step.__doc__ = f"{about}, in a step."
        program(f"ranking/{name}")(compiled)
        program(
            f"ranking/{name}_step",
            verdict_of_step,
            says=says,
            tolerance=tolerance,
        )(in_step)
        return loss

    return register


@both("listwise_softmax", "A softmax over the list of each sample")
def listwise(y, p):
    return -tf.reduce_sum(tf.nn.softmax(y) * tf.nn.log_softmax(p), -1)


@both("pairwise_hinge", "A hinge on pairs of a sample's list")
def pairwise_hinge(y, p):
    better = tf.cast(y[:, :, None] > y[:, None], tf.float32)
    apart = tf.nn.relu(1 - (p[:, :, None] - p[:, None]))
    return tf.reduce_sum(better * apart, [1, 2]) / 6.0


@both(
    "pairwise_in_batch",
    "A hinge on pairs of samples",
    WARNED,
    "(?i)gather_batch",
    outputs=1,
)
def pairwise_in_batch(y, p):
    better = tf.cast(y[:, None, 0] > y[None, :, 0], tf.float32)
    apart = tf.nn.relu(1 - (p[:, None, 0] - p[None, :, 0]))
    return tf.reduce_sum(better * apart) / (tf.reduce_sum(better) + 1.0)


@both("approximate_ndcg", "A smooth NDCG of each sample's list")
def approximate_ndcg(y, p):
    apart = tf.sigmoid((p[:, None] - p[:, :, None]) / 0.5)
    rank = tf.reduce_sum(apart, -1) + 0.5
    gain = tf.nn.relu(y)
    found = tf.reduce_sum(gain / tf.math.log1p(rank), -1)
    return -found / (tf.reduce_sum(gain, -1) + 1.0)


@both("quantiles", "The pinball loss of several quantiles")
def quantiles(y, p):
    q = tf.constant([0.1, 0.4, 0.6, 0.9])
    apart = y - p
    return tf.reduce_mean(tf.maximum(q * apart, (q - 1) * apart), -1)


@both("evidential", "A Gaussian likelihood with its variance", outputs=2)
def likelihood(y, p):
    spread = tf.nn.softplus(p[:, 1:]) + 0.1
    each = tf.math.log(spread) + tf.square(y[:, :1] - p[:, :1]) / spread
    return 0.5 * tf.reduce_sum(each, -1)


@both("label_smoothing", "Crossentropy on smoothed labels", kind="one_hot")
def smoothed(y, p):
    return -tf.reduce_sum((0.9 * y + 0.025) * tf.nn.log_softmax(p), -1)


@both(
    "generalized_mean",
    "A power mean of the errors",
)
def power_mean(y, p):
    return tf.reduce_mean(tf.abs(y - p) ** 3) ** (1 / 3)


@both("policy_gradient", "The log-likelihood of actions by their reward")
def policy_gradient(y, p):
    action = tf.argmax(y, -1)
    log = tf.gather(tf.nn.log_softmax(p), action, batch_dims=1)
    return -log * tf.reduce_max(y, -1)


@both(
    "baseline",
    "The same with the batch's mean reward as a baseline",
    tolerance=CANCELS,
)
def baseline(y, p):
    reward = tf.reduce_max(y, -1)
    log = tf.reduce_max(tf.nn.log_softmax(p), -1)
    return -log * tf.stop_gradient(reward - tf.reduce_mean(reward))


@both(
    "advantage_normalised",
    "The same with normalised rewards",
    tolerance=CANCELS,
)
def advantage(y, p):
    reward = tf.reduce_max(y, -1)
    mean, variance = tf.nn.moments(reward, 0)
    scaled = (reward - mean) / tf.sqrt(variance + 0.1)
    return -tf.reduce_max(tf.nn.log_softmax(p), -1) * scaled


@both("ppo", "The clipped ratio of proximal policies")
def ppo(y, p):
    ratio = tf.exp(tf.nn.log_softmax(p) - tf.nn.log_softmax(y))
    clipped = tf.clip_by_value(ratio, 0.8, 1.2)
    return -tf.reduce_mean(tf.minimum(ratio * y, clipped * y), -1)


@both("td_error", "A temporal difference with a target that stands")
def td_error(y, p):
    target = y[:, 0] + 0.9 * tf.stop_gradient(tf.reduce_max(p, -1))
    return tf.square(target - p[:, 1])


@both("entropy_bonus", "A policy with a bonus for its entropy")
def entropy_bonus(y, p):
    log = tf.nn.log_softmax(p)
    entropy = -tf.reduce_sum(tf.exp(log) * log, -1)
    return -tf.reduce_sum(log * y, -1) - 0.1 * entropy


@both(
    "diversity",
    "The entropy of the batch's mean prediction",
)
def diversity(y, p):
    share = tf.reduce_mean(tf.nn.softmax(p), 0)
    entropy = tf.reduce_sum(share * tf.math.log(share + 1e-6))
    return tf.reduce_mean(tf.square(y - p), -1) + entropy


@both("self_paced", "Weights by each sample's own loss")
def self_paced(y, p):
    each = tf.reduce_mean(tf.square(y - p), -1)
    return each * tf.stop_gradient(tf.exp(-each))


@both(
    "trimmed",
    "Samples above the batch's median do not count",
    WARNED,
    "(?i)sort|top|where|sel|gather_batch",
)
def trimmed(y, p):
    each = tf.reduce_mean(tf.square(y - p), -1)
    middle = tf.sort(each)[tf.shape(each)[0] // 2 :][:1]
    return tf.where(each <= tf.reduce_sum(middle), each, 0.0)


@program("ranking/curriculum")
def curriculum(c):
    """Weights that grow with the step, from a callback's variable."""
    with c.scope():
        share = tf.Variable(0.1, trainable=False)

    class Grow(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            share.assign(min(1.0, 0.1 + 0.2 * batch))

    def value(y, p):
        hard = tf.reduce_mean(tf.square(y - p))
        return share * hard + (1 - share) * tf.reduce_mean(tf.abs(p))

    return stepped(c, value, fit={"callbacks": [Grow()]})


@program("ranking/ordinal")
def ordinal(c):
    """Cumulative probabilities of ordered classes."""

    def loss(y, p):
        above = tf.cast(
            tf.range(3)[None] < tf.cast(tf.reshape(y, [-1, 1]), tf.int32),
            tf.float32,
        )
        each = tf.nn.sigmoid_cross_entropy_with_logits(above, p)
        return tf.reduce_sum(each, -1)

    return c.train(c.model(3), c.data(3, "classes"), loss)
