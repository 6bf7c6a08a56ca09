# SPDX-License-Identifier: Apache-2.0
"""State that changes in the forward pass, and regularizers."""

import tensorflow as tf

from tests.numbers.registry import EQUAL
from tests.numbers.registry import REFUSED
from tests.numbers.registry import WARNED
from tests.numbers.registry import program
from tests.numbers.stepping import stepped

keras = tf.keras
KERAS_3 = hasattr(keras, "ops")


def between(name, about, verdict=EQUAL, predict=True, **how):
    """Registers a program with a layer that the class or function makes."""

    def register(make):
        def run(c):
            return c.train(
                c.model(between=make), c.data(), "mse", predict=predict
            )

        run.__doc__ = about
        program(f"state/{name}", verdict, **how)(run)
        return make

    return register


@between(
    "batch_normalization",
    "`BatchNormalization` of each rank's samples.",
    WARNED,
    says="(?i)synchronized",
)
def batch_normalization():
    return keras.layers.BatchNormalization()


@between("synchronized", "`BatchNormalization(synchronized=True)`.")
def synchronized():
    return keras.layers.BatchNormalization(synchronized=True)


@between("frozen_batch_normalization", "`BatchNormalization` not trained.")
def frozen():
    return keras.layers.BatchNormalization(trainable=False)


@between("layer_normalization", "`LayerNormalization`.")
def layer_normalization():
    return keras.layers.LayerNormalization()


@between("group_normalization", "`GroupNormalization`.")
def group_normalization():
    return keras.layers.GroupNormalization(2)


@between("unit_normalization", "`UnitNormalization`.")
def unit_normalization():
    return keras.layers.UnitNormalization()


@between("activity_regularizer", "An activity regularizer.")
def activity():
    return keras.layers.ActivityRegularization(0.01, 0.01)


class Base(keras.layers.Layer):
    """A layer with one number that is no weight to train."""

    dtype_of_state, shape, aggregation = "float32", (), ""

    def __init__(self):
        super().__init__()
        how = {}
        if self.aggregation:
            legacy = tf.VariableAggregation
            known = getattr(legacy, self.aggregation.upper())
            how["aggregation"] = self.aggregation if KERAS_3 else known
        self.seen = self.add_weight(
            name="seen",
            shape=self.shape,
            dtype=self.dtype_of_state,
            initializer="zeros",
            trainable=False,
            **how,
        )


@between("running_mean", "A running mean of activations.")
class RunningMean(Base):
    def call(self, x, training=False):
        if training:
            self.seen.assign(0.9 * self.seen + 0.1 * tf.reduce_mean(x))
        return x - self.seen


@between("running_vector", "A running mean of each feature.")
class RunningVector(Base):
    shape = (8,)

    def call(self, x, training=False):
        if training:
            now = tf.convert_to_tensor(self.seen)
            self.seen.assign(0.9 * now + 0.1 * tf.reduce_mean(x, 0))
        return x


@between("float_counter", "A counter of calls that is a float.")
class FloatCounter(Base):
    def call(self, x, training=False):
        if training:
            self.seen.assign_add(1.0)
        return x


@between(
    "integer_counter",
    "A counter of calls that is an integer.",
    REFUSED,
    says="aggregation",
)
class IntegerCounter(Base):
    dtype_of_state = "int32"

    def call(self, x, training=False):
        if training:
            self.seen.assign_add(1)
        return x


@between("integer_first", "An integer with `aggregation` only_first_replica.")
class IntegerFirst(IntegerCounter):
    aggregation = "only_first_replica"


@between("sample_counter", "An integer that sums samples.")
class SampleCounter(Base):
    dtype_of_state = "int32"
    aggregation = "sum"

    def call(self, x, training=False):
        if training:
            self.seen.assign_add(tf.shape(x)[0])
        return x


