# SPDX-License-Identifier: Apache-2.0
"""Scenarios of fit_program.py: numbers in fewer bits."""

import numpy as np
import tensorflow as tf
from fit_models import ROWS
from fit_models import data
from fit_models import same_on_all_ranks

import tfdist_ext
from tfdist_ext.layers import FullSparse

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


def gradient_dtypes(strategy, folder):
    """Gradients of dense layers travel in half the bytes, and train alike."""
    collectives = strategy.collectives
    losses, sent = {}, {}
    for dtype in (tf.float32, tf.bfloat16, tf.float16):
        collectives.gradient_dtype = dtype
        keras.utils.set_random_seed(5)
        with strategy.scope():
            layers = [keras.layers.Dense(512, "relu"), keras.layers.Dense(1)]
            inputs = keras.Input([3], dtype="int64")
            model = keras.Sequential([inputs, FullSparse(4, ROWS), *layers])
            model.compile(tfdist_ext.optimizers.Adagrad(0.05), "mse")
        before = gradient_bytes(strategy)
        losses[dtype] = model.fit(data(), epochs=2, verbose=0).history["loss"]
        sent[dtype] = gradient_bytes(strategy) - before
        assert same_on_all_ranks(strategy, layers[0].kernel)
        np.testing.assert_allclose(losses[dtype], losses[tf.float32], rtol=2e-2)
    collectives.gradient_dtype = tf.float32
    # What is left are headers, and padding.
    for dtype in (tf.bfloat16, tf.float16):
        assert losses[dtype] != losses[tf.float32]
        assert sent[dtype] < 0.75 * sent[tf.float32], sent


def gradient_bytes(strategy):
    return strategy.statistics()["labels"].get("gradients", (0, 0))[1]
