# SPDX-License-Identifier: Apache-2.0
"""What users do with `fit`, on two or more ranks."""

import random
import resource

import numpy as np
import tensorflow as tf
from fit_models import BATCH
from fit_models import ROWS
from fit_models import data
from fit_models import make_model
from fit_models import same_on_all_ranks
from fit_models import weights

import tfdist_ext
from tfdist_ext.layers import FullSparse

keras = tf.keras


def callbacks(strategy, folder):
    """Keras's own callbacks, checkpoints on one shared path."""
    model = make_model(strategy)
    path = str(folder / "best.weights.h5")
    if not hasattr(keras, "ops"):
        path = str(folder / "best")
    history = model.fit(
        data(),
        epochs=6,
        validation_data=data(seed=1),
        verbose=0,
        callbacks=[
            keras.callbacks.ModelCheckpoint(
                path, save_weights_only=True, save_best_only=True
            ),
            keras.callbacks.BackupAndRestore(str(folder / "backup")),
            keras.callbacks.TensorBoard(str(folder / "logs")),
            keras.callbacks.EarlyStopping(
                patience=1, restore_best_weights=False
            ),
        ],
    )
    assert same_on_all_ranks(strategy, history.history["val_loss"])
    assert not list((folder / "backup").rglob("*.*"))
    assert list((folder / "logs").rglob("events*"))
    best = make_model(strategy)
    best.load_weights(path)
    losses = best.evaluate(data(seed=1), verbose=0)
    np.testing.assert_allclose(
        losses, min(history.history["val_loss"]), rtol=1e-5
    )


def backup(strategy, folder):
    """Training that fails in the third epoch goes on from the second."""

    class Fail(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise RuntimeError("stop here")

    straight = make_model(strategy)
    straight.fit(data(), epochs=4, verbose=0)
    model = make_model(strategy)
    saved = keras.callbacks.BackupAndRestore(str(folder / "again"))
    try:
        model.fit(data(), epochs=4, verbose=0, callbacks=[saved, Fail()])
        raise AssertionError("did not fail")
    except RuntimeError:
        pass
    strategy.reduce("SUM", tf.constant(1.0), axis=None)
    model = make_model(strategy)
    saved = keras.callbacks.BackupAndRestore(str(folder / "again"))
    model.fit(data(), epochs=4, verbose=0, callbacks=[saved])
    for a, b in zip(
        weights(strategy, model), weights(strategy, straight), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def memory(strategy, folder):
    """A rank needs its shard and its slot, not the table; on new ranks."""
    rows, units = 2**20, 64
    shard = rows * units * 4 / strategy.world_size
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input([3], dtype="int64"),
                FullSparse(
                    units,
                    rows,
                    sharding="row",
                    kernel_initializer="glorot_uniform",
                ),
                keras.layers.Dense(1),
            ]
        )
        model.compile(tfdist_ext.optimizers.Adagrad(0.1), "mse")
    model.fit(data(), epochs=1, verbose=0)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    assert grown * 1024 < 2 * shard + (100 << 20), (grown, shard)


def generators(strategy, folder):
    """Unseeded, Python's and NumPy's shuffle alike; on new ranks."""
    shuffled = list(range(50))
    random.shuffle(shuffled)
    drawn = [*np.random.permutation(50), *shuffled, np.random.normal()]
    everyone = strategy.collectives.all_gather(
        tf.constant([drawn], tf.float64), "drawn"
    )
    for other in everyone.numpy():
        np.testing.assert_array_equal(other, drawn)


def equal_start(strategy, folder):
    """Dense variables start equal, whatever each rank drew for itself."""
    with strategy.scope():
        layer = keras.layers.Dense(
            3,
            kernel_initializer=lambda shape, dtype=None, **_: tf.fill(
                shape, float(strategy.rank)
            ),
        )
        layer.build((None, 2))
    np.testing.assert_array_equal(layer.get_weights()[0], np.zeros([2, 3]))


