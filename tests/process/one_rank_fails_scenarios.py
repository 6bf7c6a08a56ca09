# SPDX-License-Identifier: Apache-2.0
"""What fails on one rank ends on all, at once."""

import time

import numpy as np
import tensorflow as tf
from fit_models import BATCH
from fit_models import data
from fit_models import make_model
from fit_models import same_on_all_ranks
from fit_models import weights

keras = tf.keras


def fails_on_one(strategy, run, text):
    """`run(fails)` fails on the last rank; all are told, at once."""
    last = strategy.world_size - 1
    start = time.monotonic()
    try:
        run(strategy.rank == last)
    except (RuntimeError, tf.errors.OpError, ValueError) as error:
        message = str(error)
        if strategy.rank != last:
            assert isinstance(error, tf.errors.AbortedError), error
            assert f"rank {last} (" in message, message
        assert text in message, message
    else:
        raise AssertionError("it was not told")
    assert time.monotonic() - start < 30, "told by a timeout"


def in_a_callback(strategy, folder):
    model = make_model(strategy)
    for event in ("on_epoch_end", "on_train_batch_end", "on_train_end"):

        def run(fails, event=event):
            def fail(*_, **__):
                if fails:
                    raise RuntimeError(f"no disk in {event}")

            callback = keras.callbacks.Callback()
            setattr(callback, event, fail)
            model.fit(data(), epochs=2, verbose=0, callbacks=[callback])

        fails_on_one(strategy, run, f"no disk in {event}")
    goes_on(strategy, model)


def in_a_dataset(strategy, folder):
    model = make_model(strategy)

    def run(fails):
        def read(ids, label):
            if fails:
                ids = tf.numpy_function(broken, [ids], tf.int64)
                ids.set_shape([None, 3])
            return ids, label

        def broken(ids):
            raise ValueError("file 7 is damaged")

        model.fit(data().map(read), epochs=1, verbose=0)

    fails_on_one(strategy, run, "file 7 is damaged")
    goes_on(strategy, model)


def in_a_function_of_datasets(strategy, folder):
    """Also where no loop of Keras is under way."""

    def run(fails):
        def make(context):
            if fails:
                raise RuntimeError("no such file")
            return tf.data.Dataset.range(context.num_input_pipelines).batch(1)

        strategy.distribute_datasets_from_function(make)

    fails_on_one(strategy, run, "no such file")
    goes_on(strategy, make_model(strategy))


def while_tracing(strategy, folder):
    model = make_model(strategy)

    def run(fails):
        def loss(truth, prediction):
            if fails:
                raise RuntimeError("this loss is not for this rank")
            return tf.reduce_mean(tf.square(truth - prediction))

        with strategy.scope():
            other = keras.Sequential(model.layers)
            other.compile("sgd", loss)
        other.fit(data(), epochs=1, verbose=0)

    fails_on_one(strategy, run, "this loss is not for this rank")
    goes_on(strategy, model)


def in_predict_and_evaluate(strategy, folder):
    model = make_model(strategy)
    for name, event in (
        ("predict", "on_predict_batch_end"),
        ("evaluate", "on_test_batch_end"),
    ):

        def run(fails, name=name, event=event):
            def fail(*_, **__):
                if fails:
                    raise RuntimeError(f"no memory in {name}")

            callback = keras.callbacks.Callback()
            setattr(callback, event, fail)
            getattr(model, name)(data(), verbose=0, callbacks=[callback])

        fails_on_one(strategy, run, f"no memory in {name}")
    goes_on(strategy, model)


def goes_on(strategy, model):
    """The ranks are in step: they train, and agree."""
    model.fit(data(), epochs=1, verbose=0)
    for value in weights(strategy, model):
        assert same_on_all_ranks(strategy, value)
    ids = np.zeros([BATCH, 3], np.int64)
    (total,) = strategy.collectives.all_reduce([tf.ones([])], "in step")
    assert float(total) == strategy.world_size
    assert len(model.predict(ids, verbose=0)) <= BATCH
