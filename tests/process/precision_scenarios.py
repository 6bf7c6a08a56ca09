# SPDX-License-Identifier: Apache-2.0
"""Numbers in fewer bits."""

import numpy as np
import tensorflow as tf
from fit_models import BATCH
from fit_models import ROWS
from fit_models import data
from fit_models import same_on_all_ranks

import tfdist_ext
from tfdist_ext.layers import FullSparse
from tfdist_ext.strategy.gradients import ErrorFeedback

keras = tf.keras


def mixed_precision(strategy, folder):
    """bfloat16 dense layers on float32 tables."""
    losses = {}
    for dtype in ("float32", "mixed_bfloat16"):
        keras.utils.set_random_seed(5)
        with strategy.scope():
            ids = keras.Input([3], dtype="int64")
            table = FullSparse(4, ROWS, sharding="column")
            dense = keras.layers.Dense(8, dtype=dtype)
            output = keras.layers.Dense(1, dtype="float32")
            model = keras.Model(ids, output(dense(table(ids))))
            model.compile(tfdist_ext.optimizers.SGD(0.1), "mse")
        losses[dtype] = model.fit(data(), epochs=4, verbose=0).history["loss"]
        assert dense.compute_dtype == dtype.removeprefix("mixed_")
        for kernel in (table.kernel, dense.kernel):
            assert tf.as_dtype(kernel.dtype) == tf.float32
        assert losses[dtype][-1] < losses[dtype][0]
        assert same_on_all_ranks(strategy, losses[dtype])
    rounded, exact = losses["mixed_bfloat16"], losses["float32"]
    np.testing.assert_allclose(rounded, exact, rtol=2e-2)
    assert rounded != exact


def wire_dtypes(strategy, folder):
    """Rounded once: relative error of a part at most 2^-8 or 2^-11."""
    ids = tf.constant(np.arange(ROWS).reshape(-1, 1))
    for dtype, bound in (("bfloat16", 2.0**-8), ("float16", 2.0**-11)):
        for sharding, rounding in (
            ("row", "nearest"),
            ("column", "nearest"),
            ("row", "stochastic"),
        ):
            with strategy.scope():
                layer = FullSparse(
                    8,
                    ROWS,
                    use_bias=False,
                    sharding=sharding,
                    wire_dtype=dtype,
                    wire_rounding=rounding,
                    kernel_initializer=keras.initializers.RandomUniform(
                        0.5, 1.0, seed=2
                    ),
                )
                outputs = [layer(ids).numpy() for _ in range(64)]
            table = strategy.gather_table(layer)
            error = np.abs(outputs[0] - table) / table
            if rounding == "nearest":
                assert 0 < error.max() <= bound * 1.001, (dtype, error.max())
                continue
            assert 0 < error.max() <= 2 * bound * 1.001, (dtype, error.max())
            # Of the mean of 64 with a deviation of at most one bound each.
            error = np.abs(np.mean(outputs, 0) - table) / table
            assert error.max() < 0.75 * bound, (dtype, error.max())


def int8_rows(strategy, folder):
    """Errors and bytes are those that are stated; training goes alike."""
    ids = tf.constant(np.arange(ROWS).reshape(-1, 1))
    for sharding in ("row", "column", "table"):
        for rounding, bound in (("nearest", 0.5), ("stochastic", 1.0)):
            with strategy.scope():
                layer = FullSparse(
                    8,
                    ROWS,
                    use_bias=False,
                    sharding=sharding,
                    wire_dtype="int8",
                    wire_rounding=rounding,
                    kernel_initializer=keras.initializers.RandomUniform(
                        -1.0, 1.0, seed=2
                    ),
                )
                outputs = [layer(ids).numpy() for _ in range(64)]
            table = strategy.gather_table(layer)
            largest = np.abs(table).max() / 127
            error = np.abs(outputs[0] - table)
            assert 0 < error.max() <= bound * largest * 1.001, error.max()
            error = np.abs(np.mean(outputs, 0) - table)
            if rounding == "stochastic":  # Five deviations of the mean.
                assert error.max() < 5 * 0.5 / 8 * largest, error.max()
    losses, sent = {}, {}
    for dtype in ("float32", "int8"):
        keras.utils.set_random_seed(5)
        with strategy.scope():
            table = FullSparse(64, ROWS, sharding="row", wire_dtype=dtype)
            inputs = keras.Input([3], dtype="int64")
            model = keras.Sequential([inputs, table, keras.layers.Dense(1)])
            model.compile(tfdist_ext.optimizers.Adagrad(0.05), "mse")
        label = f"{table.name}/results"
        strategy.collectives.check = "error"
        try:
            logs = model.fit(data(), epochs=3, verbose=0).history
        finally:
            strategy.collectives.check = "auto"
        losses[dtype] = logs["loss"]
        totals = strategy.statistics()["labels"]
        sent[dtype] = [
            totals[name][1] / totals[name][0]
            for name in (label, f"{label}/gradient")
        ]
    np.testing.assert_allclose(losses["int8"], losses["float32"], rtol=2e-2)
    assert losses["int8"] != losses["float32"]
    for few, many in zip(sent["int8"], sent["float32"], strict=True):
        headers = 192 * (strategy.world_size - 1)
        ratio = (few - headers) / (many - headers)
        assert 0.26 < ratio < 0.29, (few, many)


