# SPDX-License-Identifier: Apache-2.0
"""One program by both engines, under horovodrun or mpirun.

First the exchanges of one engine and the other, with their gradients; then a
model, whose weights must be equal; then what is refused, and a rank that fails
alone. Each strategy is one more in the same process.
"""

import os
import pathlib
import sys

import numpy as np
import tensorflow as tf
from fit_models import data
from fit_models import make_model
from fit_models import weights

import tfdist_ext
from tfdist_ext.ops import collective_ops

keras = tf.keras


def exchanges(strategy, ops, tag, graph):
    """Results of every kind of exchange, and of their gradients."""
    group = strategy.process_group
    ranks, rank = group.world_size, group.rank
    splits = np.array([(rank + to) % 3 for to in range(ranks)])
    own = np.random.default_rng(rank)
    found = []

    def run(dtype):
        rows = tf.cast(own.normal(size=(splits.sum(), 2)) * 9, dtype)
        weight = tf.constant(float(rank % 2 + rank // 2), tf.float32)
        results = [
            *ops.all_to_all(group, rows, tf.constant(splits), tag=tag),
            *ops.all_gather(group, rows, tag=tag + 2),
            *ops.all_reduce(group, [rows[:0], rows[0, 0]], tag=tag + 4),
        ]
        if dtype.is_floating:
            results += ops.all_reduce(
                group, [rows[0], rows[0, 1]], tag=tag + 6, weight=weight
            )
        return results

    def gradients(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            sent, _ = ops.all_to_all(group, x, tf.constant(splits), tag=tag)
            all_rows, _ = ops.all_gather(group, x, tag=tag + 2, label="g")
            (total,) = ops.all_reduce(group, [x[0]], tag=tag + 4)
            size = float(rank + 1)
            loss = tf.reduce_sum(sent**2) * size + tf.reduce_sum(total**2)
            loss += tf.reduce_sum(all_rows**3)
        return tape.gradient(loss, x)

    for dtype in (tf.float32, tf.float64, tf.bfloat16, tf.float16, tf.int64):
        call = tf.function(run, autograph=False) if graph else run
        found += [tf.cast(each, tf.float64) for each in call(dtype)]
    x = tf.constant(own.normal(size=(splits.sum(), 2)))
    found.append(tf.function(gradients)(x) if graph else gradients(x))
    return [each.numpy() for each in found]


def train(engine):
    """Losses and weights of a model, what we send of a MiB, and exchanges."""
    with tfdist_ext.HybridParallelStrategy(engine=engine) as strategy:
        compared = []
        if engine == "horovod":
            tag = 1 << 20
            for graph in (False, True):
                sides = [
                    exchanges(strategy, ops, tag + (i << 10), graph)
                    for i, ops in enumerate(
                        (collective_ops, strategy.collectives.ops)
                    )
                ]
                compared.append(sides)
        model = make_model(strategy)
        history = model.fit(data(), epochs=3, verbose=0).history["loss"]
        found = weights(strategy, model)
        before = strategy.statistics()["bytes_sent"]
        strategy.collectives.all_gather(tf.zeros([1 << 18]), "large")
        sent = strategy.statistics()["bytes_sent"] - before
    return history, found, sent, compared


def refused(hvd):
    """Horovod's wrapper and callbacks, by either engine."""
    texts = []
    with tfdist_ext.HybridParallelStrategy() as strategy:
        model = make_model(strategy)
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
        callback = hvd.callbacks.MetricAverageCallback()
        for wrong in ("callback", "optimizer"):
            if wrong == "optimizer":
                model.compile(optimizer, "mse")
            callbacks = [callback] if wrong == "callback" else []
            try:
                model.fit(data(), verbose=0, callbacks=callbacks)
            except (ValueError, tf.errors.AbortedError) as error:
                texts.append(str(error))
    assert "MetricAverageCallback repeats what" in texts[0], texts
    assert "hvd.DistributedOptimizer exchanges grad" in texts[1], texts


def fails_alone():
    """A rank that raises is named by the other, in an exchange of Horovod."""
    with tfdist_ext.HybridParallelStrategy(engine="horovod") as strategy:
        collectives = strategy.collectives
        try:
            with collectives.joint_call("what fails"):
                if strategy.rank == 1:
                    raise OSError("of rank 1")
                collectives.all_reduce([tf.ones([9])], "never")
        except OSError:
            assert strategy.rank == 1
        except tf.errors.AbortedError as error:
            assert "what fails failed: OSError: of rank 1" in str(error)
        else:
            raise AssertionError("nobody has failed")
        (total,) = collectives.all_reduce([tf.ones([9])], "afterwards")
        assert (total.numpy() == strategy.world_size).all()


def main():
    (folder,) = sys.argv[1:]
    ranks = int(os.environ["HOROVOD_SIZE"])
    theirs, ours = train("horovod"), train("tfdist")
    for own, other in theirs[3]:
        assert len(own) == len(other) > 30
        for a, b in zip(own, other, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-6)
    np.testing.assert_allclose(theirs[0], ours[0], rtol=1e-6)
    # Of two numbers, and equal parts of batches, there is one sum.
    bits = {"rtol": 0.0} if ranks == 2 else {"rtol": 1e-5, "atol": 1e-7}
    for a, b in zip(theirs[1], ours[1], strict=True):
        np.testing.assert_allclose(a, b, **bits)
    # Horovod has carried a MiB; ours are the few bytes of meeting.
    assert theirs[2] < 1000 < 1 << 20 < ours[2], (theirs[2], ours[2])
    import horovod.tensorflow.keras as hvd

    refused(hvd)
    fails_alone()
    pathlib.Path(folder, str(hvd.rank())).touch()


if __name__ == "__main__":
    main()