def execution(strategy, folder):
    """Several steps per execution, eager steps, the same weights."""
    results = []
    for arguments in ({}, {"steps_per_execution": 3}, {"run_eagerly": True}):
        model = make_model(strategy, **arguments)
        model.fit(data(60), epochs=1, verbose=0)
        results.append(weights(strategy, model))
    for other in results[1:]:
        for a, b in zip(other, results[0], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def exact_metrics(strategy, folder):
    """Metrics count every sample once, whatever the ranks hold."""
    names = ["AUC", "BinaryAccuracy"]
    model = make_model(
        strategy, metrics=[getattr(keras.metrics, name) for name in names]
    )
    dataset = data(61)
    results = model.evaluate(dataset, verbose=0)
    predicted = model.predict(dataset.map(lambda x, y: x), verbose=0)
    labels = np.concatenate([y.numpy() for _, y in dataset])
    assert predicted.shape == labels.shape
    for name, result in zip(names, results[1:], strict=True):
        metric = getattr(keras.metrics, name)()
        metric.update_state(labels, predicted)
        np.testing.assert_allclose(result, float(metric.result()), rtol=1e-5)
    fitted = make_model(strategy, metrics=[keras.metrics.BinaryAccuracy])
    history = fitted.fit(dataset, epochs=1, verbose=0).history
    assert all(same_on_all_ranks(strategy, v) for v in history.values())


def uneven_ranks(strategy, folder):
    """Ranks whose data ends earlier neither hang nor count wrong."""
    rank, world_size = strategy.rank, strategy.world_size

    def dataset_fn(context):
        own = data(BATCH * (2 + 3 * context.input_pipeline_id))
        # The filter hides the length from tf.data.
        return own.filter(lambda ids, labels: True)

    model = make_model(strategy, metrics=[keras.metrics.BinaryAccuracy])
    dataset = strategy.distribute_datasets_from_function(dataset_fn)
    assert len(list(dataset)) == 2 + 3 * (world_size - 1)
    with strategy.scope():
        seen = keras.metrics.Sum()

    @tf.function
    def step(batch):
        def count(ids, labels):
            seen.update_state(tf.ones_like(labels))
            return model(ids)

        return strategy.run(count, args=batch)

    for batch in dataset:
        step(batch)
    total = sum(BATCH * (2 + 3 * r) for r in range(world_size))
    assert float(seen.result()) == total, (rank, float(seen.result()))
    model.fit(dataset, epochs=2, verbose=0)
    assert same_on_all_ranks(strategy, model.layers[-1].get_weights()[0])


def custom_loop(strategy, folder):
    """strategy.run, reduce and gather in a loop of the user's own."""
    model = make_model(strategy)
    fitted = make_model(strategy)
    fitted.fit(data(), epochs=1, verbose=0)
    with strategy.scope():
        optimizer = tfdist_ext.optimizers.Adagrad(0.5)
        optimizer.build(model.trainable_variables)

    @tf.function
    def train(batch):
        def replica(ids, labels):
            with tf.GradientTape() as tape:
                predicted = model(ids, training=True)
                loss = keras.losses.binary_crossentropy(labels, predicted)
                loss = tf.nn.compute_average_loss(loss, global_batch_size=BATCH)
                if tf.size(labels) < 0:  # AutoGraph has to convert it
                    loss = 2.0 * loss
            variables = model.trainable_variables
            gradients = tape.gradient(loss, variables)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return loss, predicted

        loss, predicted = strategy.run(replica, args=batch)
        return (
            strategy.reduce("SUM", loss, axis=None),
            strategy.gather(predicted, axis=0),
        )

    losses = []
    for batch in strategy.experimental_distribute_dataset(data()):
        loss, predicted = train(batch)
        losses.append(float(loss))
        assert predicted.shape == (BATCH, 1)
    for a, b in zip(
        weights(strategy, model), weights(strategy, fitted), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert same_on_all_ranks(strategy, losses)


def batch_norm(strategy, folder):
    """Moving averages survive a batch that leaves ranks without samples."""
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input([3], dtype="int64"),
                FullSparse(4, ROWS, sharding="row"),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(1),
            ]
        )
        model.compile(tfdist_ext.optimizers.SGD(0.1), "mse")
    model.fit(data(BATCH + 1), epochs=2, verbose=0)
    for weight in model.layers[1].get_weights():
        assert np.isfinite(weight).all()
        assert same_on_all_ranks(strategy, weight)


def idle_threads_sleep(strategy, folder):
    """Ranks that share cores take no more of them than they use."""
    config = tf.__internal__.eager_context.get_config()
    assert config.experimental.disable_thread_spinning


def options_arrive(strategy, folder):
    """What the strategy is given is what it does."""
    assert strategy.collectives.gradient_dtype == tf.bfloat16
    assert strategy.extended.error_feedback is not None


def variables_are_numbers(strategy, folder):
    """Callbacks ask Python for the value of a variable, as in one process."""
    del folder
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.25), "mse")
        steps = tf.Variable(7)
    seen = []

    def read(batch, logs):
        del logs
        rate = float(model.optimizer.learning_rate)
        seen.append((batch, int(model.optimizer.iterations), rate))

    reads = keras.callbacks.LambdaCallback(on_batch_end=read)
    x = np.ones([8, 2], np.float32)
    model.fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=[reads])
    assert seen == [(0, 1, 0.25), (1, 2, 0.25)]
    np.testing.assert_array_equal(np.array(steps), np.array(7, np.int32))
    np.testing.assert_array_equal(np.asarray(steps, np.float64), 7.0)
    assert [int(steps), float(steps), complex(steps)] == [7, 7.0, 7 + 0j]