def gradient_dtypes(strategy, folder):
    """Gradients of dense layers travel in half the bytes, and train alike."""
    collectives = strategy.collectives
    losses, sent = {}, {}
    for dtype in (tf.float32, tf.bfloat16, tf.float16):
        collectives.gradient_dtype = dtype
        before = gradient_bytes(strategy)
        losses[dtype] = losses_of_training(strategy, data())
        sent[dtype] = gradient_bytes(strategy) - before
        np.testing.assert_allclose(losses[dtype], losses[tf.float32], rtol=2e-2)
    collectives.gradient_dtype = tf.float32
    # What is left are headers, and padding.
    for dtype in (tf.bfloat16, tf.float16):
        assert losses[dtype] != losses[tf.float32]
        assert sent[dtype] < 0.75 * sent[tf.float32], sent


def error_feedback(strategy, folder):
    """No error of rounding adds up: means over steps become exact."""
    collectives, extended = strategy.collectives, strategy.extended
    rng = np.random.default_rng(collectives.group.rank)
    parts = [rng.normal(size=s).astype(np.float32) for s in ((7, 143), (5,))]
    exact = [
        collectives.all_reduce([tf.constant(x)], "exact")[0] for x in parts
    ]
    steps, bound = 64, 2.0**-8

    def reduced(*values):
        def replica():
            context = tf.distribute.get_replica_context()
            return context.all_reduce("sum", values)

        return strategy.run(replica)

    def error_of_mean(function):
        sums = [function(*map(tf.constant, parts)) for _ in range(steps)]
        means = [np.mean(total, axis=0) for total in zip(*sums, strict=True)]
        assert same_on_all_ranks(strategy, means[0])
        size = max(np.abs(total).max() for total in exact)
        pairs = zip(means, exact, strict=True)
        return max(np.abs(m - e).max() for m, e in pairs) / size

    collectives.gradient_dtype = tf.bfloat16
    try:
        lost = error_of_mean(tf.function(reduced))
        assert lost > bound / 8, lost
        for mode in (reduced, tf.function(reduced)):
            extended.error_feedback = ErrorFeedback(collectives)
            left = error_of_mean(mode)
            # Of all steps, at most one error of every part and of the sum.
            assert left <= 4 * bound / steps, (left, lost)
        # Infinite once is not infinite for ever.
        infinite = mode(*[np.full_like(x, np.inf) for x in parts])
        assert np.isinf(infinite[0]).all()
        assert error_of_mean(mode) <= 6 * bound / steps
        # The last batch leaves ranks without samples.
        extended.error_feedback = None
        rounded = losses_of_training(strategy, data(BATCH + 1))
        extended.error_feedback = ErrorFeedback(collectives)
        losses = losses_of_training(strategy, data(BATCH + 1))
        collectives.gradient_dtype = tf.float32
        extended.error_feedback = None
        expected = losses_of_training(strategy, data(BATCH + 1))
        np.testing.assert_allclose(losses, expected, rtol=2e-2)
        assert losses != rounded
    finally:
        collectives.gradient_dtype = tf.float32
        extended.error_feedback = None


def losses_of_training(strategy, dataset):
    keras.utils.set_random_seed(5)
    with strategy.scope():
        layers = [keras.layers.Dense(512, "relu"), keras.layers.Dense(1)]
        inputs = keras.Input([3], dtype="int64")
        model = keras.Sequential([inputs, FullSparse(4, ROWS), *layers])
        model.compile(tfdist_ext.optimizers.Adagrad(0.05), "mse")
    losses = model.fit(dataset, epochs=2, verbose=0).history["loss"]
    assert same_on_all_ranks(strategy, layers[0].kernel)
    return losses


def gradient_bytes(strategy):
    return strategy.statistics()["labels"].get("gradients", (0, 0))[1]
