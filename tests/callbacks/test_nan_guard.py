# SPDX-License-Identifier: Apache-2.0
"""What `NanGuard` leaves of an epoch's metrics, in one process."""

import numpy as np
import pytest
import tensorflow as tf

import tfdist_ext
from tfdist_ext.callbacks import NanGuard

keras = tf.keras
BATCHES = 6


@pytest.fixture(scope="module")
def strategy():
    return tfdist_ext.HybridParallelStrategy()


@pytest.mark.parametrize("rollback", [True, False])
@pytest.mark.parametrize("bad", [[0], [3], [0, 1, 4], [5]])
def test_metrics_are_those_of_the_good_batches(strategy, rollback, bad):
    """Each batch has a loss of its own, since nothing is learned."""
    keras.backend.clear_session()
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input([1]),
                keras.layers.Dense(1, kernel_initializer="zeros"),
            ]
        )
        model.compile(
            keras.optimizers.SGD(0.0), "mae", metrics=["mse", "accuracy"]
        )
    labels = np.arange(1.0, BATCHES + 1, dtype=np.float32)
    labels[bad] = np.nan
    data = tf.data.Dataset.from_tensor_slices(
        (np.zeros([BATCHES, 1], np.float32), labels[:, None])
    )
    guard = NanGuard(rollback, every=1, factor=1, directory=None)
    history = model.fit(
        data.batch(1), epochs=2, verbose=0, callbacks=[guard]
    ).history
    assert len(guard.faults) == 2 * len(bad)
    good = np.delete(labels, bad)
    np.testing.assert_allclose(history["loss"], [good.mean()] * 2)
    np.testing.assert_allclose(history["mse"], [np.square(good).mean()] * 2)
