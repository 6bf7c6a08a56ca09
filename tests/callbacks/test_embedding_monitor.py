# SPDX-License-Identifier: Apache-2.0
"""What `EmbeddingMonitor` compares norms with, in one process."""

import numpy as np
import pytest
import tensorflow as tf

import tfdist_ext
from tfdist_ext.callbacks import EmbeddingMonitor

keras = tf.keras
ROWS = 8


@pytest.fixture(scope="module")
def strategy():
    return tfdist_ext.HybridParallelStrategy()


def train(strategy, rate, built=True, start="ones", every=1000, steps=4):
    """Moves all rows of a table by `rate` in each step."""
    keras.backend.clear_session()
    with strategy.scope():
        table = tfdist_ext.layers.FullSparse(
            1, ROWS, kernel_initializer=start, use_bias=False, name="table"
        )
        inputs = [keras.Input([1], dtype="int64")] * built
        model = keras.Sequential([*inputs, table])
        model.compile(tfdist_ext.optimizers.SGD(rate * ROWS), "mae")
    ids = np.tile(np.arange(ROWS), steps)[:, None]
    labels = np.full([len(ids), 1], -1e6, np.float32)
    data = tf.data.Dataset.from_tensor_slices((ids, labels)).batch(ROWS)
    monitor = EmbeddingMonitor(every=every)
    model.fit(data, verbose=0, callbacks=[monitor])


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]


@pytest.mark.parametrize("built", [True, False])
def test_growth_since_the_initializer_is_told_in_step_1(
    strategy, caplog, built
):
    train(strategy, 60.0, built)
    told = [w for w in warnings_of(caplog) if "table/max_norm" in w]
    assert told[0].startswith("Step 1: table/max_norm is "), told
    assert told[0].endswith(", in step 0 it was 1"), told


def test_growth_before_the_first_report_is_told(strategy, caplog):
    train(strategy, 8.0)  # less than ten times in the first step
    (told,) = warnings_of(caplog)
    assert told.startswith("Step 4: table/max_norm is "), told
    assert told.endswith(", in step 0 it was 1"), told


@pytest.mark.parametrize("start", ["ones", "zeros"])
def test_ordinary_steps_are_no_warning(strategy, caplog, start):
    """Also where all begins at zero: what comes first is the measure then."""
    train(strategy, 0.1, start=start)
    assert not warnings_of(caplog)


def test_growth_from_zero_is_told(strategy, caplog):
    """Each step adds as much, so ten times the first come with the eleventh."""
    train(strategy, 0.125, start="zeros", every=1, steps=11)
    (told,) = warnings_of(caplog)
    assert told.startswith("Step 11: table/max_norm is 1.38, in step 1 "), told
    assert told.endswith("it was 0.125"), told
