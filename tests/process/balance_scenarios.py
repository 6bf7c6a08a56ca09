# SPDX-License-Identifier: Apache-2.0
"""Training on unequal parts of each batch, on one or more ranks."""

import time
from unittest import mock

import numpy as np
import tensorflow as tf
from fit_models import data
from fit_models import make_model
from fit_models import weights

import tfdist_ext
from tfdist_ext.layers import FullSparse
from tfdist_ext.strategy import balance

keras = tf.keras
SAMPLES = 61  # the last batch has 5


def rmse(y_true, y_pred):
    """A loss that is no mean over the samples."""
    error = tf.square(tf.cast(y_true, y_pred.dtype) - y_pred)
    return tf.sqrt(tf.reduce_mean(error))


def loops(strategy, folder):
    """What Keras's loops and functions of one batch compute."""
    model = make_model(strategy, metrics=[keras.metrics.AUC])
    history = model.fit(data(SAMPLES), epochs=3, verbose=0).history
    found = {f"fit/{k.split('_')[0]}": v for k, v in history.items()}
    found["evaluate"] = model.evaluate(data(30, 1), verbose=0)
    found["predict"] = model.predict(data(30, 1), verbose=0)
    ids, labels = next(iter(data(SAMPLES)))
    found["on_batch"] = model.train_on_batch(ids, labels)
    found["predict_on_batch"] = model.predict_on_batch(ids)
    for i, weight in enumerate(weights(strategy, model)):
        found[f"weight/{i}"] = weight
    return {name: np.array(value) for name, value in found.items()}


def whole_batch(strategy, folder):
    """A loss over the whole batch, with fixed batch size."""
    with strategy.scope():
        model = make_model(strategy)
        model.compile(keras.optimizers.SGD(0.5), rmse)
    # Keras 3 counts a step too many in one process if the number of batches
    # is unknown.
    whole = next(iter(data(SAMPLES).unbatch().batch(SAMPLES)))
    fixed = tf.data.Dataset.from_tensor_slices(whole)
    fixed = fixed.batch(8, drop_remainder=True)
    history = model.fit(fixed, epochs=3, verbose=0).history
    found = weights(strategy, model)
    return {"loss": history["loss"], **{str(i): w for i, w in enumerate(found)}}


def own_loop(strategy, folder):
    """A custom training loop, with a step inside of a tf.function."""
    model = make_model(strategy)
    loss_fn = keras.losses.BinaryCrossentropy(reduction="none")

    def step(ids, labels):
        with tf.GradientTape() as tape:
            losses = loss_fn(labels, model(ids, training=True))
            loss = tf.reduce_sum(losses) / 8
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        model.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    with strategy.scope():
        model.optimizer.build(model.trainable_variables)

    @tf.function
    def epoch(dataset):
        total = tf.constant(0.0)
        for ids, labels in dataset:
            part = strategy.run(step, args=(ids, labels))
            total += strategy.reduce("sum", part, axis=None)
        return total

    dataset = strategy.experimental_distribute_dataset(data(56))
    totals = [float(epoch(dataset)) for _ in range(3)]
    found = weights(strategy, model)
    return {"loss": totals, **{str(i): w for i, w in enumerate(found)}}


def lists(samples=60, seed=0):
    """Ragged and sparse ids, of which some samples have many."""
    rng = np.random.default_rng(seed)
    few = rng.integers(0, 4, samples)
    lengths = np.where(rng.random(samples) < 0.2, 40, few)
    ids = [rng.integers(0, 30, n).tolist() for n in lengths]
    ragged = tf.ragged.constant(ids, tf.int64, ragged_rank=1)
    sparse = tf.ragged.constant(ids[::-1], tf.int64, ragged_rank=1).to_sparse()
    sparse = tf.cast(sparse, tf.float32) / 50
    labels = rng.random([samples, 1]).astype(np.float32)
    inputs = {"ragged": ragged, "sparse": sparse}
    return tf.data.Dataset.from_tensor_slices((inputs, labels)).batch(12)


class Lists(keras.Model):
    """A dense layer over the sums of rows of two lists of ids."""

    def __init__(self):
        super().__init__()
        initializer = keras.initializers.RandomNormal(0, 0.1, seed=1)
        self.tables = [
            FullSparse(4, 50, kernel_initializer=initializer, name=name)
            for name in ("ragged", "sparse")
        ]
        self.dense = keras.layers.Dense(
            1, kernel_initializer=keras.initializers.GlorotUniform(seed=2)
        )

    def call(self, inputs):
        sums = [table(inputs[table.name]) for table in self.tables]
        return self.dense(tf.concat(sums, 1))