@between("moving_mean_by_name", "An own state with the name `moving_mean`.")
class MovingMean(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.mean = self.add_weight(
            name="moving_mean",
            shape=(8,),
            initializer="zeros",
            trainable=False,
        )

    def call(self, x, training=False):
        if training:
            now = tf.convert_to_tensor(self.mean)
            self.mean.assign(0.5 * now + 0.5 * tf.reduce_mean(x, 0))
        return x - tf.convert_to_tensor(self.mean)


@between("codebook", "A VQ codebook that moves to what it is chosen for.")
class Codebook(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.codebook = self.add_weight(
            name="codebook",
            shape=(4, 8),
            initializer=keras.initializers.RandomNormal(seed=3),
            trainable=False,
        )

    def call(self, x, training=False):
        codes = tf.convert_to_tensor(self.codebook)
        distances = tf.reduce_sum(tf.square(x[:, None] - codes[None]), -1)
        chosen = tf.one_hot(tf.argmin(distances, -1), 4)
        if training:
            counts = tf.reduce_sum(chosen, 0)[:, None]
            total = tf.matmul(chosen, x, transpose_a=True)
            mean = tf.math.divide_no_nan(total, counts)
            moved = tf.where(counts > 0, 0.9 * codes + 0.1 * mean, codes)
            self.codebook.assign(moved)
        return x + tf.stop_gradient(tf.matmul(chosen, codes) - x)


@between("vq_straight_through", "A VQ codebook trained by `add_loss`.")
class TrainedCodebook(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.codebook = self.add_weight(
            name="codebook",
            shape=(4, 8),
            initializer=keras.initializers.RandomNormal(seed=3),
        )

    def call(self, x):
        codes = tf.convert_to_tensor(self.codebook)
        distances = tf.reduce_sum(tf.square(x[:, None] - codes[None]), -1)
        found = tf.gather(codes, tf.argmin(distances, -1))
        self.add_loss(tf.reduce_mean((tf.stop_gradient(x) - found) ** 2))
        self.add_loss(0.2 * tf.reduce_mean((x - tf.stop_gradient(found)) ** 2))
        return x + tf.stop_gradient(found - x)


@between("add_loss_sum", "`add_loss` of a sum over the batch.")
class AddSum(keras.layers.Layer):
    def call(self, x):
        self.add_loss(0.01 * tf.reduce_sum(tf.square(x)))
        return x


@between(
    "add_loss_times_constant",
    "`add_loss` of a sum times one over a fixed number of samples.",
    WARNED,
    says="one over the number of this rank's samples",
    batches=("even",),
)
class AddScaled(keras.layers.Layer):
    def call(self, x):
        self.add_loss((1 / (x.shape[0] or 8)) * tf.reduce_sum(tf.square(x)))
        return x


@between("add_loss_mean", "`add_loss` of a mean over the batch.")
class AddMean(keras.layers.Layer):
    def call(self, x):
        self.add_loss(0.1 * tf.reduce_mean(tf.square(x)))
        return x


@between("add_loss_balance", "`add_loss` of squared means of features.")
class AddBalance(keras.layers.Layer):
    def call(self, x):
        share = tf.reduce_mean(tf.nn.softmax(x), 0)
        self.add_loss(0.5 * tf.reduce_sum(share * share))
        return x


@program("state/kernel_regularizers", tables=(False,))
def kernel_regularizers(c):
    """Kernels with L1 and L2 penalties."""
    model = c.model(
        kernel_regularizer=keras.regularizers.L1L2(0.01, 0.02),
        bias_regularizer="l2",
    )
    return c.train(model, c.data(), "mse")


@program("state/orthogonal_regularizer", tables=(False,))
def orthogonal_regularizer(c):
    """A kernel with an orthogonal penalty."""
    model = c.model(
        4, kernel_regularizer=keras.regularizers.OrthogonalRegularizer(0.01)
    )
    return c.train(model, c.data(4), "mse")


@program("state/activity_of_dense")
def activity_of_dense(c):
    """A dense layer with an activity regularizer."""
    model = c.model(activity_regularizer=keras.regularizers.L2(0.05))
    return c.train(model, c.data(), "mse")


@program("state/spectral_normalization", tables=(False,))
def spectral_normalization(c):
    """A dense layer in `SpectralNormalization`."""

    def make():
        start = keras.initializers.GlorotUniform(seed=9)
        layer = keras.layers.Dense(8, kernel_initializer=start)
        return keras.layers.SpectralNormalization(layer)

    return c.train(c.model(between=make), c.data(), "mse", predict=True)


def regularized(y, p):
    return tf.reduce_mean(tf.square(y - p))


@program(
    "state/batch_normalization_in_own_step", WARNED, says="(?i)synchronized"
)
def batch_normalization_in_own_step(c):
    """`BatchNormalization` in a step of the model's own."""
    from tests.numbers.stepping import stepping

    model = c.model(
        kind=stepping(regularized), between=keras.layers.BatchNormalization
    )
    return c.train(model, c.data(), evaluate=False)


@program("state/counter_in_own_step")
def counter_in_own_step(c):
    """A step adds one to a variable and uses it for a curriculum."""
    with c.scope():
        count = tf.Variable(0.0, trainable=False)

    def value(y, p):
        count.assign_add(1.0)
        return tf.minimum(count / 4.0, 1.0) * regularized(y, p)

    return stepped(c, value)
