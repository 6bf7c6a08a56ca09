# SPDX-License-Identifier: Apache-2.0
"""What `compile` and callbacks are given."""

import warnings

import numpy as np
import pytest
import tensorflow as tf
from fit_models import BATCH
from fit_models import data
from fit_models import make_model
from fit_models import same_on_all_ranks
from fit_models import weights

keras = tf.keras


def legacy_optimizers(strategy, folder):
    """tf_keras's former optimizers are refused before anything trains."""
    legacy = keras.optimizers.legacy
    for optimizer in (legacy.Adam(), legacy.Adagrad()):
        model = make_model(strategy, optimizer=optimizer)
        before = weights(strategy, model)
        with pytest.raises(ValueError, match="legacy cannot train"):
            model.fit(data(), verbose=0)
        for a, b in zip(weights(strategy, model), before, strict=True):
            np.testing.assert_array_equal(a, b)


def terminate_on_nan(strategy, folder):
    """One rank's NaN ends `fit` on all ranks in the same step."""
    ids, labels = (np.concatenate(list(v)) for v in zip(*data(), strict=True))
    labels[3 * BATCH - 1] = np.nan  # in the last rank's part of batch 2

    class Seen(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            batches.append(batch)

    for steps in (1, 2):
        batches = []
        model = make_model(strategy, steps_per_execution=steps)
        dataset = tf.data.Dataset.from_tensor_slices((ids, labels))
        history = model.fit(
            dataset.batch(BATCH),
            epochs=2,
            verbose=0,
            callbacks=[keras.callbacks.TerminateOnNaN(), Seen()],
        )
        expected = [0, 1, 2] if steps == 1 else [1, 3]
        assert batches == expected, (batches, expected)
        assert len(history.history["loss"]) == 1
        assert same_on_all_ranks(strategy, batches)


def jit_compile(strategy, folder):
    """XLA cannot compile the step; training goes on, with one warning."""
    expected = make_model(strategy)
    expected.fit(data(), epochs=2, verbose=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = make_model(strategy, jit_compile=True)
        model.fit(data(), epochs=2, verbose=0)
    assert sum("jit_compile" in str(w.message) for w in caught) == 1
    for a, b in zip(
        weights(strategy, model), weights(strategy, expected), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    with strategy.scope():
        dense = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
        with pytest.warns(UserWarning, match="jit_compile"):
            dense.compile("sgd", "mse", jit_compile=True)
    dense.fit(np.ones([8, 3]), np.ones([8, 1]), verbose=0)