def ids(strategy, folder):
    """Trains on lists of ids; tells how many ids and samples this rank had."""
    with strategy.scope():
        model = Lists()
        model.compile(tfdist_ext.optimizers.Adagrad(0.3), "mse")
    history = model.fit(lists(), epochs=2, verbose=0).history
    parts = []
    for features, labels in strategy.experimental_distribute_dataset(lists()):
        work = features["ragged"].values.shape[0]
        work += features["sparse"].values.shape[0]
        parts.append((int(work), int(labels.shape[0])))
    found = {t.name: strategy.gather_table(t) for t in model.tables}
    return {"loss": history["loss"], **found}, parts


class Slow(keras.layers.Layer):
    """A layer that takes some time for each sample, on one rank."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def call(self, inputs):
        def wait(samples):
            time.sleep(self.seconds * int(samples))
            return samples

        samples = tf.numpy_function(wait, [tf.shape(inputs)[0]], tf.int32)
        with tf.control_dependencies([samples]):
            return tf.identity(inputs)


def slow_model(strategy, seconds):
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Dense(
                    1, kernel_initializer=keras.initializers.Constant(0.1)
                ),
                Slow(seconds),
            ]
        )
        model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


def slow_data(batches, samples=40):
    x = np.random.default_rng(0).random([batches * samples, 3])
    x = x.astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(samples)


def agreeing_every(steps):
    """Lets ranks agree on measured shares more often."""
    return mock.patch.object(balance, "STEPS", steps)


@agreeing_every(20)
def measured(strategy, folder, of_ranks, epochs):
    """Trains where ranks have other speeds; returns losses and shares.

    Args:
        strategy: of the tests.
        folder: not used.
        of_ranks: milliseconds per sample of each rank.
        epochs: how often 60 batches are trained.
    """
    before = strategy.statistics().get("shares", (1.0,))
    model = slow_model(strategy, of_ranks[strategy.rank] / 1e3)
    history = model.fit(slow_data(60), epochs=epochs, verbose=0).history
    after = strategy.statistics().get("shares", (1.0,))
    predicted = model.predict(slow_data(3), verbose=0)
    return (
        {"loss": history["loss"], "predict": predicted},
        {"before": before, "after": after},
    )


@agreeing_every(3)
def several_iterators(strategy, folder):
    """Iterators read in turns and dropped half-way give every sample once."""
    dataset = tf.data.Dataset.range(70).batch(10)
    distributed = strategy.experimental_distribute_dataset(dataset)
    dropped = iter(distributed)
    next(dropped)
    both = [iter(distributed), iter(distributed)]
    found = [[], []]
    for _ in range(7):
        for iterator, parts in zip(both, found, strict=True):
            part = strategy.gather(next(iterator), axis=0)
            parts += part.numpy().tolist()
    assert found == [list(range(70))] * 2, found


def policies_of_own_data_are_refused(strategy, folder):
    """Ranks that read their own data cannot have shares of a batch."""
    policies = tf.data.experimental.AutoShardPolicy
    for policy in (policies.OFF, policies.FILE):
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = policy
        dataset = tf.data.Dataset.range(8).batch(4).with_options(options)
        try:
            strategy.experimental_distribute_dataset(dataset)
        except ValueError as error:
            assert f"auto_shard_policy={policy.name}" in str(error), error
            assert "balance" in str(error)
        else:
            raise AssertionError(f"{policy} was accepted")


def lengths_that_differ(strategy, folder):
    """A batch of values with other numbers of samples is an error."""
    dataset = tf.data.Dataset.from_tensors((np.arange(8), np.arange(6)))
    dataset = dataset.map(lambda x, y: (x[x >= 0], y[y >= 0]))
    try:
        next(iter(strategy.experimental_distribute_dataset(dataset)))
    except tf.errors.InvalidArgumentError as error:
        assert "different numbers of samples" in str(error), error
    else:
        raise AssertionError("was accepted")


def static_sizes(strategy, folder):
    """Batches of a fixed size have no static number of samples."""
    dataset = tf.data.Dataset.range(24).batch(8, drop_remainder=True)
    local = strategy.experimental_distribute_dataset(dataset)
    assert local.element_spec.shape == (None,), local.element_spec
    return [part.numpy().tolist() for part in local]
